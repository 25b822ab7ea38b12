"""One AdamW, three ways to run it, the same bits from each: plain torch, C on the CPU, Triton on the GPU.

The order of operations is fixed and every operation is IEEE: no fused multiply-add, correctly rounded square root and
division. The scalars of a step are rounded to fp32 once and shared. So where a chunk is updated cannot be seen in the
result, and state may move freely between homes.

A bf16 weight and a 16-bit remainder are the two halves of the fp32 master. The weight is the master rounded half away
from zero, which can be undone; rounding half to even cannot, since it is ambiguous at ties.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from penstock.update.formats import StateView
from penstock.update.moments import exact_root, read_moments, write_moments

SPAN_ROWS, SPAN_LANES = 64, 1024
SPAN = SPAN_ROWS * SPAN_LANES
"""Elements whose squares are summed by one fixed tree; see `span_sums`."""

# Columns of a row of coefficients, all fp32. `GO` is 1.0, or 0.0 in a step that must change nothing.
# `SEED` is the number of the step, for stochastic rounding: a whole number under 2^24, so fp32 holds it exactly.
SCALE, BETA1, BETA1_REST, BETA2, BETA2_REST, ROOT_CORRECTION2, EPS, DECAY, STEP_SIZE, GO, SEED = range(11)
NUM_COEFFICIENTS = 11
NUM_SEEDS = 1 << 24


def adamw_(weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor) -> None:
    """Update flat `weight` and `state` in place, with the fastest kernel there is for their device."""
    if weight.is_cuda:
        from penstock.update.gpu_kernels import launch_adamw

        launch_adamw(weight, gradient, state, coefficients)
    elif coefficients[GO]:
        library = host_library()
        if library is None:
            adamw_reference_(weight, gradient, state, coefficients)
        else:
            _call_adamw(library, weight, gradient, state, coefficients)


def adamw_reference_(weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor) -> None:
    """The same in plain torch: what the other two are checked against, and the fallback without a compiler."""
    c = coefficients
    g = gradient.float() * c[SCALE]
    master = join(weight, state.remainder) if weight.dtype is torch.bfloat16 else weight
    first, second = read_moments(state)
    first = first * c[BETA1] + g * c[BETA1_REST]
    second = second * c[BETA2] + (g * g) * c[BETA2_REST]
    write_moments(state, first, second, c[SEED])
    denominator = exact_root(second) / c[ROOT_CORRECTION2] + c[EPS]
    master = master * c[DECAY] - c[STEP_SIZE] * (first / denominator)
    if weight.dtype is torch.bfloat16:
        rounded, remainder = split(master)
        weight.copy_(rounded)
        state.remainder.copy_(remainder)
    else:
        weight.copy_(master)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 master as bf16 weight (rounded half away from zero) and int16 remainder (its low half)."""
    bits = master.view(torch.int32)
    remainder = bits.to(torch.int16)  # keeps the low 16 bits
    weight = ((bits >> 16) + (remainder < 0)).to(torch.int16)
    return weight.view(torch.bfloat16), remainder


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a weight and its remainder: undo the carry, then put the halves together."""
    high = weight.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def span_sums(values: Tensor, out: Tensor) -> None:
    """Sums of squares of consecutive spans of a flat tensor, in fp64, by one fixed tree of additions.

    Within a span the rows are added to the lanes in order, then the lanes are halved until one is left. A plain sum was
    rejected: its order depends on the device, the version and the chunking, and so would the clip coefficient.
    """
    if values.is_cuda:
        from penstock.update.gpu_kernels import launch_span_sums

        launch_span_sums(values, out, SPAN_ROWS, SPAN_LANES)
        return
    library = host_library()
    if library is None:
        span_sums_reference(values, out)
    else:
        call = library.span_sums_bf16 if values.dtype is torch.bfloat16 else library.span_sums_fp32
        call(_pointer(values), _pointer(out), ctypes.c_int64(values.numel()))


def span_sums_reference(values: Tensor, out: Tensor) -> None:
    """The same in plain torch."""
    padded = torch.zeros(out.numel() * SPAN, dtype=torch.float64, device=values.device)
    padded[: values.numel()] = values.double()
    spans = padded.square_().view(-1, SPAN_ROWS, SPAN_LANES)
    lanes = spans[:, 0].clone()
    for row in range(1, SPAN_ROWS):
        lanes += spans[:, row]
    out.copy_(halve(lanes.T))


def halve(values: Tensor) -> Tensor:
    """Sum over the first dimension, whose length is a power of two, by adding its second half to its first."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def num_spans(num_elements: int) -> int:
    """Spans of a tensor."""
    return -(-num_elements // SPAN)


@cache
def host_library() -> ctypes.CDLL | None:
    """The compiled C kernel, or None where there was no compiler at install."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_host_kernel{suffix}")
        if path.exists():
            return ctypes.CDLL(str(path))  # ctypes releases the interpreter lock during calls: threads run in parallel
    return None


def _call_adamw(library: ctypes.CDLL, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor) -> None:
    kind = "bf16" if weight.dtype is torch.bfloat16 else "fp32"
    moments = (state.first, state.second, state.first_scale, state.second_scale)
    pointers = map(_pointer, (weight, gradient, state.remainder, *moments, coefficients))
    place = (ctypes.c_int64(weight.numel()), ctypes.c_int64(state.start), ctypes.c_uint32(state.salt))
    getattr(library, f"adamw_{kind}_{state.states.name}")(*pointers, *place)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous(), "kernels take flat tensors"
    return ctypes.c_void_p(tensor.data_ptr())
