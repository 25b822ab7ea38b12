"""The Triton side of `kernels.py`.

Fusion is off, and square root and division are the correctly rounded ones: with fusion on, half of all weights differ
from the CPU's after a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


# Parameters of kernels have no types: Triton would look an annotation up as a global of the kernel.
@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, remainder, first, second, scalars, n, BLOCK: tl.constexpr, SPLIT: tl.constexpr
):
    # Columns of `scalars` as in kernels.py: SCALE, BETA1, BETA1_REST, BETA2, BETA2_REST, ROOT, EPS, DECAY, STEP, GO.
    if tl.load(scalars + 9) != 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars)
        m = tl.load(first + at, mask=inside, other=0.0)
        v = tl.load(second + at, mask=inside, other=0.0)
        m = m * tl.load(scalars + 1) + g * tl.load(scalars + 2)
        v = v * tl.load(scalars + 3) + (g * g) * tl.load(scalars + 4)
        denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(scalars + 5)) + tl.load(scalars + 6)
        if SPLIT:
            high = tl.load(weight + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
            low = tl.load(remainder + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
            master = (((high - (low >> 15)) << 16) | low).to(tl.float32, bitcast=True)
        else:
            master = tl.load(weight + at, mask=inside, other=0.0)
        master = master * tl.load(scalars + 7) - tl.load(scalars + 8) * tl.div_rn(m, denominator)
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
        if SPLIT:
            bits = master.to(tl.int32, bitcast=True)
            rounded = (bits >> 16) + ((bits >> 15) & 1)
            tl.store(weight + at, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
            tl.store(remainder + at, bits.to(tl.int16), mask=inside)
        else:
            tl.store(weight + at, master, mask=inside)


@triton.jit
def _span_sums(values, sums, n, ROWS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * (ROWS * LANES)
    lanes = tl.zeros([LANES], dtype=tl.float64)
    for row in range(ROWS):
        at = start + row * LANES + tl.arange(0, LANES)
        x = tl.load(values + at, mask=at < n, other=0.0).to(tl.float64)
        lanes += x * x  # exact product, so fusing it with the addition would change nothing
    for level in tl.static_range(LEVELS):
        # A sum of two is the same in either order: this is the tree of `halve`, whatever the compiler does.
        lanes = tl.sum(tl.reshape(lanes, (2, LANES >> (level + 1))), axis=0)
    tl.store(sums + tl.program_id(0) + tl.arange(0, 1), lanes)


def launch_adamw(
    weight: Tensor, gradient: Tensor, remainder: Tensor, first: Tensor, second: Tensor, coefficients: Tensor
) -> None:
    """Update on the current stream."""
    n = weight.numel()
    _adamw[(triton.cdiv(n, BLOCK),)](
        weight, gradient, remainder, first, second, coefficients, n,
        BLOCK=BLOCK, SPLIT=weight.dtype is torch.bfloat16, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def launch_span_sums(values: Tensor, out: Tensor, rows: int, lanes: int) -> None:
    """Sum the squares of every span of `rows` times `lanes` elements on the current stream."""
    levels = lanes.bit_length() - 1
    _span_sums[(out.numel(),)](
        values,
        out,
        values.numel(),
        ROWS=rows,
        LANES=lanes,
        LEVELS=levels,
        num_warps=4,
        enable_fp_fusion=False,
    )
