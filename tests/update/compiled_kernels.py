"""Compiles the kernels for GPUs that are not here, and counts the fused operations in them: for `test_adamw.py`."""

import itertools
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.plan.layout import BLOCK, SPAN_LANES, SPAN_ROWS
from penstock.update.gpu_kernels import PROGRAM, _adamw, _span_sums


def compiled(kernel, capability, types, fixed):
    names = kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
    made = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        aligned,
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(made, target=target, options={"num_warps": 4, "enable_fp_fusion": False}).asm["ptx"]


for capability in map(int, sys.argv[1:]):
    for form, weight in itertools.product(("fp32", "bf16", "int8"), ("bf16", "fp32")):
        moments = {"fp32": ("*fp32", "*fp32"), "bf16": ("*bf16", "*bf16"), "int8": ("*i8", "*u8")}[form]
        whole = f"*{weight}"
        types = {
            "weight": whole, "gradient": whole, "remainder": "*i16" if weight == "bf16" else whole,
            "first": moments[0], "second": moments[1], "scalars": "*fp32", "n": "i32", "start": "i64", "salt": "i32",
            **dict.fromkeys(("first_scale", "second_scale"), "*fp32" if form == "int8" else whole),
        }  # fmt: skip
        fixed = {"PROGRAM": PROGRAM, "BLOCK": BLOCK, "SPLIT": weight == "bf16", "FORMAT": form}
        ptx = compiled(_adamw, capability, types, fixed)
        print(capability, form, weight, sum(ptx.count(word) for word in ("fma.rn", "approx", "div.full")))
    for values in ("fp32", "bf16"):
        types = {"values": f"*{values}", "sums": "*fp64", "n": "i32"}
        fixed = {"ROWS": SPAN_ROWS, "LANES": SPAN_LANES, "LEVELS": SPAN_LANES.bit_length() - 1}
        print(capability, "sums", values, compiled(_span_sums, capability, types, fixed).count("approx"))
