#!/usr/bin/env bash
# gpt-oss 20B on one GPU: bash finetune_gpt-oss-20b_1gpu.sh superoffload|zerooffload [BATCH_SIZE]
exec bash "$(dirname "$0")/finetune.sh" gpt-oss-20b 1 "$@"
