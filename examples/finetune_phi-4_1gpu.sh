#!/usr/bin/env bash
# Phi-4 on one GPU: bash finetune_phi-4_1gpu.sh superoffload|zerooffload [BATCH_SIZE]
exec bash "$(dirname "$0")/finetune.sh" phi-4 1 "$@"
