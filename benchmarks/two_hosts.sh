#!/usr/bin/env bash
# One run across two hosts, as far as one machine can be two: each rank lives in a network namespace of its own, they
# reach each other over a virtual cable and nothing else, and each has its own cache. Namespaces need root and iproute2;
# without, both ends meet over loopback, each with its own cache and, for NCCL, its own name of a host, so that nothing
# but sockets connects them. What it says first is which of the two it is. It passes if the losses are those of one host,
# if every weight has gone over the cable at least once, and if NCCL says that it talked through sockets.
#
#   [DEVICE=cuda] [LOGS=DIRECTORY] benchmarks/two_hosts.sh [PYTHON]
set -euo pipefail

python=${1:-python}
device=${DEVICE:-cpu} # or cuda: both ranks on one GPU, as benchmarks/ranks.sh prepares it
a=penstock-a-$$ b=penstock-b-$$ port=29511
work=$(mktemp -d)
logs=${LOGS:-$work/logs} # what NCCL says
mkdir -p "$logs"
cleanup() {
  kill "${first:-}" "${second:-}" 2>/dev/null || true
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

namespaces() {
  ip netns add "$a" && ip netns add "$b" && ip link add cable netns "$a" type veth peer name cable netns "$b" || return
  ip -n "$a" addr add 10.77.0.1/24 dev cable && ip -n "$b" addr add 10.77.0.2/24 dev cable || return
  local host
  for host in "$a" "$b"; do
    ip -n "$host" link set lo up && ip -n "$host" link set cable up || return
  done
}
if namespaces 2>"$work/why"; then
  network=cable address=10.77.0.1
  echo "two network namespaces with a cable between them"
else
  network=lo address=127.0.0.1
  echo "two ends over loopback, since there are no network namespaces here ($(head -n 1 "$work/why"))"
fi

inside() { # HOST COMMAND...
  local host=$1
  shift
  if [ $network = lo ]; then exec "$@"; else exec ip netns exec "$host" "$@"; fi
}
start() { # namespace, rank, more flags
  local host=$1 rank=$2
  shift 2
  # gloo takes the interface of the host's name unless it is told one; two namespaces share theirs.
  # NCCL would take both for one host, by the same name, and use shared memory.
  PENSTOCK_CACHE=$work/cache-$rank HF_HUB_OFFLINE=1 GLOO_SOCKET_IFNAME=$network NCCL_SOCKET_IFNAME=$network NCCL_HOSTID=$host \
    NCCL_NET=Socket NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_DEBUG_FILE=$logs/nccl-$rank.log \
    inside "$host" "$python" -m penstock train demo --max-steps 4 --batch-size 4 --max-length 128 \
    --prompt None --device "$device" --dtype fp32 --nodes 2 --node-rank "$rank" --rendezvous "$address:$port" "$@"
}
run() { # both ranks; the codes of both
  codes=""
  (start "$a" 0 "$@") & first=$!
  (start "$b" 1 "$@") & second=$!
  wait "$first" && codes=0 || codes=$?
  wait "$second" && codes="$codes 0" || codes="$codes $?"
}

run --output-dir "$work/two"
[ "$codes" = "0 0" ] || { echo "failed: exit codes $codes"; exit 1; }
if [ $network = cable ]; then
  for host in "$a" "$b"; do
    ip netns exec "$host" cat /sys/class/net/cable/statistics/tx_bytes
  done >"$work/sent"
fi
if [ "$device" = cuda ]; then
  for rank in 0 1; do # NCCL names its network even where it then uses another way
    way=$(grep -om 1 "\[send\] via .*" "$logs/nccl-$rank.log") || { echo "failed: rank $rank did not say how it sends"; exit 1; }
    echo "rank $rank: $way"
    if grep "\[\(send\|receive\)\] via\|via P2P\|via SHM" "$logs/nccl-$rank.log" | grep -v "via NET/Socket"; then
      echo "failed: rank $rank does not talk through sockets alone"
      exit 1
    fi
  done
fi
PENSTOCK_CACHE=$work/cache-0 HF_HUB_OFFLINE=1 "$python" -m penstock train demo --max-steps 4 --batch-size 4 \
  --max-length 128 --prompt None --device "$device" --dtype fp32 --quiet --output-dir "$work/one" >/dev/null
"$python" - "$work" <<'PY'
import json, sys
from pathlib import Path

work = Path(sys.argv[1])

def losses(name):
    return [json.loads(line)["loss"] for line in (work / name / "metrics.jsonl").read_text().splitlines()]

one, two = losses("one"), losses("two")
worst = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
print(f"one host:  {one}\ntwo hosts: {two}\nlargest relative difference {worst:.1e}")
assert worst < 1e-4
if (work / "sent").exists():
    sent = [int(line) for line in (work / "sent").read_text().split()]
    weights = sum(file.stat().st_size for file in (work / "two" / "model").glob("*.safetensors"))
    print(f"over the cable: {sent[0] / 1e6:.1f} and {sent[1] / 1e6:.1f} MB, of weights that take {weights / 1e6:.1f} MB")
    assert min(sent) > weights > 0
PY
echo "passed"
