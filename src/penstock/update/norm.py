"""The global norm, the clip coefficient, the step count and the scalars of a step, all on the device.

The host never learns whether a step was skipped before the next one is enqueued, so the count of steps that were taken,
and the powers of the betas that follow from it, live on the device too. They advance by multiplication in fp64, which
gives the same bits on every device; a power function would not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.update.kernels import GO, NUM_COEFFICIENTS, NUM_SEEDS, SCALE, halve, num_spans, span_sums


class Norm:
    """Sum of squares of all gradients, with a tree of additions that no home, chunk or arrival order changes.

    Of several ranks each adds up its own shards; all then have the same total, since they add the same sums in the same
    order. It is not the total of one rank to the bit: the shards cut the tree elsewhere.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        spans = [num_spans(size) for size in sizes]
        self._starts = [sum(spans[:i]) for i in range(len(spans))]
        self._spans = spans
        total = 1 << max(0, sum(spans) - 1).bit_length()  # a power of two, as `halve` wants it
        self._sums = torch.zeros(total, dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Begin a step: a parameter without gradient counts as zero."""
        self._sums.zero_()

    def add(self, index: int, gradient: Tensor) -> None:
        """Take the final gradient of one parameter, or of this rank's shard of it, which may be empty."""
        if not self._spans[index]:
            return
        span_sums(gradient, self._sums[self._starts[index] : self._starts[index] + self._spans[index]])

    def differs(self, index: int, gradient: Tensor) -> Tensor:
        """Whether a gradient is no longer the one that was added. Only a step that will be taken matters."""
        own = self._sums[self._starts[index] : self._starts[index] + self._spans[index]]
        again = torch.empty_like(own)
        span_sums(gradient, again)
        return (own != again).any() & self._finite_here()

    def finite_so_far(self) -> Tensor:
        """Whether everything added since `clear` is finite, on all ranks.

        One number is gathered for it, in the stream that has just reduced the gradients, and the host does not wait.
        Asking only this rank was rejected: an infinity in one shard would stop the update there and nowhere else.
        """
        return all_of(self._group, self._finite_here())

    def _finite_here(self) -> Tensor:
        return self._sums.sum().isfinite()  # squares are never negative, so no infinity cancels another

    def total(self) -> Tensor:
        """Sum of squares of everything added since `clear`, fp64, over all ranks."""
        return sum_over(self._group, halve(self._sums))


class Scalars:
    """Step count and coefficients of every parameter group."""

    def __init__(self, num_groups: int, device: torch.device) -> None:
        self._device = device
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.powers = torch.ones(num_groups, 2, dtype=torch.float64, device=device)  # beta1^t, beta2^t

    def coefficients(self, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """The row of each group for the step that would come next, unclipped and set to go."""
        columns = [[g["betas"][0], g["betas"][1], g["lr"], g["weight_decay"], g["eps"]] for g in groups]
        beta1, beta2, lr, weight_decay, eps = self._send(columns).unbind(1)
        power1, power2 = (self.powers * torch.stack((beta1, beta2), dim=1)).unbind(1)
        ones = torch.ones_like(lr)
        seed = ones * (self.steps % NUM_SEEDS)
        rows = (
            ones, beta1, 1 - beta1, beta2, 1 - beta2, (1 - power2).sqrt(), eps, 1 - lr * weight_decay,
            lr / (1 - power1), ones, seed,
        )  # fmt: skip
        assert len(rows) == NUM_COEFFICIENTS
        return torch.stack(rows, dim=1).float()

    def _send(self, values: list[list[float]]) -> Tensor:
        """As arguments of kernels: a copy would wait for state that is streaming (see `lanes.py`)."""
        made = [torch.full((), v, dtype=torch.float64, device=self._device) for row in values for v in row]
        return torch.stack(made).view(len(values), -1)

    def advance(self, groups: Sequence[Mapping[str, Any]], taken: Tensor) -> None:
        """Count the step if it was taken."""
        betas = self._send([list(g["betas"]) for g in groups])
        self.powers = torch.where(taken, self.powers * betas, self.powers)
        self.steps = self.steps + taken


def clip(coefficients: Tensor, sum_of_squares: Tensor, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """Set scale and go from the global norm. Returns (norm, taken); a norm that is not finite stops the step."""
    norm = sum_of_squares.sqrt()
    taken = norm.isfinite()
    if max_grad_norm:
        coefficients[:, SCALE] = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0).float()
    coefficients[:, GO] = taken.float()
    return norm, taken


def sum_over(group: dist.ProcessGroup | None, value: Tensor) -> Tensor:
    """The sum over all ranks, the same to the bit on each and in every run: gathered, then added in order of rank.

    An all-reduce was rejected: its order of additions is the library's own affair.
    """
    if group is None:
        return value
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def all_of(group: dist.ProcessGroup | None, flag: Tensor) -> Tensor:
    """Whether the flag is set on all ranks."""
    return flag if group is None else sum_over(group, (~flag).to(torch.float64)) == 0
