#!/usr/bin/env bash
# Seed-OSS 36B on two GPUs: bash finetune_seed-oss-36b_2gpu.sh superoffload|zerooffload [BATCH_SIZE]
exec bash "$(dirname "$0")/finetune.sh" seed-oss-36b 2 "$@"
