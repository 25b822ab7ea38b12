#!/usr/bin/env bash
# Long rows on the GPU machine: OUT=out benchmarks/long.sh JOB...
# Needs what `benchmarks/h200.sh` without a job sets up. Each job has its own time limit; rows go to $OUT/rows.jsonl.
#   tests     gpu tests of tiles, attention and streaming       long      llama-8b, 393,216 tokens, exact, clipped
#   today     llama-8b, 131,072 tokens, and 8 layers of it, 262,144 tokens, not in tiles
#   tiles     the same two in tiles
#   compare   llama-8b, 131,072 tokens, and 4 layers of it, 262,144 tokens, as rows: the code under OLD_SRC, then ours;
#             one of them with LENGTHS
#   document  4 layers of it with rows of which a document has 95 %, and short ones the rest
#   small     llama-8b, 65,536 tokens in 24 GB                  others    gpt-oss-20b and qwen3-14b, 131,072 tokens
#   half      16 of llama-8b's 32 layers, 524,288 tokens        plan      what is planned for each of these
#   gradients attention's, for tensors that lie otherwise in memory; and llama-8b's, 32,768 and 131,072 tokens: how far those
#             of tiles, of layers in turn and of compiled ones are from those of whole rows
#   norms     one step of 131,072 tokens with the optimizer, of whole rows: all of them computed again, and with state that
#             never comes to the GPU
set -u
cd "$(dirname "$0")/.."
. benchmarks/environment.sh

measure() {  # NAME SECONDS STEPS RECIPE SETTINGS [--no-trial]
  local name=$1 limit=$2
  timeout "$limit" python3 benchmarks/long.py "$4" "$OUT/rows.jsonl" "$3" "batch_size=1 $5" "${@:6}" > "$OUT/$name.log" 2>&1
  echo "$name: exit $?"
  grep -E "tokens/s|planned|activations|uncompiled|error|Error" "$OUT/$name.log" | tail -n 8 | cut -c1-220
}

LONG="order=layers tile=16384" EIGHT="shape=num_hidden_layers=8"  # all 32 would take three minutes a pass
for job in "$@"; do
  case $job in
    tests) timeout 580 python3 -m pytest -q -m gpu tests/engine/test_tiles.py tests/engine/test_streamed.py \
      tests/model/test_segment_attention.py tests/model/test_attention.py tests/model/test_tiles.py > "$OUT/tests.log" 2>&1
      echo "tests: exit $?"; tail -n 3 "$OUT/tests.log" ;;
    today)
      measure today-131072 300 1 llama-8b "max_length=131072"
      measure today-262144 580 1 llama-8b "max_length=262144 order=layers inputs=parked tile=none $EIGHT" ;;
    tiles)
      measure tiles-131072 300 1 llama-8b "max_length=131072 inputs=parked $LONG"
      measure tiles-262144 580 1 llama-8b "max_length=262144 inputs=parked $LONG $EIGHT" ;;
    compare | document)
      build_kernel "${OLD_SRC:?where the other code is: its src}"
      more=(--no-trial); [ "$job" = document ] && more+=(--document 0.95)
      for length in ${LENGTHS:-131072 262144}; do
        setting="order=rows recompute=full shape=num_hidden_layers=4 homes=stream"
        [ "$job $length" = "compare 131072" ] && setting="homes=stream"
        for source in "$OLD_SRC" src; do
          PYTHONPATH=$source:build/pkgs measure "$job-$(basename "$(dirname "$PWD/$source")")-$length" 250 2 llama-8b "max_length=$length $setting" "${more[@]}"
        done
      done ;;
    long) measure long 595 1 llama-8b "max_length=393216 inputs=parked $LONG" ;;
    small) measure small 240 2 llama-8b "max_length=65536 gpu_memory=24GB weights=streamed inputs=parked $LONG" ;;
    others)
      measure gpt-oss 300 1 gpt-oss-20b "max_length=131072 states=bf16 weights=resident $LONG"
      measure qwen 300 1 qwen3-14b "max_length=131072 states=bf16 weights=resident $LONG" ;;
    half) measure half 595 1 llama-8b "max_length=524288 weights=streamed inputs=parked:2 tile=16384 shape=num_hidden_layers=16" ;;
    gradients)
      timeout 120 python3 benchmarks/attention_layouts.py > "$OUT/layouts.log" 2>&1; echo "layouts: exit $?"; cat "$OUT/layouts.log"
      for length in 32768 131072; do
        only=(); [ $length = 131072 ] && only=(-- "tiles, compiled, parked" "rows, compiled, full and selected" "rows, compiled" rows)
        timeout 300 python3 benchmarks/long_gradients.py llama-8b "$OUT/gradients.jsonl" $length "${only[@]}" > "$OUT/gradients-$length.log" 2>&1
        echo "gradients $length: exit $?"; grep "norm" "$OUT/gradients-$length.log"
      done ;;
    norms)
      measure rows-full 200 1 llama-8b "max_length=131072 order=rows recompute=full"
      measure rows-host 200 1 llama-8b "max_length=131072 order=rows recompute=full:16 homes=host" ;;
    plan)
      for length in 65536 131072 262144 393216 524288; do
        timeout 120 python3 -m penstock plan llama-8b --batch-size 1 --max-length "$length" > "$OUT/plan-$length.txt" 2>&1
        sed -n 2p "$OUT/plan-$length.txt"
      done ;;
    *) echo "no job $job"; exit 2 ;;
  esac
done
