#!/usr/bin/env bash
# What the plan predicts against what a step takes, on this machine: peak GPU memory, host memory, seconds.
# Usage: OUT=out [STEPS=5] benchmarks/plan_check.sh ["[SECONDS] RECIPE [FLAGS]"]...   SECONDS: limit of the bench, or 200
# Every job is planned with rates measured here, then run by `penstock bench` with random weights; plan_check.py puts
# both side by side in $OUT/plan_check.txt. About two minutes a job. Wanted: memory within 5 %, steps within 15 %.
# The rows of all benches are in $OUT/rows.jsonl, the plans in $OUT/plans.jsonl.
set -u
cd "$(dirname "$0")/.."
: "${OUT:=out}"
mkdir -p "$OUT"
export OUT PYTHONPATH=src:build/pkgs PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PENSTOCK_CACHE="$PWD/build/plan-check-cache"
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
bash benchmarks/h200.sh  # builds the C kernel and unpacks wheels where there is no network
if [ $# -eq 0 ]; then
  set -- "llama-8b --micro-batch-size 1 --recompute none" "qwen3-14b" "qwen3-14b --max-grad-norm 0" "phi-4" \
    "gpt-oss-20b --states bf16" "qwen3-30b-a3b --states int8" "330 seed-oss-36b --states int8 --max-grad-norm 0"
fi
for job in "$@"; do
  limit=200
  case $job in [0-9]*) limit=${job%% *} job=${job#* } ;; esac
  case $job in *max-grad-norm\ 0*) update=in-backward ;; *) update=after-norm ;; esac
  echo "+ $job"
  plan=$(timeout 60 python3 -m penstock plan $job --json 2>> "$OUT/plan_check.log") || echo "plan: exit $?"
  timeout -k 10 "$limit" python3 -m penstock bench $job --updates "$update" --steps "${STEPS:-5}" --to "$OUT" \
    >> "$OUT/plan_check.log" 2>&1 || echo "bench: exit $?"
  echo "${plan:-{\}}" | tr -d '\n' >> "$OUT/plans.jsonl"
  echo >> "$OUT/plans.jsonl"
done
python3 benchmarks/plan_check.py "$OUT" | tee "$OUT/plan_check.txt"
