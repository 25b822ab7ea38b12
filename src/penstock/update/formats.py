"""State as tensors: the bytes of a chunk, cut into the parts of its format.

    fp32   exact                                             10 bytes a parameter beside a bf16 weight
    bf16   both moments in bf16                               6
    int8   both moments in 8 bits, a scale for 256 elements   4.03

The remainder is part of all of them, so the master is always exact; what is traded is the precision of the moments.
The update itself works in fp32 in every format; `moments.py` says how moments are rounded when they are put away. Which
parts a format has is said in `plan/layout.py`, where the plan counts them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.plan.layout import Chunk, Part, StateFormat


@dataclass(frozen=True)
class StateView:
    """State of consecutive elements of one parameter."""

    format: StateFormat
    tensors: Mapping[str, Tensor]
    start: int
    """Where in the parameter the elements begin."""
    salt: int
    """Which parameter it is. With `start` it makes the random bits of an element the same however state is cut."""

    def __getitem__(self, part: str) -> Tensor:
        return self.tensors[part]

    def get(self, part: str) -> Tensor | None:
        """The same of a part that not every format or weight has."""
        return self.tensors.get(part)

    def moments(self) -> Iterator[tuple[Part, Tensor]]:
        """Everything but the remainder."""
        return ((part, self.tensors[part.name]) for part in self.format.moments)


def torch_dtype(part: Part) -> torch.dtype:
    """The type that torch knows by the part's name for it."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype


def view_state(chunk: Chunk, buffer: Tensor) -> StateView:
    """`buffer` of bytes as the tensors of the chunk's state."""
    tensors, at = {}, 0
    for part in chunk.format.parts(chunk.weight_bytes):
        end = at + part.num_bytes(chunk.size)
        tensors[part.name], at = buffer[at:end].view(torch_dtype(part)), end
    return StateView(chunk.format, tensors, start=chunk.offset + chunk.start, salt=chunk.parameter)


def part_of(part: Part, flat: Tensor, chunk: Chunk) -> Tensor:
    """A chunk's values of this part, out of those of a whole parameter."""
    return flat[chunk.start // part.elements : part.count(chunk.start + chunk.size)]
