"""What runs a recipe's steps. `train.py` knows this interface and nothing of what is behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.flow.lanes import Instant, ToHost
from penstock.flow.timeline import Span
from penstock.flow.transfers import link_of
from penstock.offload.saved_tensors import SavedTensor


@dataclass(frozen=True)
class StepResult:
    """One step. Its numbers are on their way to the host; reading them waits for this step and for nothing after it."""

    values: ToHost
    """Loss, norm, whether the step was skipped."""
    ended: Instant
    """When they were there."""

    @classmethod
    def of(cls, loss: Tensor, grad_norm: Tensor, skipped: Tensor) -> StepResult:
        """Start the numbers on their way."""
        values = torch.stack([loss.double(), grad_norm.double(), skipped.double()])
        ended = Instant(loss.device)
        return cls(link_of(loss.device).streams.to_host(values), ended)

    @property
    def loss(self) -> float:
        """Mean over the trained tokens of the step."""
        return self._read(0)

    @property
    def grad_norm(self) -> float:
        """Global norm before clipping."""
        return self._read(1)

    @property
    def skipped(self) -> bool:
        """True if a gradient was not finite."""
        return bool(self._read(2))

    def _read(self, index: int) -> float:
        return float(self.values.read()[index])


@dataclass(frozen=True)
class UnitState:
    """State of one unit in one home."""

    unit: str
    home: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one place (`gpu` or `host`) and what it is for."""

    place: str
    part: str
    num_bytes: int


class Engine(Protocol):
    """Weights, gradients and optimizer state of one run."""

    model: PreTrainedModel
    rows_on_ranks: bool
    """Whether each rank has its rows of the same tensors (FSDP2), also after `release`: then the first one writes and
    reads for all, and running the model takes all of them. Otherwise each has tensors of its own to save, and after
    `release` the first has the whole model."""

    def begin(self, lr: float) -> None:
        """A step begins. Its learning rate is wanted now, since weights may be updated during backward."""

    def accumulate(self, batch: MicroBatch, trained_in_step: int, *, last: bool) -> None:
        """Forward and backward of one micro-batch. `trained_in_step` counts the trained tokens of all of them."""

    def step(self) -> StepResult:
        """Update the weights from what was accumulated."""

    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """Mean loss over the trained tokens of `batches`."""

    def saved_tensors(self) -> dict[str, list[SavedTensor]]:
        """All that a resumed run needs, where it lies: `weights` under the model's names, and `state`.

        Waits for the last update; to be read or written before the next step. All ranks must ask.
        """

    def restored(self) -> None:
        """The saved tensors were written to."""

    def placement(self) -> list[UnitState]:
        """Where every byte of state lives, by unit."""

    def memory(self) -> list[MemoryUse]:
        """What takes memory now, and on a GPU at its peak."""

    def start_timeline(self) -> None:
        """Record from here on when lanes and model are busy."""

    def stop_timeline(self) -> list[Span]:
        """Wait for all updates; what was recorded."""

    def release(self) -> None:
        """Give back gradients and optimizer state; the weights stay.

        The model has not been written yet: what a library fails at while it ends must not end the run.
        """
