# Sourced, from the root of the repository, by scripts that run where `benchmarks/h200.sh` has set things up.
: "${OUT:=out}"
export OUT PATH="$PWD/build/pkgs/bin:$PATH"
export PYTHONPATH=src:build/pkgs PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True HF_HUB_OFFLINE=1
mkdir -p "$OUT"
