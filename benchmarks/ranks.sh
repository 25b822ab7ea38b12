#!/usr/bin/env bash
# Several ranks with NCCL on one GPU, which NCCL allows from 2.30 on: OUT=out NCCL=libnccl.so.2 benchmarks/ranks.sh JOB...
# Needs what `benchmarks/h200.sh` without a job sets up, and NCCL, a build of 2.30 or later that is loaded in place of
# torch's. With MPS the ranks run beside each other; without, they take turns, as in tests of faults: a rank that is killed
# takes the server of MPS with it. NCCL may hang where its blocks of all ranks do not fit the GPU together; by its
# documentation two ranks do by default, and more with fewer blocks (NCCL_MAX_CTAS). What this cannot show is the speed of
# links between GPUs. Each job has its own limit.
#   tests      tests of ranks without faults: whole runs, resume, all homes and formats, experts, compiled layers
#   faults     tests of the launcher: signals, ranks that fail, are killed or run out of memory
#   deepspeed  the engine deepspeed with two ranks: both modes, save and resume
#   overhead   8 layers of llama-8b, one, two and four ranks, the same batch: what of a step is collectives, what is ours
#   runs       whole runs of the same: seconds, lanes, memory beside the plan
#              (DATA=FILE: rows are full if it packs to 32 rows of 4,096 tokens or more, which the demo's data does not)
#   memory     the same with two and four ranks and all state on the host: gradients of a unit make room
#   streamed   the same, with weights on the host too, one micro-batch a step and two or four: seconds and memory beside the plan
#   hosts      two machines, as far as one can be two: NCCL over sockets, between network namespaces or over loopback
set -u
cd "$(dirname "$0")/.."
: "${NCCL:?NCCL=FILE names a libnccl.so of 2.30 or later}" "${DATA:=demo}"
. benchmarks/environment.sh
export LD_PRELOAD=$(realpath "$NCCL") NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_ALGO=RING NCCL_DEBUG=WARN PENSTOCK_SHARE_GPU=1 PYTHONFAULTHANDLER=1
export NCCL_MAX_CTAS=16  # of 132 multiprocessors
one_queue_a_stream() {  # RANKS; with MPS there are fewer, and what waits holds up what it has nothing to do with
  echo "CUDA_DEVICE_MAX_CONNECTIONS=$(($1 < 3 ? 32 : 64 / $1))"  # 128 are too many for the GPU
}
RUNS=$(mktemp -d)  # models and checkpoints; what is to be kept of a run goes to $OUT
trap 'rm -rf "$RUNS"' EXIT

with_mps() {  # COMMAND..., and the server of MPS for it alone
  local pipes logs code
  pipes=$(mktemp -d) logs=$(mktemp -d)
  CUDA_MPS_PIPE_DIRECTORY=$pipes CUDA_MPS_LOG_DIRECTORY=$logs nvidia-cuda-mps-control -d
  CUDA_MPS_PIPE_DIRECTORY=$pipes CUDA_MPS_LOG_DIRECTORY=$logs "$@"
  code=$?
  echo "quit -t 5" | CUDA_MPS_PIPE_DIRECTORY=$pipes timeout 15 nvidia-cuda-mps-control
  return $code
}

TESTS="tests/run/test_several_ranks.py tests/engine/test_fsdp.py tests/engine/test_ranks.py tests/engine/test_meeting.py tests/offload/test_dtensors.py
  tests/offload/test_replicas.py tests/checkpoint/test_export_ranks.py tests/model/test_load_rows.py tests/model/test_initial.py"
FAULTS=tests/machine/test_launch.py

run_tests() {  # NAME WORKERS FILE...
  local name=$1 workers=$2
  shift 2
  NCCL_MAX_CTAS=2 timeout -s INT -k 20 500 python3 -m pytest -v -n "$workers" -o timeout=300 --durations 8 -p no:cacheprovider "$@" \
    > "$OUT/$name.log" 2>&1
  tail -n 25 "$OUT/$name.log"
}

end_ranks() {  # WORD of their command line: ranks that wait inside of NCCL outlive a launcher that was killed
  pgrep -f "$1" | xargs -r kill -ABRT && sleep 2  # whose handler says where they wait
  pgrep -f "$1" | xargs -r kill -9
}

