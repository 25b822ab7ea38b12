"""Compiles the kernel for Hopper, without a GPU, and says what its threads hand to each other: for `test_turned.py`."""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.model.turned_kernel import TILE, _turn

KINDS = [
    ("u8", None, False),
    ("bf16", tl.float8e4nv, False),
    ("bf16", tl.float8e5, True),
    ("fp32", tl.float8e4nv, False),
    ("fp32", tl.float8e5, True),
]
options = dict(TILE)
tile = {name: options.pop(name) for name in ("ROWS", "COLUMNS")}
for source, narrow, keep in KINDS:
    for multiples in (("source", "target", "columns", "words"), ("source", "target", "columns")):  # of sixteen
        types = {"source": f"*{source}", "target": "*i32", "words": "i32", "columns": "i32"}
        fixed = {"TYPE": narrow, "KEEP": keep, **tile}
        (types if narrow else fixed)["rate"] = "*fp32" if narrow else None
        (types if keep else fixed)["kept"] = "*u8" if keep else None
        names = _turn.arg_names
        made = ASTSource(
            _turn,
            {name: types.get(name, "constexpr") for name in names},
            {(names.index(name),): value for name, value in fixed.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in (*multiples, *({"rate", "kept"} & {*types}))},
        )
        compiled = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)
        print(*re.findall(r"ttg.convert_layout .*?: tensor<(\S+?), #", compiled.asm["ttgir"]))
