"""Landings: host memory for gradients that leave the device during backward, a piece a chunk."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.flow.arena import Arena
from penstock.flow.lanes import Mark
from penstock.flow.transfers import NOW, Link
from penstock.plan.layout import Chunk

DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Of weights and gradients, by their bytes."""


class Landings:
    """Those of some chunks of a home. Where device and host are one memory there are none, and gradients stay."""

    def __init__(self, chunks: Iterable[Chunk], arena: Arena, link: Link) -> None:
        self._link, self._streams = link, link.streams
        self._places = {c: arena.cut(c.copy_bytes).view(DTYPES[c.weight_bytes]) for c in chunks}
        self._arrived: dict[Chunk, Mark] = {}

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._places

    def send(self, chunk: Chunk, gradient: Tensor) -> None:
        """Send it down at once: during backward the link has nothing else to do, and its memory is wanted."""
        written = self._streams.main_mark()  # backward is still writing it
        down = self._link.to_host.copy(self._places[chunk], gradient, deadline=NOW, after=written, label="down")
        self._arrived[chunk] = down.result()

    def take(self, chunk: Chunk) -> tuple[Tensor, Mark]:
        """The gradient of this step, and when it is there."""
        return self._places[chunk], self._arrived.pop(chunk, Mark())

    def clear(self) -> None:
        """Let go of the arena."""
        self._places.clear()
