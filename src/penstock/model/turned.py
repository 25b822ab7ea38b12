"""Rows of fp8 numbers as columns, in a kernel of our own.

Products of gradients want both factors stored along the axis that is summed over, so that what forward casts by rows,
backward needs by columns. The compiler would store both from one kernel, and on Hopper what that stores by columns may
be garbage: the assembler that Triton brings (ptxas 12.9) has it read memory that the kernel never wrote
(triton-lang/triton#11111; pytorch/pytorch#188841, where every fourth column of a gradient was zero). It shows now and
then: in one of 36 tests of ours the gradients of two weights were off by 59 %, as they are with a quarter of the tokens
missing. Neither a kernel that stores integers nor one that stores once was found to do that; this one does both.

It moves four rows at once, as numbers of 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _turned(x: Tensor) -> Tensor:
    assert x.itemsize == 1, f"{x.dtype} has more than a byte"
    assert x.shape[0] % 4 == 0, f"{x.shape[0]} rows are no multiple of four"
    if not x.is_cuda:
        return x.t().clone(memory_format=torch.contiguous_format)  # a view of one column would be the input itself
    from penstock.model.turned_kernel import launch_turn

    columns = _shaped(x)
    if x.numel():
        launch_turn(x.contiguous().view(torch.uint8), columns.view(torch.int32))
    return columns


def _shaped(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


turned = torch.library.custom_op("penstock::turned", _turned, mutates_args=())
"""A matrix of bytes, transposed; in memory too. Its number of rows is a multiple of four."""
turned.register_fake(_shaped)
