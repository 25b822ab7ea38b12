#!/usr/bin/env bash
# Steps with streamed weights on the GPU machine: OUT=out benchmarks/streamed.sh JOB...
# Needs what `benchmarks/h200.sh` without a job sets up. Each job has its own time limit; rows go to $OUT/JOB/rows.jsonl.
#   exact     llama-8b, fp32 state, 24 GB and 12 GB             bf16      llama-8b, bf16 moments, 16 rows, 24 GB
#   qwen      qwen3-14b, int8, not clipped, 24 GB               gpt-oss   20 of gpt-oss-20b's 24 layers, 24 GB
#   large     16 of llama-70b's 80 layers, 80 GB                qwen-moe  24 of qwen3-30b-a3b's 48 layers, 24 GB
#   peer      12 layers of llama-8b in 16 GB, beside DeepSpeed    fp8    as bf16, with fp8 products: weights are cast once they are there
set -u
cd "$(dirname "$0")/.."
. benchmarks/environment.sh

measure() {  # NAME SECONDS RECIPE SHARED SETTINGS...
  local name=$1 limit=$2
  shift 2
  timeout "$limit" python3 benchmarks/streamed.py "$1" "$OUT/$name" "weights=streamed inputs=parked $2" "${@:3}" > "$OUT/$name.log" 2>&1
  echo "$name: exit $?"
  grep -E "tokens/s|GPU, |error|Error" "$OUT/$name.log" | tail -n 8 | cut -c1-220
}

for job in "$@"; do
  case $job in
    exact) measure exact 240 llama-8b "batch_size=8 update=after-norm" \
      "micro_batch_size=2 gpu_memory=24GB" "micro_batch_size=1 gpu_memory=12GB" --no-floor ;;
    bf16) measure bf16 220 llama-8b "batch_size=16 update=after-norm states=bf16 gpu_memory=24GB micro_batch_size=4" "order=layers" ;;
    fp8) measure fp8 220 llama-8b "batch_size=16 update=after-norm states=bf16 gpu_memory=24GB micro_batch_size=4 matmul=fp8" "order=layers" ;;
    qwen) measure qwen 200 qwen3-14b "batch_size=8 update=in-backward states=int8 max_grad_norm=0 gpu_memory=24GB micro_batch_size=2" "order=layers" --no-floor ;;
    gpt-oss)
      measure gpt-oss 170 gpt-oss-20b "batch_size=4 micro_batch_size=1 update=in-backward states=int8 max_grad_norm=0 gpu_memory=24GB shape=num_hidden_layers=20" "order=layers" --no-floor ;;
    qwen-moe)
      measure qwen-moe 170 qwen3-30b-a3b "batch_size=8 micro_batch_size=2 update=in-backward states=int8 max_grad_norm=0 gpu_memory=24GB shape=num_hidden_layers=24" "order=layers" --no-floor ;;
    large) measure large 200 llama-70b "batch_size=4 micro_batch_size=1 update=in-backward states=int8 max_grad_norm=0 gpu_memory=80GB shape=num_hidden_layers=16" "order=layers" --no-floor ;;
    peer) timeout 580 python3 -m penstock bench llama-8b --name llama-8b-12-layers --shape num_hidden_layers=12 --batch-size 4 \
      --micro-batch-size 2 --gpu-memory 16GB --weights streamed --updates after-norm --against deepspeed --steps 3 --timeout 330 --timeline \
      --to "$OUT/peer" > "$OUT/peer.log" 2>&1
      echo "peer: exit $?"; tail -n 14 "$OUT/peer.log" | cut -c1-220 ;;
    *) echo "no job $job"; exit 2 ;;
  esac
done
