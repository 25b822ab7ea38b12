"""The global norm and the clip coefficient, on the device and over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.plan.layout import num_spans, num_sums
from penstock.update.rule import GO, SCALE
from penstock.update.spans import halve, root, span_sums


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
        self._sums = torch.zeros(num_sums(sizes), dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Begin a step: a parameter without gradient counts as zero."""
        self._sums.zero_()

    def add(self, index: int, gradient: Tensor) -> None:
        """Take the final gradient of one parameter, or of this rank's shard of it, which may be empty."""
        self._add_to(self._sums, index, gradient)

    def _add_to(self, sums: Tensor, index: int, gradient: Tensor) -> None:
        if self._spans[index]:
            span_sums(gradient, sums[self._starts[index] : self._starts[index] + self._spans[index]])

    def differ(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """Whether any of these is no longer the one that was added. Only a step that will be applied matters."""
        again = self._sums.clone()
        for index, gradient in gradients.items():
            self._add_to(again, index, gradient)
        return (again != self._sums).any() & self._finite_here()

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


def clip(coefficients: Tensor, sum_of_squares: Tensor, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """Set scale and go from the global norm. Returns (norm, applied); a norm that is not finite stops the step."""
    norm = root(sum_of_squares)
    applied = norm.isfinite()
    if max_grad_norm:
        coefficients[:, SCALE] = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0).float()
    coefficients[:, GO] = applied.float()
    return norm, applied


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
