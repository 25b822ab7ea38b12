#!/usr/bin/env bash
# Qwen3 14B on one GPU: bash finetune_qwen3-14b_1gpu.sh superoffload|zerooffload [BATCH_SIZE]
exec bash "$(dirname "$0")/finetune.sh" qwen3-14b 1 "$@"
