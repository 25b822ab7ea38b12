#!/usr/bin/env bash
# Llama 3.3 70B on four GPUs: bash finetune_llama-70b_4gpu.sh superoffload|zerooffload [BATCH_SIZE]
exec bash "$(dirname "$0")/finetune.sh" llama-70b 4 "$@"
