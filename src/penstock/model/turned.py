"""Rows of fp8 numbers as columns, in a kernel of our own.

Products of gradients want both factors stored along the axis that is summed over, so that what forward casts by rows,
backward needs by columns. The compiler would store both from one kernel, and on Hopper what that stores by columns may
be garbage: the assembler that Triton brings (ptxas 12.9) has it read memory that the kernel never wrote
(triton-lang/triton#11111; pytorch/pytorch#188841, where every fourth column of a gradient was zero). It shows now and
then: in one of 36 tests of ours the gradients of two weights were off by 59 %, as they are with a quarter of the tokens
missing. What goes wrong are numbers of a byte that change hands between threads. Here only numbers of 32 bits do, with
four rows in each, as long as both sides are multiples of sixteen: with others, this kernel was wrong as well.

It casts too, where what is cast lies in memory and is wanted by columns alone: weights. That it also stores what it has
cast by rows, for gradients, was given up: it would save half a percent of a step by the bytes that it moves, but the
assembler of Triton 3.7, which torch 2.13 brings, crashes on such a kernel for Hopper, and that of 3.9 for Ada.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.recipe.recipe import FP8_MULTIPLE


def _turned(x: Tensor) -> Tensor:
    assert x.itemsize == 1, f"{x.dtype} has more than a byte"
    return _columns(x, x.dtype)


def _cast_columns(x: Tensor, rate: Tensor) -> Tensor:
    return _columns(x, torch.float8_e4m3fn, rate)


def _columns(x: Tensor, dtype: torch.dtype, rate: Tensor | None = None) -> Tensor:
    assert x.shape[0] % FP8_MULTIPLE == x.shape[1] % FP8_MULTIPLE == 0, (
        f"{tuple(x.shape)}: no multiples of {FP8_MULTIPLE}"
    )
    if not x.is_cuda:
        narrow = x if rate is None else (x.float() * rate).to(dtype)
        return narrow.t().clone(memory_format=torch.contiguous_format)  # a view of one column would be the input itself
    from penstock.model.turned_kernel import launch_turn

    columns = x.new_empty(x.shape[1], x.shape[0], dtype=dtype)
    if x.numel():
        x = x.contiguous()
        launch_turn(x.clone() if x.data_ptr() % 16 else x, columns, rate)  # threads take 16 bytes at once
    return columns


turned = torch.library.custom_op("penstock::turned", _turned, mutates_args=())
"""A matrix of bytes, transposed; in memory too."""
turned.register_fake(lambda x: x.new_empty(x.shape[1], x.shape[0]))

cast_columns = torch.library.custom_op("penstock::cast_columns", _cast_columns, mutates_args=())
"""A matrix times `rate`, a number in fp32, cast to e4m3, and then as `turned`."""
cast_columns.register_fake(lambda x, rate: x.new_empty(x.shape[1], x.shape[0], dtype=torch.float8_e4m3fn))
