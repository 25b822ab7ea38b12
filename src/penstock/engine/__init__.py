"""What runs a recipe's steps. `train.py` knows this interface and nothing of what is behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.offload.lanes import Mark


@dataclass(frozen=True)
class StepResult:
    """One step, on the device: reading a value here is what makes the host wait."""

    loss: Tensor
    """Mean over the trained tokens of the step."""
    grad_norm: Tensor
    """Global norm before clipping."""
    skipped: Tensor
    """True if the gradient was not finite, so that nothing was updated."""
    done: Mark
    """Passed when the three are known."""


class Engine(Protocol):
    """Weights, gradients and optimizer state of one run."""

    model: PreTrainedModel

    def begin(self, lr: float) -> None:
        """A step begins. Its learning rate is wanted now, since weights may be updated during backward."""

    def accumulate(self, batch: MicroBatch, trained_in_step: int, *, last: bool) -> None:
        """Forward and backward of one micro-batch. `trained_in_step` counts the trained tokens of all of them."""

    def step(self) -> StepResult:
        """Update the weights from what was accumulated."""

    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """Mean loss over the trained tokens of `batches`."""

    def release(self) -> None:
        """Give back gradients and optimizer state; the weights stay."""
