"""`gpu`: state beside the weights, updated there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from penstock.flow.lanes import Mark
from penstock.offload.homes import Surroundings, Update, update_on_device
from penstock.plan.layout import Chunk
from penstock.update.formats import view_state


class ResidentHome:
    """State on the device."""

    name = "gpu"
    arena = None

    def __init__(self, chunks: Sequence[Chunk], around: Surroundings) -> None:
        streams = around.link.streams
        self._rule, self._lane = around.rule, streams.lane("update", urgent=True)
        self._state = {c: torch.zeros(c.state_bytes, dtype=torch.uint8, device=streams.device) for c in chunks}
        self._views = {c: view_state(c, state) for c, state in self._state.items()}

    def sends_down(self, chunk: Chunk) -> bool:
        """It is where it is needed."""
        return False

    def gradient_final(self, chunk: Chunk, gradient: Tensor, written: Mark) -> None:
        """It is where it is needed."""

    def update(self, update: Update) -> Future[Mark]:
        """Update in place."""
        future: Future[Mark] = Future()
        future.set_result(update_on_device(self._lane, self._rule, update, self._views[update.chunk]))
        return future

    def end_step(self) -> None:
        """Nothing is left for later."""

    def settle(self) -> None:
        """Nothing was left."""

    def state(self, chunk: Chunk) -> Tensor:
        """On the device."""
        return self._state[chunk]

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """There is no second copy of it."""

    def close(self) -> None:
        """Free the device memory, once nobody writes it any more."""
        self._lane.mark().wait_on_host()
        self._views.clear()
        self._state.clear()
