#!/usr/bin/env bash
# What the launch scripts beside it share, and the way to any other model:
#   bash finetune.sh PRESET|MODEL|RECIPE.yaml GPUS superoffload|zerooffload [BATCH_SIZE]
# MODEL is a Hub name or a directory, trained with the settings that the presets share; RECIPE.yaml has its own.
#
# The run is written beside the scripts, in NAME_MODE_output/, and what it says is added to NAME_MODE_output.log. NAME is
# the preset, the last part of the model's name, or the recipe's file without .yaml; trackers call the run NAME-MODE.
#   ENGINE=deepspeed     DeepSpeed ZeRO-3, as the reference runs it, instead of our own engine
#   GPUS=1               another number of ranks than the script's own
#   EXTRA_ARGS="..."     more flags of `penstock train`, which win over those here, such as --dry-run
#   PYTHON=python3       the interpreter that penstock is installed in
set -euo pipefail

what=${1:-} gpus=${GPUS:-${2:-}} mode=${3:-} batch_size=${4:-4} engine=${ENGINE:-penstock}
python=${PYTHON:-python3}
if [[ -z $what || -z $gpus || ($mode != superoffload && $mode != zerooffload) ]]; then
  script="finetune.sh PRESET|MODEL|RECIPE.yaml GPUS"
  if [[ -f $(dirname "$0")/finetune_${what}_${2:-}gpu.sh ]]; then script=finetune_${what}_${2}gpu.sh; fi
  echo "usage: bash $script superoffload|zerooffload [BATCH_SIZE]" >&2
  exit 2
fi

is_preset="import sys; from penstock.recipe.presets import PRESETS; sys.exit(0 if sys.argv[1] in PRESETS else 3)"
recipe=$what name=$(basename "$what")
if [[ $what == *.yaml || $what == *.yml ]]; then
  name=${name%.*}
elif ! "$python" -c "$is_preset" "$what"; then
  recipe=llama-8b
fi
flags=(--name "$name-$mode" --gpus "$gpus" --engine "$engine" --mode "$mode" --batch-size "$batch_size")
if [[ $recipe != "$what" ]]; then
  flags+=(--model "$what")
  if [[ $engine == deepspeed ]]; then flags+=(--offload-ratio 0.9); fi
fi
# The reference gives a ratio to SuperOffload only; its ZeRO-Offload keeps all state on the host.
if [[ $engine == deepspeed && $mode == zerooffload ]]; then flags+=(--offload-ratio 1); fi

output=$(cd "$(dirname "$0")" && pwd)/${name}_${mode}_output
# Added, not written over: a start that is refused, a dry run and a resumed run must not cost the log of the run. And it
# outlives Ctrl-C, or nobody would see what the run says while it saves and ends.
# shellcheck disable=SC2086  # EXTRA_ARGS is a list of words
"$python" -m penstock train "$recipe" "${flags[@]}" --output-dir "$output" ${EXTRA_ARGS:-} 2>&1 |
  tee --append --ignore-interrupts "$output.log"
