"""The Triton side of `adamw.py` and `spans.py`.

Fusion is off, and square root and division are the correctly rounded ones: with fusion on, half of all weights differ
from the CPU's after a step. How the formats round is said in `moments.py`; here is the same, in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.plan.layout import BLOCK
from penstock.update.formats import StateView

PROGRAM = 1024
"""Elements of one program: whole blocks of int8."""


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _from_bf16(x):  # type: ignore[no-untyped-def]
    # By its bits: Triton's interpreter would turn denormals into zero.
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_bf16(x, random):  # type: ignore[no-untyped-def]
    bits = x.to(tl.int32, bitcast=True)
    added = tl.where((bits & 0x7FFFFFFF) < 0x7F7F0000, random.to(tl.int32), 0)
    return ((bits + added) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _first_share(code):  # type: ignore[no-untyped-def]
    x = code.to(tl.float32) * (1 / 127)
    return x * tl.abs(x)


@triton.jit
def _second_share(code):  # type: ignore[no-untyped-def]
    x = code.to(tl.float32) * (1 / 255)
    square = x * x
    return square * square


@triton.jit
def _goes_up(share, low, high, random):  # type: ignore[no-untyped-def]
    chance = (random * 2 + 1).to(tl.int32).to(tl.float32) * (1 / 131072)
    return (chance * (high - low) < share - low).to(tl.int32)


@triton.jit
def _at_most_one(x):  # type: ignore[no-untyped-def]
    return tl.where(x < 1.0, x, 1.0)


@triton.jit
def _scales(x, PROGRAM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    magnitudes = tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (PROGRAM // BLOCK, BLOCK))
    largest = tl.max(magnitudes, axis=1)
    bounded = tl.minimum(tl.maximum(largest, 0x10800000), 0x7F7FFFFF)
    return tl.where(largest > 0, bounded, 0).to(tl.float32, bitcast=True)


@triton.jit
def _spread(x, PROGRAM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.reshape(tl.broadcast_to(x[:, None], (PROGRAM // BLOCK, BLOCK)), (PROGRAM,))


@triton.jit
def _first_codes(m, inverse, random):  # type: ignore[no-untyped-def]
    share = _at_most_one(tl.abs(m) * inverse)
    below = tl.minimum((tl.sqrt_rn(share) * 127.0).to(tl.int32), 126)
    code = below + _goes_up(share, _first_share(below), _first_share(below + 1), random)
    return tl.where(m < 0.0, -code, code).to(tl.int8)


@triton.jit
def _second_codes(v, root, inverse, inverse_root, random):  # type: ignore[no-untyped-def]
    share = _at_most_one(v * inverse)
    below = tl.minimum((tl.sqrt_rn(_at_most_one(root * inverse_root)) * 255.0).to(tl.int32), 254)
    code = below + _goes_up(share, _second_share(below), _second_share(below + 1), random)
    return tl.where(v > 0.0, tl.maximum(code, 4), code).to(tl.uint8)


# Parameters of kernels have no types: Triton would look an annotation up as a global of the kernel.
@triton.jit(do_not_specialize=["start", "salt"])  # or a new kernel would be built for every odd start
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, remainder, first, second, first_scale, second_scale, scalars, n, start, salt,
    PROGRAM: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    # Columns of `scalars` as in adamw.py:
    # SCALE, GO, BETA1, BETA1_REST, BETA2, BETA2_REST, ROOT, EPS, DECAY, STEP, SEED.
    if tl.load(scalars + 1) != 0.0:
        at = tl.program_id(0).to(tl.int64) * PROGRAM + tl.arange(0, PROGRAM)
        inside = at < n
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars)
        if FORMAT == "int8":
            m = _first_share(tl.load(first + at, mask=inside, other=0).to(tl.int32))
            v = _second_share(tl.load(second + at, mask=inside, other=0).to(tl.int32))
            m *= tl.load(first_scale + at // BLOCK, mask=inside, other=0.0)
            v *= tl.load(second_scale + at // BLOCK, mask=inside, other=0.0)
        else:
            m = tl.load(first + at, mask=inside, other=0.0)
            v = tl.load(second + at, mask=inside, other=0.0)
        if FORMAT == "bf16":
            m, v = _from_bf16(m), _from_bf16(v)
        m = m * tl.load(scalars + 2) + g * tl.load(scalars + 3)
        v = v * tl.load(scalars + 4) + (g * g) * tl.load(scalars + 5)
        root = tl.sqrt_rn(v)
        denominator = tl.div_rn(root, tl.load(scalars + 6)) + tl.load(scalars + 7)
        if SPLIT:
            high = tl.load(weight + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
            low = tl.load(remainder + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
            master = (((high - (low >> 15)) << 16) | low).to(tl.float32, bitcast=True)
        else:
            master = tl.load(weight + at, mask=inside, other=0.0)
        master = master - (tl.load(scalars + 8) * master + tl.load(scalars + 9) * tl.div_rn(m, denominator))
        if SPLIT:
            bits = master.to(tl.int32, bitcast=True)
            rounded = (bits >> 16) + ((bits >> 15) & 1)
            tl.store(weight + at, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
            tl.store(remainder + at, bits.to(tl.int16), mask=inside)
        else:
            tl.store(weight + at, master, mask=inside)
        if FORMAT == "fp32":
            tl.store(first + at, m, mask=inside)
            tl.store(second + at, v, mask=inside)
        else:
            key = _mix(_mix(tl.load(scalars + 10).to(tl.int32).to(tl.uint32)) ^ salt.to(tl.uint32))
            random = _mix((at + start).to(tl.uint32) ^ key)
            if FORMAT == "bf16":
                tl.store(first + at, _round_to_bf16(m, random & 0xFFFF), mask=inside)
                tl.store(second + at, _round_to_bf16(v, random >> 16), mask=inside)
            else:
                m_scale, v_scale = _scales(m, PROGRAM, BLOCK), _scales(v, PROGRAM, BLOCK)
                block = tl.program_id(0).to(tl.int64) * (PROGRAM // BLOCK) + tl.arange(0, PROGRAM // BLOCK)
                tl.store(first_scale + block, m_scale, mask=block * BLOCK < n)
                tl.store(second_scale + block, v_scale, mask=block * BLOCK < n)
                m_inverse = tl.div_rn(1.0, tl.where(m_scale > 0.0, m_scale, 1.0))
                divisor = tl.where(v_scale > 0.0, v_scale, 1.0)
                v_inverse, root_inverse = tl.div_rn(1.0, divisor), tl.div_rn(1.0, tl.sqrt_rn(divisor))
                m_inverse, v_inverse = _spread(m_inverse, PROGRAM, BLOCK), _spread(v_inverse, PROGRAM, BLOCK)
                root_inverse = _spread(root_inverse, PROGRAM, BLOCK)
                tl.store(first + at, _first_codes(m, m_inverse, random & 0xFFFF), mask=inside)
                codes = _second_codes(v, root, v_inverse, root_inverse, random >> 16)
                tl.store(second + at, codes, mask=inside)


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


def launch_adamw(weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor) -> None:
    """Update on the current stream."""
    n = weight.numel()
    # What a format or a weight does not have is not read: any tensor stands for it.
    names = ("remainder", "first", "second", "first_scale", "second_scale")
    parts = [weight if (part := state.get(name)) is None else part for name in names]
    with torch.cuda.device_of(weight):  # Triton goes by the current device, whatever that of its tensors
        _adamw[(triton.cdiv(n, PROGRAM),)](
            weight, gradient, *parts, coefficients, n, state.start, state.salt,
            PROGRAM=PROGRAM, BLOCK=BLOCK, SPLIT=weight.dtype is torch.bfloat16, FORMAT=state.format.name,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def launch_span_sums(values: Tensor, out: Tensor, rows: int, lanes: int) -> None:
    """Sum the squares of every span of `rows` times `lanes` elements on the current stream."""
    levels = lanes.bit_length() - 1
    with torch.cuda.device_of(values):
        _span_sums[(out.numel(),)](
            values, out, values.numel(), ROWS=rows, LANES=lanes, LEVELS=levels, num_warps=4, enable_fp_fusion=False
        )
