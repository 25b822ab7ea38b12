# Sourced, from the root of the repository, by scripts that run where `benchmarks/h200.sh` has set things up.
: "${OUT:=out}"
export OUT PATH="$PWD/build/pkgs/bin:$PATH"  # DeepSpeed compiles its CPU Adam with ninja
export PYTHONPATH=src:build/pkgs PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True HF_HUB_OFFLINE=1
mkdir -p "$OUT" build
build_kernel() {  # of the C files of a source tree, old or new
  local folder suffix
  folder=$(dirname "$(ls "$1"/penstock/*/host_kernel.c)")
  suffix=$(python3 -c 'import importlib.machinery as m; print(m.EXTENSION_SUFFIXES[0])')
  gcc -O3 -ffp-contract=off -fno-math-errno -shared -fPIC -o "$folder/_host_kernel$suffix" "$folder"/host_*.c -lm -lpthread
}
