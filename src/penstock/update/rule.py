"""An update rule: what state a parameter has, which scalars a step needs, and how weight and state change.

Everything between a gradient and its update (homes, transfers, clipping, skipped steps, saving) works for any rule;
AdamW (`adamw.py`) is the first. A rule promises that its arithmetic is a function of the element, its place and the
scalars of the step alone, in one fixed order of operations, so that where and in which pieces it runs shows in no bit.

Scalars are rows of fp32 coefficients, one a parameter group, computed on the device: the host never learns whether a
step was applied before the next one is enqueued. The first two columns are the same in every rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from penstock.plan.layout import StateFormat
from penstock.update.formats import StateView

SCALE, GO = 0, 1
"""Columns of a row of coefficients: what gradients are multiplied with, and 1.0, or 0.0 in a step that must change
nothing."""
Groups = Sequence[Mapping[str, Any]]
Stage = Literal["whole", "master", "moments"]
"""Of an update: the master, which is the weight and what was rounded off it; the rest of the state; or both. From the
same gradient and scalars, first the master and later the moments make the same bits as both at once."""


@dataclass(frozen=True)
class HostCall:
    """An update as the C threads make it: a function of the library over a range of elements, and what it works on."""

    function: Any
    job: Any
    """A ctypes structure."""
    keeps: tuple[Tensor, ...]
    """Tensors whose memory must live until the update is made."""


class Scalars(Protocol):
    """What of a rule advances from step to step, on the device."""

    def coefficients(self, groups: Groups) -> Tensor:
        """The row of each group for the step that would come next, unclipped and set to go."""

    def advance(self, groups: Groups, applied: Tensor) -> None:
        """Count the step if it was applied."""

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, to be saved, or written to."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take it back."""


class Rule(Protocol):
    """One update rule."""

    name: str
    num_coefficients: int
    in_stages: bool
    """Whether the host can update the master first and the moments later."""

    @property
    def formats(self) -> Mapping[str, StateFormat]:
        """The ways in which it can store its state, by name."""

    @property
    def saved_names(self) -> Mapping[str, str]:
        """Parts of its state by their names in a state dict: torch's own, where it has one."""

    def scalars(self, device: torch.device) -> Scalars:
        """As before the first step."""

    def update_(
        self, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor, stage: Stage = "whole"
    ) -> None:
        """Update flat `weight` and `state` in place where they lie, unless the row says not to go."""

    def host_call(
        self, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor, stage: Stage = "whole"
    ) -> HostCall | None:
        """The same for the C threads; None: there is no kernel, and `update_` does it."""


def device_rows(values: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Numbers as arguments of kernels, fp64: a copy to the device would wait for state that is streaming."""
    made = [torch.full((), v, dtype=torch.float64, device=device) for row in values for v in row]
    return torch.stack(made).view(len(values), -1)
