"""Sums of squares by one fixed tree of additions, the same on every device and however a tensor is cut.

A plain sum was rejected: its order depends on the device, the version and the chunking, and so would the clip
coefficient.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from penstock.plan.layout import SPAN, SPAN_LANES, SPAN_ROWS
from penstock.update.host_threads import host_library, pointer


def span_sums(values: Tensor, out: Tensor) -> None:
    """Sums of squares of consecutive spans of a flat tensor, in fp64.

    Within a span the rows are added to the lanes in order, then the lanes are halved until one is left.
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
        call(pointer(values), pointer(out), ctypes.c_int64(values.numel()))


def root(x: Tensor) -> Tensor:
    """Of a few fp64 numbers, each the nearest to the true one.

    Of a CPU's tensor torch may ask MKL, whose last bit depends on the CPU: it was another one for 7 of 1,000 numbers.
    """
    if x.is_cuda:
        return x.sqrt()
    roots = [math.sqrt(number) for number in x.flatten().tolist()]
    return torch.tensor(roots, dtype=x.dtype, device=x.device).view(x.shape)


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
