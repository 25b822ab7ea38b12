#!/usr/bin/env bash
# Llama 3.1 8B on one GPU: bash finetune_llama-8b_1gpu.sh superoffload|zerooffload [BATCH_SIZE]
exec bash "$(dirname "$0")/finetune.sh" llama-8b 1 "$@"
