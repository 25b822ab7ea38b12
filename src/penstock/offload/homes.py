"""What the three homes of state have in common.

They differ in where a chunk's state lies and who updates it, never in a bit of the result.

`gpu` (`resident.py`): state lies beside the weights and is updated there.
`stream` (`stream.py`): state lies in an arena; a chunk travels in, is updated by the same kernel, and travels out.
`host` (`host.py`): state lies in an arena and is updated there by CPU threads; the gradient comes down, the weight goes
up. A queue to another process was rejected: it needs a second copy of every tensor and loses the pinning.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.flow.arena import Arena
from penstock.flow.lanes import Lane, Mark, Streams, ToHost
from penstock.flow.transfers import Link
from penstock.plan.layout import Chunk
from penstock.update.formats import StateView
from penstock.update.rule import Rule


@dataclass(frozen=True)
class Coefficients:
    """The scalars of one step: a row of its group on the device, and all rows on their way to the host."""

    device: Tensor
    host: ToHost
    group: int


def rows_of(coefficients: Tensor, streams: Streams) -> list[Coefficients]:
    """A row a group, on the device and, for the C kernel, on the host."""
    host = streams.to_host(coefficients)
    return [Coefficients(row, host, group) for group, row in enumerate(coefficients)]


@dataclass(frozen=True)
class Update:
    """One chunk's update in one step. `weight` and `gradient` are the chunk's flat slices on the device."""

    chunk: Chunk
    weight: Tensor
    gradient: Tensor | None
    """None if it was sent down and is no longer on the device."""
    coefficients: Coefficients
    ready: Mark
    """The point after which the model neither writes the gradient nor reads the weight."""


@dataclass(frozen=True)
class Surroundings:
    """What every home works with."""

    rule: Rule
    link: Link
    deadlines: Sequence[int]
    """By parameter, the number of the unit that waits for it, in the order of forward."""
    streamed: frozenset[int] = frozenset()
    """Parameters whose weights lie in host memory, and are updated there."""


class Home(Protocol):
    """Where chunks live."""

    name: str

    @property
    def arena(self) -> Arena | None:
        """The host memory it took, if any."""

    def sends_down(self, chunk: Chunk) -> bool:
        """Whether the gradient of a chunk leaves the device as soon as it is final."""

    def gradient_final(self, chunk: Chunk, gradient: Tensor, written: Mark) -> None:
        """The gradient will not change any more in this step, and is there after `written`."""

    def update(self, update: Update) -> Future[Mark]:
        """Have the update made. The result is the mark after which the weight may be read."""

    def end_step(self) -> None:
        """All updates of this step have been asked for."""

    def settle(self) -> None:
        """Return once nothing of the last step is left to do beside the updates that were waited for."""

    def state(self, chunk: Chunk) -> Tensor:
        """The chunk's bytes where they lie, to be read or written while no update is under way."""

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """Someone else wrote the weight."""

    def close(self) -> None:
        """Give everything back."""


def update_on_device(lane: Lane, rule: Rule, update: Update, state: StateView) -> Mark:
    """Enqueue the kernel on `lane`; `state` is on the device."""
    assert update.gradient is not None, "only host chunks send their gradients away"
    lane.wait(update.ready)  # backward is still writing gradients and reading weights
    with lane.work():
        rule.update_(update.weight, update.gradient, state, update.coefficients.device)
    for tensor in (update.gradient, update.coefficients.device, update.weight):
        lane.uses(tensor)  # or its memory could go to the next layer's backward while the lane still works with it
    return lane.mark()
