#!/usr/bin/env bash
# Everything that needs the GPU: tests marked gpu, then steps against their floor. Results and logs go to $OUT.
# Usage: OUT=out benchmarks/h200.sh [tests|bench RECIPE [FLAGS]]...
set -u
cd "$(dirname "$0")/.."
: "${OUT:=out}"
mkdir -p "$OUT"
export PYTHONPATH=src:build/pkgs PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True HF_HUB_OFFLINE=1
# A machine without a network takes what it lacks from wheels brought along.
[ -d .gpu-wheels ] && pip install -q --no-index --no-deps --target build/pkgs .gpu-wheels/*.whl > "$OUT/pip.log" 2>&1
suffix=$(python3 -c 'import importlib.machinery as m; print(m.EXTENSION_SUFFIXES[0])')
gcc -O3 -ffp-contract=off -fno-math-errno -shared -fPIC -o "src/penstock/offload/_host_kernel$suffix" \
  src/penstock/offload/host_*.c -lm -lpthread || exit 1
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv > "$OUT/machine.txt"
lscpu | grep -E 'Model name|^CPU\(s\)|NUMA node' >> "$OUT/machine.txt"
free -g | head -2 >> "$OUT/machine.txt"

for job in "$@"; do
  echo "+ $job"
  case $job in
    tests) timeout 420 python3 -m pytest -q -m gpu -p no:cacheprovider tests/offload tests/model > "$OUT/tests.log" 2>&1; tail -n 15 "$OUT/tests.log" ;;
    host) timeout 120 python3 benchmarks/host.py > "$OUT/host.log" 2>&1; tail -n 3 "$OUT/host.log" ;;
    *) timeout 400 python3 benchmarks/step.py $job >> "$OUT/bench.log" 2>&1; tail -n 8 "$OUT/bench.log" ;;
  esac
done
