"""How state is stored: which tensors, of which types, in how many bytes. Nothing else knows these numbers.

    fp32   exact                                             10 bytes a parameter beside a bf16 weight
    bf16   both moments in bf16                               6
    int8   both moments in 8 bits, a scale for 256 elements   4.03

The remainder is part of all of them, so the master is always exact; what is traded is the precision of the moments.
The update itself works in fp32 in every format; `moments.py` says how moments are rounded when they are put away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from penstock.errors import RecipeError
from penstock.plan.layout import BLOCK

StateName = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True)
class Part:
    """One tensor of a state."""

    name: str
    dtype: torch.dtype
    elements: int = 1
    """Elements that share one value."""

    def count(self, num_elements: int) -> int:
        """Values for so many elements."""
        return -(-num_elements // self.elements)

    def of(self, flat: Tensor, start: int, size: int) -> Tensor:
        """Values of elements `start` to `start + size`, out of those of a whole parameter."""
        return flat[start // self.elements : self.count(start + size)]


@dataclass(frozen=True)
class StateView:
    """State of consecutive elements of one parameter. What a format or a weight does not have is empty."""

    remainder: Tensor
    first: Tensor
    second: Tensor
    first_scale: Tensor
    second_scale: Tensor
    start: int
    """Where in the parameter the elements begin."""
    salt: int
    """Which parameter it is. With `start` it makes the random bits of an element the same however state is cut."""

    @property
    def states(self) -> StateFormat:
        """The format, which the types give away."""
        return next(f for f in FORMATS.values() if f.first == self.first.dtype)

    def part(self, start: int, stop: int) -> StateView:
        """Elements `start` to `stop` of these. `start` is a multiple of the format's block."""
        block = self.states.block
        assert start % block == 0, "a block has one scale: it cannot be cut"
        own, scales = slice(start, stop), slice(start // block, -(-stop // block))
        moments = (self.first[own], self.second[own], self.first_scale[scales], self.second_scale[scales])
        return StateView(self.remainder[own], *moments, start=self.start + start, salt=self.salt)

    def moments(self) -> Iterator[tuple[Part, Tensor]]:
        """Everything but the remainder."""
        return ((part, getattr(self, part.name)) for part in self.states.moments)


@dataclass(frozen=True)
class StateFormat:
    """One way to store state."""

    name: StateName
    first: torch.dtype
    second: torch.dtype
    block: int = 1
    """Elements that share a scale; 1 where there are no scales."""

    @property
    def moments(self) -> tuple[Part, ...]:
        """The tensors of the two moments."""
        own = (Part("first", self.first), Part("second", self.second))
        shared = (Part(f"{part.name}_scale", torch.float32, self.block) for part in own)
        return own if self.block == 1 else (*own, *shared)

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The moments and the remainder, in the order in which they lie in memory."""
        parts = (*self.moments, Part("remainder", torch.int16))
        return tuple(sorted(parts, key=lambda part: -part.dtype.itemsize))  # so that each is aligned, whatever the size

    def parts(self, weight: torch.dtype) -> tuple[Part, ...]:
        """The tensors beside a weight of this type: only a bf16 weight has a remainder."""
        return tuple(part for part in self.all_parts if part.name != "remainder" or weight is torch.bfloat16)

    def num_bytes(self, num_elements: int, weight: torch.dtype) -> int:
        """Bytes of the state of so many elements."""
        return sum(part.count(num_elements) * part.dtype.itemsize for part in self.parts(weight))

    def cut(self, buffer: Tensor, size: int, weight: torch.dtype, *, start: int = 0, salt: int = 0) -> StateView:
        """`buffer` of bytes as the tensors of the state of `size` elements."""
        empty = {"first_scale": torch.float32, "second_scale": torch.float32, "remainder": torch.int16}
        tensors = {name: buffer[:0].view(dtype) for name, dtype in empty.items()}
        at = 0
        for part in self.parts(weight):
            end = at + part.count(size) * part.dtype.itemsize
            tensors[part.name], at = buffer[at:end].view(part.dtype), end
        return StateView(**tensors, start=start, salt=salt)

    def whole_blocks(self, num_elements: int) -> int:
        """The next size at which a parameter can be cut."""
        return -(-num_elements // self.block) * self.block


FORMATS: dict[StateName, StateFormat] = {
    "fp32": StateFormat("fp32", torch.float32, torch.float32),
    "bf16": StateFormat("bf16", torch.bfloat16, torch.bfloat16),
    "int8": StateFormat("int8", torch.int8, torch.uint8, BLOCK),
}


def format_named(name: StateName) -> StateFormat:
    """The format of that name."""
    if name not in FORMATS:
        remedy = f"There are {', '.join(get_args(StateName))}."
        raise RecipeError("no such format", where=f"states = {name!r}", remedy=remedy)
    return FORMATS[name]
