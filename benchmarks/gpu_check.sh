#!/usr/bin/env bash
# The whole path on a GPU: tests marked gpu, then the demo through the command, bf16 working weights.
# Usage: OUT=out benchmarks/gpu_check.sh
set -u
cd "$(dirname "$0")/.."
: "${OUT:=out}"
export OUT
bash benchmarks/h200.sh tests
export PYTHONPATH=src:build/pkgs HF_HUB_OFFLINE=1
timeout 200 python3 -m penstock train demo --output-dir "$OUT/run" --json > "$OUT/demo.json" 2> "$OUT/demo.log"
echo "exit $?"; tail -n 4 "$OUT/demo.log"; cat "$OUT/demo.json"
timeout 60 python3 -m penstock generate "$OUT/run" "What is the capital of Spain?"
for preset in llama-8b qwen3-30b-a3b gpt-oss-20b; do
  timeout 120 python3 -m penstock train "$preset" --init random --tokenizer demo --data demo --epochs 4 --max-length 1024 \
    --shape num_hidden_layers=2 --lr 1e-3 --keep 0 --output-dir "$OUT/$preset" --json 2> "$OUT/$preset.log" | cut -c 1-200
done
rm -rf "$OUT"/run "$OUT"/llama-8b "$OUT"/qwen3-30b-a3b "$OUT"/gpt-oss-20b
