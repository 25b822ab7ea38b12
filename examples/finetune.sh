#!/usr/bin/env bash
# What the launch scripts beside it share: bash finetune.sh PRESET GPUS MODE [BATCH_SIZE]
#
# The run is written beside the scripts, in PRESET_MODE_output/, and what it says in PRESET_MODE_output.log.
#   ENGINE=deepspeed     DeepSpeed ZeRO-3, as the reference runs it, instead of our own engine
#   GPUS=1               another number of ranks than the script's own
#   EXTRA_ARGS="..."     more flags of `penstock train`, which win over those here, such as --dry-run
#   PYTHON=python3       the interpreter that penstock is installed in
set -euo pipefail

preset=$1 gpus=${GPUS:-$2} mode=${3:-} batch_size=${4:-4} engine=${ENGINE:-penstock}
if [[ $mode != superoffload && $mode != zerooffload ]]; then
  echo "usage: bash finetune_${preset}_${2}gpu.sh superoffload|zerooffload [BATCH_SIZE]" >&2
  exit 2
fi

flags=(--gpus "$gpus" --engine "$engine" --mode "$mode" --batch-size "$batch_size")
# The reference gives a ratio to SuperOffload only; its ZeRO-Offload keeps all state on the host.
if [[ $engine == deepspeed && $mode == zerooffload ]]; then flags+=(--offload-ratio 1); fi

output=$(cd "$(dirname "$0")" && pwd)/${preset}_${mode}_output
# shellcheck disable=SC2086  # EXTRA_ARGS is a list of words
"${PYTHON:-python3}" -m penstock train "$preset" "${flags[@]}" --output-dir "$output" ${EXTRA_ARGS:-} 2>&1 |
  tee "$output.log"
