"""The fp32 master of a bf16 weight in 16 more bits.

Weight and remainder are the two halves of the master. The weight is the master rounded half away from zero, which can
be undone; rounding half to even cannot, since it is ambiguous at ties.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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


@torch.no_grad()
def round_to_bf16_(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Round fp32 weights to bf16 in place; the remainders, flat, keep the precision that the weights lose."""
    remainders = {}
    for p in parameters:
        if p.dtype is torch.float32:
            assert not isinstance(p, DTensor), "FSDP2 has set itself up for the type of a parameter: round before"
            weight, remainders[p] = split(p.detach().view(-1))
            p.data = weight.view(p.shape)
    return remainders