train() {  # NAME SECONDS RANKS FLAGS...
  local name=$1 limit=$2 ranks=$3
  shift 3
  with_mps env "$(one_queue_a_stream "$ranks")" timeout -k 20 "$limit" python3 -m penstock train llama-8b --init random --shape num_hidden_layers=8 --tokenizer demo --data "$DATA" \
    --epochs 100 --max-steps 8 --batch-size 4 --keep 0 --prompt None --gpus "$ranks" --gpu-memory "$((132 / ranks))GB" \
    --output-dir "$RUNS/$name" --overwrite "$@" > "$OUT/$name.log" 2>&1
  local code=$?
  echo "$name: exit $code"
  [ $code = 0 ] || tail -n 3 "$OUT/$name.log" | cut -c1-300
  [ $code = 137 ] && end_ranks "$RUNS/$name"
  rm -rf "$RUNS/$name"/model*
  tar czf "$OUT/runs.tgz" --exclude=checkpoints -C "$RUNS" .
  return $code
}

for job in "$@"; do
  case $job in
    tests) with_mps run_tests tests "${WORKERS:-6}" $TESTS ;;  # its server has 48 clients at most
    faults) run_tests faults "${WORKERS:-8}" $FAULTS ;;
    deepspeed)
      engine="--engine deepspeed --shape num_hidden_layers=2,vocab_size=8192 --max-steps 4"  # checkpoints of 7 GB
      train deepspeed-superoffload 150 2 $engine --mode superoffload
      train deepspeed-zerooffload 150 2 $engine --mode zerooffload --keep 2 --save-every 2
      train deepspeed-resumed 100 2 $engine --mode zerooffload --resume "$RUNS/deepspeed-zerooffload/checkpoints/step-00000002"
      tail -n 1 "$RUNS"/deepspeed-{zerooffload,resumed}/metrics.jsonl | cut -c1-120 ;;  # which should be the same
    overhead)
      for ranks in ${RANKS:-1 2 4}; do
        with_mps env "$(one_queue_a_stream "$ranks")" timeout -k 20 120 python3 -m torch.distributed.run --standalone --nproc-per-node="$ranks" benchmarks/collectives.py "$OUT" \
          llama-8b shape=num_hidden_layers=8 batch_size=4 micro_batch_size=1 recompute=full homes=gpu=0.5,host=0.5 \
          gpu_memory=$((132 / ranks))GB > "$OUT/collectives-$ranks.log" 2>&1
        code=$?
        [ $code = 137 ] && end_ranks benchmarks/collectives.py
        echo "overhead $ranks: exit $code"; tail -n 1 "$OUT/collectives-$ranks.log" | cut -c1-220
      done ;;
    runs)
      for ranks in 1 2 4; do train "ranks-$ranks" 120 "$ranks" --homes gpu=0.5,host=0.5 --micro-batch-size 1 --recompute full; done
      python3 benchmarks/ranks.py "$RUNS"/ranks-1 "$RUNS"/ranks-2 "$RUNS"/ranks-4 | tee "$OUT/ranks.txt" ;;
    memory)
      for ranks in 2 4; do train "host-$ranks" 120 "$ranks" --homes host --micro-batch-size "$((4 / ranks))" --recompute full; done
      python3 benchmarks/ranks.py "$RUNS"/host-2 "$RUNS"/host-4 | tee "$OUT/host.txt" ;;
    streamed)
      for ranks in 2 4; do
        train "streamed-$ranks" 120 "$ranks" --weights streamed --micro-batch-size "$((4 / ranks))" --recompute full || break
        train "streamed-$ranks-again" 120 "$ranks" --weights streamed --batch-size 8 --micro-batch-size 1 --recompute full || break
      done
      python3 benchmarks/ranks.py "$RUNS"/streamed-* | tee "$OUT/streamed.txt" ;;
    hosts) DEVICE=cuda timeout -k 20 200 benchmarks/two_hosts.sh python3 > "$OUT/hosts.log" 2>&1; echo "hosts: exit $?"; tail -n 4 "$OUT/hosts.log" ;;
    *) echo "no job $job"; exit 2 ;;
  esac
done
