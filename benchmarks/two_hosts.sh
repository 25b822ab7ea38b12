#!/usr/bin/env bash
# One run across two hosts, as far as one machine can be two: each rank lives in a network namespace of its own, they
# reach each other over a virtual cable and nothing else, and each has its own cache. Needs root; without, it says so
# and ends with 77, which test runners take for "skipped".
#
#   benchmarks/two_hosts.sh [PYTHON]
set -euo pipefail

python=${1:-python}
device=${DEVICE:-cpu} # or cuda: both ranks on one GPU, as benchmarks/ranks.sh prepares it
a=penstock-a-$$ b=penstock-b-$$ port=29511
work=$(mktemp -d)

if ! ip netns add "$a" 2>"$work/why"; then
  echo "skipped: network namespaces are not permitted here ($(cat "$work/why"))"
  rm -r "$work"
  exit 77
fi
cleanup() {
  kill "${first:-}" "${second:-}" 2>/dev/null || true
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
ip netns add "$b"
if ! ip link add cable netns "$a" type veth peer name cable netns "$b" 2>"$work/why"; then
  echo "skipped: no virtual cable between namespaces here ($(cat "$work/why"))"
  exit 77
fi
ip -n "$a" addr add 10.77.0.1/24 dev cable
ip -n "$b" addr add 10.77.0.2/24 dev cable
for host in "$a" "$b"; do
  ip -n "$host" link set lo up
  ip -n "$host" link set cable up
done

start() { # namespace, rank, more flags
  local host=$1 rank=$2
  shift 2
  # gloo takes the interface of the host's name unless it is told one; two namespaces share theirs.
  # NCCL would take both for one host, by the same name, and use shared memory.
  PENSTOCK_CACHE=$work/cache-$rank HF_HUB_OFFLINE=1 GLOO_SOCKET_IFNAME=cable NCCL_SOCKET_IFNAME=cable NCCL_HOSTID=$host \
    exec ip netns exec "$host" "$python" -m penstock train demo --max-steps 4 --batch-size 4 --max-length 128 \
    --prompt None --device "$device" --nodes 2 --node-rank "$rank" --rendezvous "10.77.0.1:$port" "$@"
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
PENSTOCK_CACHE=$work/cache-0 HF_HUB_OFFLINE=1 "$python" -m penstock train demo --max-steps 4 --batch-size 4 \
  --max-length 128 --prompt None --device "$device" --quiet --output-dir "$work/one" >/dev/null
"$python" - "$work" <<'PY'
import json, sys
from pathlib import Path

def losses(name):
    return [json.loads(line)["loss"] for line in (Path(sys.argv[1]) / name / "metrics.jsonl").read_text().splitlines()]

one, two = losses("one"), losses("two")
worst = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
print(f"one host:  {one}\ntwo hosts: {two}\nlargest relative difference {worst:.1e}")
assert worst < 1e-4
PY
echo "passed"
