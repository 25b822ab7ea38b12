"""The processes of one run: who this one is, and what they must agree on.

A run with one process needs no process group; everything here is then what it looks like. With more, whoever started
them says so in torch's environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RecipeError


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    @property
    def many(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers. The hosts wait for each other here, their GPUs do not."""
        if not self.many:
            return number
        mine = torch.tensor([number])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return int(mine)

    def total(self, value: Tensor) -> Tensor:
        """The sum of numbers over the ranks, on their device."""
        if self.many:
            value = value.clone()
            dist.all_reduce(value)
        return value


def find_world(environment: Mapping[str, str] = os.environ) -> World:
    """What the environment says: torch's variables, as torchrun sets them."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return World()
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    given = {**environment}
    given.setdefault("LOCAL_WORLD_SIZE", given["WORLD_SIZE"])
    if missing := [name for name in names if not given.get(name, "").isdigit()]:
        what = f"RANK is set and {missing[0]} is not a number"
        raise RecipeError(what, where="environment", remedy="Start the ranks with torchrun.")
    return World(*(int(given[name]) for name in names))
