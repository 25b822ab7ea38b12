#!/usr/bin/env bash
# Several ranks with NCCL on one GPU, which NCCL allows from 2.30 on: OUT=out NCCL=libnccl.so.2 benchmarks/ranks.sh JOB...
# Needs what `benchmarks/h200.sh` without a job sets up, and NCCL, a build of 2.30 or later that is loaded in place of
# torch's. With MPS the ranks run beside each other; without, they take turns, as in tests of faults: a rank that is killed
# takes the server of MPS with it. NCCL may hang where its blocks of all ranks do not fit the GPU together; by its
# documentation two ranks do by default, and more with fewer blocks (NCCL_MAX_CTAS). What this cannot show is the speed of
# links between GPUs. Each job has its own limit. All that is to be kept, logs, tables, traces and what runs noted, lies
# in one file, $OUT/ranks-JOB-JOB.tgz, made anew after each job. The exit code is 1 where anything failed.
#   tests      tests of ranks without faults: whole runs, resume, all homes and formats, experts, compiled layers.
#              Takes up to 500 s: where a call may last 600 s, it needs one of its own
#   faults     tests of the launcher: signals, ranks that fail, are killed or run out of memory
#   deepspeed  the engine deepspeed with two ranks: both modes, save and resume, and that a resumed run has the same loss
#   overhead   8 layers of llama-8b, RANKS="1 2 4" ranks, the same batch: what of a step is collectives, what is ours.
#              WAYS="after-norm", or more of in-backward (updates), stream (homes), streamed (weights)
#   runs       whole runs of the same: seconds, lanes, memory beside the plan, which may be 5 % off
#              (DATA=FILE: rows are full if it packs to 32 rows of 4,096 tokens or more, which the demo's data does not)
#   memory     the same with one micro-batch a step, where gradients of a unit make room: all state on the host with two
#              and four ranks, and short runs with two: state that streams, int8, not clipped, 4 layers of qwen3-30b-a3b.
#              RUNS="host-2 experts-2" chooses: NAME-RANKS of host, stream, int8, unclipped, experts
#   streamed   the same, with weights on the host too, one micro-batch a step and two or four: seconds and memory beside the plan
#   hosts      two machines, as far as one can be two: NCCL over sockets, between network namespaces or over loopback
set -u
[ $# -gt 0 ] || { echo "which job?"; exit 2; }
cd "$(dirname "$0")/.." || exit
: "${NCCL:?NCCL=FILE names a libnccl.so of 2.30 or later}" "${DATA:=demo}"
. benchmarks/environment.sh
LD_PRELOAD=$(realpath "$NCCL") || exit
export LD_PRELOAD NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_ALGO=RING NCCL_DEBUG=WARN PENSTOCK_SHARE_GPU=1 PYTHONFAULTHANDLER=1
export NCCL_MAX_CTAS=16  # of 132 multiprocessors
command -v pgrep > /dev/null || echo "there is no pgrep: ranks that outlive a launcher that was killed will stay" >&2
one_queue_a_stream() {  # RANKS; with MPS there are fewer, and what waits holds up what it has nothing to do with
  echo "CUDA_DEVICE_MAX_CONNECTIONS=$(($1 < 3 ? 32 : 64 / $1))"  # 128 are too many for the GPU
}

KEPT=$(mktemp -d) failed=0
ARCHIVE=ranks$(printf -- '-%s' "$@").tgz
mkdir "$KEPT/runs"
pack() {
  tar czf "$OUT/$ARCHIVE.part" --exclude=checkpoints --exclude='*.safetensors' -C "$KEPT" . && mv "$OUT/$ARCHIVE.part" "$OUT/$ARCHIVE"
}
trap 'pack; rm -rf "$KEPT"' EXIT
trap 'exit 143' TERM

ended() {  # NAME CODE
  echo "$1: exit $2"
  [ "$2" = 0 ] || failed=1
  return "$2"
}

with_mps() {  # COMMAND..., and the server of MPS for it alone
  local pipes logs code
  pipes=$(mktemp -d) logs=$(mktemp -d)
  CUDA_MPS_PIPE_DIRECTORY=$pipes CUDA_MPS_LOG_DIRECTORY=$logs nvidia-cuda-mps-control -d
  CUDA_MPS_PIPE_DIRECTORY=$pipes CUDA_MPS_LOG_DIRECTORY=$logs "$@"
  code=$?
  echo "quit -t 5" | CUDA_MPS_PIPE_DIRECTORY=$pipes timeout 15 nvidia-cuda-mps-control
  return $code
}

TESTS=(tests/run/test_several_ranks.py tests/engine/test_fsdp.py tests/engine/test_ranks.py tests/engine/test_meeting.py
  tests/offload/test_dtensors.py tests/offload/test_replicas.py tests/checkpoint/test_export_ranks.py
  tests/model/test_load_rows.py tests/model/test_initial.py tests/engine/test_fp8.py)
FAULTS=(tests/machine/test_launch.py)

run_tests() {  # NAME WORKERS FILE...
  local name=$1 workers=$2 code
  shift 2
  # Ranks have 0.6 of a test's limit: three that compile, as in the longest tests, take more than three minutes.
  NCCL_MAX_CTAS=2 timeout -s INT -k 20 500 python3 -m pytest -v -n "$workers" -o timeout=450 --durations 8 -p no:cacheprovider "$@" \
    > "$KEPT/$name.log" 2>&1
  code=$?
  tail -n 25 "$KEPT/$name.log"
  return $code
}

end_ranks() {  # WORD of their command line: ranks that wait inside of NCCL outlive a launcher that was killed
  command -v pgrep > /dev/null || return
  pgrep -f "$1" | xargs -r kill -ABRT && sleep 2  # whose handler says where they wait
  pgrep -f "$1" | xargs -r kill -9
}

train() {  # NAME SECONDS RANKS RECIPE FLAGS...
  local name=$1 limit=$2 ranks=$3 recipe=$4 code
  shift 4
  with_mps env "$(one_queue_a_stream "$ranks")" timeout -k 20 "$limit" python3 -m penstock train "$recipe" --init random --shape num_hidden_layers=8 --tokenizer demo --data "$DATA" \
    --epochs 100 --max-steps 8 --batch-size 4 --keep 0 --prompt None --gpus "$ranks" --gpu-memory "$((132 / ranks))GB" \
    --output-dir "$KEPT/runs/$name" --overwrite "$@" > "$KEPT/$name.log" 2>&1
  code=$?
  [ $code = 0 ] || tail -n 3 "$KEPT/$name.log" | cut -c1-300
  [ $code = 137 ] && end_ranks "$KEPT/runs/$name"
  rm -rf "$KEPT/runs/$name"/model*
  ended "$name" $code
}

table() {  # NAME RUN...: runs in one table, with their memory beside the plan
  local name=$1 code
  shift
  python3 benchmarks/ranks.py "${@/#/$KEPT/runs/}" > "$KEPT/$name.txt"
  code=$?
  cat "$KEPT/$name.txt"
  ended "table of $name" $code
}

same_end() {  # RUN RUN: the losses after their last step agree
  python3 - "$KEPT/runs/$1" "$KEPT/runs/$2" <<'PYTHON'
import json, sys
from pathlib import Path

one, two = (json.loads((Path(run) / "metrics.jsonl").read_text().splitlines()[-1]) for run in sys.argv[1:])
off = abs(two["loss"] / one["loss"] - 1)
print(f"step {one['step']}: loss {one['loss']}; resumed, step {two['step']}: {two['loss']}, {off:.1e} off")
sys.exit(one["step"] != two["step"] or not off < 1e-4)
PYTHON
}

for job in "$@"; do
  case $job in
    tests) with_mps run_tests tests "${WORKERS:-6}" "${TESTS[@]}"; ended tests $? ;;  # its server has 48 clients at most
    faults) run_tests faults "${WORKERS:-8}" "${FAULTS[@]}"; ended faults $? ;;
    deepspeed)
      engine=(--engine deepspeed --shape "num_hidden_layers=2,vocab_size=8192" --max-steps 4)  # checkpoints of 7 GB
      train deepspeed-superoffload 150 2 llama-8b "${engine[@]}" --mode superoffload
      train deepspeed-zerooffload 150 2 llama-8b "${engine[@]}" --mode zerooffload --keep 2 --save-every 2
      train deepspeed-resumed 100 2 llama-8b "${engine[@]}" --mode zerooffload --resume "$KEPT/runs/deepspeed-zerooffload/checkpoints/step-00000002"
      same_end deepspeed-zerooffload deepspeed-resumed; ended "the same after a resume" $? ;;
    overhead)
      for way in ${WAYS:-after-norm}; do
        case $way in
          after-norm) settings=("homes=gpu=0.5,host=0.5") ;;
          in-backward) settings=("homes=gpu=0.5,host=0.5" max_grad_norm=0) ;;
          stream) settings=(homes=stream) ;;
          streamed) settings=(weights=streamed) ;;
          *) echo "no way $way"; exit 2 ;;
        esac
        for ranks in ${RANKS:-1 2 4}; do
          log=$KEPT/overhead-$way-$ranks.log
          with_mps env "$(one_queue_a_stream "$ranks")" timeout -k 20 120 python3 -m torch.distributed.run --standalone --nproc-per-node="$ranks" benchmarks/collectives.py "$KEPT/$way" \
            llama-8b shape=num_hidden_layers=8 batch_size=4 micro_batch_size=1 recompute=full "${settings[@]}" \
            gpu_memory=$((132 / ranks))GB > "$log" 2>&1
          code=$?
          [ $code = 137 ] && end_ranks benchmarks/collectives.py
          tail -n 1 "$log" | cut -c1-300
          ended "overhead $way $ranks" $code
        done
      done ;;
    runs)
      for ranks in 1 2 4; do train "ranks-$ranks" 120 "$ranks" llama-8b --homes gpu=0.5,host=0.5 --micro-batch-size 1 --recompute full; done
      table ranks ranks-1 ranks-2 ranks-4 ;;
    memory)
      chosen=()
      for name in ${RUNS:-host-2 host-4 stream-2 int8-2 unclipped-2 experts-2}; do
        ranks=${name##*-} recipe=llama-8b
        case ${name%-*} in
          host) flags=(--homes host) ;;
          stream) flags=(--homes stream --max-steps 5) ;;
          int8) flags=(--states int8 --homes "gpu=0.5,host=0.5" --max-steps 5) ;;
          unclipped) flags=(--max-grad-norm 0 --homes "gpu=0.5,host=0.5" --max-steps 5) ;;
          experts) recipe=qwen3-30b-a3b flags=(--shape num_hidden_layers=4 --homes "gpu=0.5,host=0.5" --max-steps 5) ;;
          *) echo "no run $name"; exit 2 ;;
        esac
        train "$name" 120 "$ranks" "$recipe" --micro-batch-size "$((4 / ranks))" --recompute full "${flags[@]}"
        chosen+=("$name")
      done
      table memory "${chosen[@]}" ;;
    streamed)
      chosen=()
      for ranks in 2 4; do
        chosen+=("streamed-$ranks" "streamed-$ranks-again")
        train "streamed-$ranks" 120 "$ranks" llama-8b --weights streamed --micro-batch-size "$((4 / ranks))" --recompute full || break
        train "streamed-$ranks-again" 120 "$ranks" llama-8b --weights streamed --batch-size 8 --micro-batch-size 1 --recompute full || break
      done
      table streamed "${chosen[@]}" ;;
    hosts)
      DEVICE=cuda LOGS="$KEPT/hosts" timeout -k 20 200 benchmarks/two_hosts.sh python3 > "$KEPT/hosts.log" 2>&1
      code=$?
      tail -n 6 "$KEPT/hosts.log"
      ended hosts $code ;;
    *) echo "no job $job"; exit 2 ;;
  esac
  pack
done
exit $failed
