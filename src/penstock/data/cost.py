"""What rows and steps cost: products by the token, attention by the square of an example.

Rows of one length may differ much: one long example attends to more than many short ones. Seconds are not counted
here, only FLOPs of forward and backward, recompute left out: what steps cost beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.data.packing import Ints
from penstock.plan.speed import attended

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenFlops:
    """The numbers of a model that FLOPs follow from."""

    products: float
    """Of a token: six a weight that it is multiplied with."""
    pair: float = 0.0
    """Of a token and another that it attends to, in one layer."""
    layers: int = 0
    windowed: int = 0
    """Layers of them whose attention reaches back `window` tokens and no more."""
    window: int = 0

    def pairs(self, lengths: Ints) -> Floats:
        """Pairs in the squares of examples of so many tokens, over all layers; of a window, twice its band.

        The full square, as the field counts it. These are whole numbers, which add up to the same in any order: ranks
        on different processors, which choose rows by their cost, must not differ in it.
        """
        distinct, index = np.unique(lengths, return_inverse=True)
        seen = [2 * attended(n / 2, self.layers, self.windowed, self.window) for n in distinct.tolist()]
        found: Floats = (distinct * np.array(seen))[index].reshape(lengths.shape)
        return found


BY_TOKENS = TokenFlops(1.0)
"""Of no model: rows cost as much as they have tokens."""


def deal(steps: Ints, costs: Floats, ranks: int, at_once: int) -> Ints:
    """The rows of each step, a line of `steps`, by micro-batch, rank and place. -1 stands where there is none.

    Ranks run their first micro-batches together, then their second ones, and each time wait for the slowest. So the
    costliest rows go first, one to each rank, and the next ones in the other direction: micro-batches that run together
    cost about the same, and so do the sums of the ranks. One rank keeps the order of the step.
    """
    if ranks > 1:
        by_cost = np.argsort(np.where(steps < 0, np.inf, -costs[steps]), axis=1, kind="stable")
        steps = np.take_along_axis(steps, by_cost, axis=1)
    missing = -steps.shape[1] % (ranks * at_once)
    turns = np.pad(steps, ((0, 0), (0, missing)), constant_values=-1).reshape(len(steps), -1, ranks)
    turns[:, 1::2] = turns[:, 1::2, ::-1].copy()
    return turns.reshape(len(steps), -1, at_once, ranks).swapaxes(2, 3)


def step_costs(dealt: Ints, lengths: Ints, pairs: Floats, flops: TokenFlops, fixed_length: int) -> Floats:
    """FLOPs of steps that `deal` gave, padding included; of several ranks, of those that the others wait for.

    `lengths` and `pairs` are those of all rows. With `fixed_length` places without a row are rows of padding.
    """
    there = dealt >= 0
    tokens = np.where(there, lengths[dealt], 0)
    runs = np.any(there, axis=(2, 3), keepdims=True) if fixed_length else there
    places = np.where(runs, fixed_length or tokens.max(axis=3, keepdims=True), 0)
    attention = np.where(there, pairs[dealt], 0.0) + flops.pairs(places - tokens)
    costs = flops.products * places + flops.pair * attention
    of_steps: Floats = costs.sum(axis=3).max(axis=2).sum(axis=1)
    return of_steps
