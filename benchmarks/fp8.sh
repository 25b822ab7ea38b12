#!/usr/bin/env bash
# fp8 products on the GPU machine: OUT=out benchmarks/fp8.sh JOB...
# Needs what `benchmarks/h200.sh` without a job sets up. Each job has its own time limit; results go to $OUT.
#   tests      what is marked gpu of the tests of fp8        four       four layers of llama-8b, compiled: does it run
#   llama      llama-8b 4 x 4096, clipped, all KINDS         qwen       qwen3-14b 4 x 4096, clipped and not, all KINDS
#   gradients  relative error by layer: one and all of llama-8b's layers with random weights, then MODEL on DATA
#   layers     what each layer of MODEL in fp8 adds to its loss on DATA
#   "quality FILE"  MODEL on these rows, 200 steps, three seeds, all KINDS; without FILE on DATA, or else the demo's
#   plot       losses of all rows of `quality` in $OUT and in BESIDE, as .svg and .txt; needs matplotlib
# MODEL may be a GGUF file, which is unpacked once. BESIDE names a fp8_quality.jsonl of another run, for the kind that is
# not in KINDS. Rows at once and recompute are given: the plan may choose others for each kind.
set -u
cd "$(dirname "$0")/.."
: "${MODEL:=demo}" "${DATA:=demo}" "${KINDS:=bf16 fp8}" "${BESIDE:=}"
. benchmarks/environment.sh

measure() {  # NAME SECONDS RECIPE FLAGS...
  local name=$1 limit=$2
  shift 2
  timeout -k 10 "$limit" python3 -m penstock bench "$@" --to "$OUT/$name" > "$OUT/$name-$matmul.log" 2>&1
  echo "$name $matmul: exit $?"
  grep -E "fp8: |of the floor|error|Error|matrix product" "$OUT/$name-$matmul.log" | tail -n 8 | cut -c1-220
}

unpacked() {  # MODEL as a directory, which loads in a second where a GGUF file takes twenty
  local place=build/unpacked/$(basename "$MODEL" .gguf)
  case $MODEL in *.gguf) ;; *) echo "$MODEL"; return ;; esac
  if [ ! -d "$place" ]; then  # whole or not at all: a time limit may end this
    rm -rf "$place.part"
    python3 - "$MODEL" "$place.part" >&2 <<'PYTHON' || return 1
import dataclasses, sys, torch
from penstock.model.load import load_config, load_model, load_tokenizer
from penstock.recipe.presets import PRESETS

recipe = dataclasses.replace(PRESETS["smollm2-135m"], model=sys.argv[1], dtype="fp32")
load_model(recipe, load_config(recipe), torch.device("cpu"), print).save_pretrained(sys.argv[2])
load_tokenizer(recipe).save_pretrained(sys.argv[2])
PYTHON
    mv "$place.part" "$place" || return 1
  fi
  echo "$place"
}

for job in "$@"; do
  case $job in
    tests) timeout 400 python3 -m pytest -q -n "${WORKERS:-8}" -m gpu -p no:cacheprovider tests/model/test_fp8.py tests/model/test_turned.py tests/model/test_compiled.py tests/engine/test_fp8.py > "$OUT/fp8-tests.log" 2>&1
      echo "tests: exit $?"; tail -n 8 "$OUT/fp8-tests.log" ;;
    four) matmul=fp8; measure four 150 llama-8b --shape num_hidden_layers=4 --batch-size 2 --micro-batch-size 1 --recompute none \
      --matmul fp8 --updates after-norm --steps 3 ;;
    llama) for matmul in $KINDS; do
        measure llama 200 llama-8b --micro-batch-size 4 --recompute none --updates after-norm --matmul $matmul --steps 8
      done ;;
    qwen) for matmul in $KINDS; do
        measure qwen 280 qwen3-14b --micro-batch-size 4 --recompute selected --matmul $matmul --steps 5
      done ;;
    steps)
      recomputes=(none selected full full:1)
      for n in $(seq 12); do
        TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) timeout 150 python3 benchmarks/compiled_steps.py fp8 "${recomputes[n % 4]}" $((n % 3 % 2 + 1)) 500 \
          > "$OUT/steps-$n.log" 2>&1 &
      done
      wait
      tail -qn 1 "$OUT"/steps-*.log | cut -c1-300 | tee "$OUT/steps.txt" ;;
    gradients)
      model=$(unpacked) || exit 1
      for work in "preset=llama-8b init=random shape=num_hidden_layers=1 max_length=4096" "preset=llama-8b init=random max_length=4096" \
        "preset=smollm2-135m model=$model data=$DATA max_length=2048"; do
        timeout 200 python3 benchmarks/fp8_quality.py gradients "$OUT" $work batch_size=1 micro_batch_size=1 > "$OUT/fp8-gradients.log" 2>&1
        echo "gradients: exit $?"; grep -E "^layer|loss|rror" "$OUT/fp8-gradients.log" | cut -c1-200 | sed -n '1,4p;$p'
      done ;;
    layers)
      model=$(unpacked) || exit 1
      timeout 100 python3 benchmarks/fp8_quality.py layers "$OUT" preset=smollm2-135m "model=$model" "data=$DATA" \
      batch_size=8 micro_batch_size=8 max_length=2048 > "$OUT/fp8-layers.log" 2>&1
      echo "layers: exit $?"; tail -n 5 "$OUT/fp8-layers.log" ;;
    quality | quality\ *) # seeds side by side: such a model leaves most of the GPU to others
      model=$(unpacked) || exit 1
      data=${job#quality} data=${data# } data=${data:-$DATA}
      for seed in 1 2 3; do
        timeout 500 python3 benchmarks/fp8_quality.py train "$OUT/seed-$seed" --seeds $seed --matmuls "${KINDS// /,}" preset=smollm2-135m "model=$model" "data=$data" \
          batch_size=4 micro_batch_size=4 max_length=512 data_percent=100 validation=0.1 epochs=100 max_steps=200 eval_every=25 prompt=null \
          > "$OUT/fp8-quality-$(basename "$data")-$seed.log" 2>&1 &
      done
      wait
      cat "$OUT"/seed-*/fp8_quality.jsonl > "$OUT/fp8_quality.jsonl"
      python3 benchmarks/fp8_quality.py summary "$OUT" ${BESIDE:+--beside "$BESIDE"}
      grep -hE "^[A-Za-z.]*Error" "$OUT"/fp8-quality-*.log ;;
    plot) python3 benchmarks/fp8_quality.py plot "$OUT" ${BESIDE:+--beside "$BESIDE"} ;;
    *) echo "no job $job"; exit 2 ;;
  esac
done
