#!/usr/bin/env bash
# The engine `deepspeed` on a GPU: both modes with llama-8b shapes, five steps each; losses of the demo model beside our
# own engine's; and a resume with a share of the state on the GPU. Results go to $OUT/deepspeed_engine.jsonl.
# Usage: OUT=out [RATIO=0.3] benchmarks/deepspeed_engine.sh [small | steps]   only the demo model, or only llama-8b
# 0.3 fits 125 GiB of host memory and 140 GB on the GPU; the reference's 0.8 does not.
set -u
cd "$(dirname "$0")/.."
: "${OUT:=out}" "${RATIO:=0.3}"
mkdir -p "$OUT"
export PATH="$PWD/build/pkgs/bin:$PATH"  # DeepSpeed compiles its CPU Adam with ninja
export PYTHONPATH=src:build/pkgs PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True HF_HUB_OFFLINE=1
mkdir -p build
[ -d .gpu-wheels ] && pip install -q --no-index --no-deps --target build/pkgs .gpu-wheels/*.whl > build/pip.log 2>&1

run() {
  echo "+ $*"
  timeout -k 10 "${LIMIT:-200}" python3 benchmarks/deepspeed_engine.py "$@" \
    >> "$OUT/deepspeed_engine.jsonl" 2>> "$OUT/deepspeed_engine.log"
  echo "exit $?"
}

if [ "${1:-small}" = small ]; then
  run curve penstock superoffload 1 40
  run curve deepspeed zerooffload 1 40
  run curve deepspeed superoffload 0.5 40
  run resume 1
  run resume 0.5
fi
if [ "${1:-steps}" = steps ]; then
  run step zerooffload "$RATIO"
  run step superoffload "$RATIO"
fi
python3 - "$OUT/deepspeed_engine.jsonl" <<'PYTHON'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1]) if line.startswith("{")]
curves = [row for row in rows if row["command"] == "curve"]
for row in curves:
    gap = max(abs(a - b) for a, b in zip(row["losses"], curves[0]["losses"]))
    print(row["engine"], row["mode"], row["ratio"], f"largest difference of a step's loss {gap:.2e}")
for row in rows:
    if row["command"] == "step":
        print(row["mode"], row["ratio"], f"{sorted(row['step_s'])[2]:.2f} s a step, {row['gpu_gb']:.0f} GB on the GPU")
    if row["command"] == "resume":
        print("resume at ratio", row["ratio"], "the same bits" if row["same"] else "NOT the same bits")
PYTHON
