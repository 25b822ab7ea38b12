#!/usr/bin/env bash
# Everything that needs the GPU: tests marked gpu, the host side, and `penstock bench`. Results and logs go to $OUT.
# Usage: OUT=out benchmarks/h200.sh [tests | sanitizer | host | curves | "SCRIPT.py ARGUMENTS" | "[SECONDS] RECIPE [FLAGS]"]...
# Each job has a time limit of its own; for a bench it is SECONDS, or 560; for a script of this directory 200.
#   OUT=out benchmarks/h200.sh host "300 llama-8b --micro-batch-size 1 --recompute none" \
#     "560 llama-8b --against deepspeed,torchao,flashoptim --timeout 150 --steps 4"
#
# On a machine without a network, .gpu-wheels/ (made by wheels.sh elsewhere, not in the repository) brings what it lacks.
set -u
cd "$(dirname "$0")/.."
. benchmarks/environment.sh
[ -d .gpu-wheels ] && pip install -q --no-index --no-deps --target build/pkgs .gpu-wheels/*.whl > build/pip.log 2>&1
build_kernel src || exit 1
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv > "$OUT/machine.txt"
lscpu | grep -E 'Model name|^CPU\(s\)|NUMA node' >> "$OUT/machine.txt"
free -g | head -2 >> "$OUT/machine.txt"

for job in "$@"; do
  echo "+ $job"
  case $job in
    # The stream sanitizer sees torch's own operations of the calling thread: another look than that of the CPU tests.
    # It keeps all that it saw, and so gets slower: eight processes with a share of the tests each.
    sanitizer) TORCH_CUDA_SANITIZER=1 timeout 560 python3 -m pytest -q -n "${WORKERS:-8}" -m gpu -p no:cacheprovider --ignore tests/data tests > "$OUT/sanitizer.log" 2>&1; tail -n 15 "$OUT/sanitizer.log" ;;
    tests) timeout 400 python3 -m pytest -q -n "${WORKERS:-0}" -m gpu -p no:cacheprovider --ignore tests/data tests > "$OUT/tests.log" 2>&1; tail -n 15 "$OUT/tests.log" ;;
    curves) timeout 300 python3 benchmarks/curves.py measure "$OUT" > "$OUT/curves.log" 2>&1; tail -n 20 "$OUT/curves.log" ;;
    host) timeout 120 python3 benchmarks/host.py > "$OUT/host.log" 2>&1; tail -n 3 "$OUT/host.log" ;;
    *.py | *.py\ *) timeout 200 python3 benchmarks/$job > "$OUT/${job%%.py*}.log" 2>&1; echo "exit $?"; tail -n 24 "$OUT/${job%%.py*}.log" ;;
    # Another checkout's src under OLD_SRC and ours, one after the other, ROUNDS times: "compare RECIPE [FLAGS]".
    compare\ *) build_kernel "$OLD_SRC" || exit 1
      for round in $(seq "${ROUNDS:-2}"); do
        for tree in old new; do
          path=src; [ $tree = old ] && path=$OLD_SRC
          PYTHONPATH=$path:build/pkgs timeout 200 python3 -m penstock bench ${job#compare } --to "$OUT/compare/$tree" \
            >> "$OUT/compare.log" 2>&1
          echo "$tree $round: exit $?"
        done
      done
      for tree in old new; do echo $tree; cat "$OUT/compare/$tree/table.txt"; done ;;
    *) limit=560
      case $job in [0-9]*) limit=${job%% *} job=${job#* } ;; esac
      timeout -k 10 "$limit" python3 -m penstock bench $job --to "$OUT" >> "$OUT/bench.log" 2>&1
      echo "exit $?"; tail -n 14 "$OUT/bench.log" ;;
  esac
done
