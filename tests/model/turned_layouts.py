"""Compiles the kernel without a GPU, and says what its threads hand to each other: for `test_turned.py`."""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.model.turned_kernel import TILE, _turn

options = dict(TILE)
tile = {name: options.pop(name) for name in ("ROWS", "COLUMNS")}
names = _turn.arg_names
for capability in map(int, sys.argv[1:]):
    for source in ("u8", "bf16", "fp32"):
        cast = source != "u8"
        for multiples in (("source", "target", "columns", "words"), ("source", "target", "columns")):  # of sixteen
            types = {"source": f"*{source}", "target": "*i32", "words": "i32", "columns": "i32"}
            fixed = {"CAST": cast, **tile}
            (types if cast else fixed)["rate"] = "*fp32" if cast else None
            aligned = (*multiples, "rate") if cast else multiples
            made = ASTSource(
                _turn,
                {name: types.get(name, "constexpr") for name in names},
                {(names.index(name),): value for name, value in fixed.items()},
                {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
            )
            compiled = triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options)
            handed = re.findall(r"ttg.convert_layout .*?: tensor<(\S+?), #", compiled.asm["ttgir"])
            print(capability, source, ",".join(handed))
