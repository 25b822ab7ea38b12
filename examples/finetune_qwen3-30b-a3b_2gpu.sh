#!/usr/bin/env bash
# Qwen3 30B-A3B on two GPUs: bash finetune_qwen3-30b-a3b_2gpu.sh superoffload|zerooffload [BATCH_SIZE]
exec bash "$(dirname "$0")/finetune.sh" qwen3-30b-a3b 2 "$@"
