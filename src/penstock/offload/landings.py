"""Landings: host memory for gradients that leave the device during backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.flow.arena import Arena
from penstock.flow.lanes import Mark
from penstock.flow.transfers import NOW, Link
from penstock.plan.layout import Chunk, landing_bytes, padded

DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Of weights and gradients, by their bytes."""


@dataclass
class _Place:
    memory: Tensor
    read: Future[Any] | None = None
    """Done once nobody reads what lies there any more."""


class Landings:
    """Those of some chunks of a home. Where device and host are one memory there are none, and gradients stay.

    Gradients that wait for the norm have a place each. Those that are used at once share a ring of them.
    """

    def __init__(self, chunks: Sequence[Chunk], arena: Arena, link: Link, *, ring: bool = False) -> None:
        self._link, self._streams, self._chunks = link, link.streams, frozenset(chunks)
        self._at: dict[Chunk, _Place] = {}
        self._arrived: dict[Chunk, Mark] = {}
        self._ring: deque[_Place] = deque()
        if ring and chunks:
            largest = max(padded(chunk.copy_bytes) for chunk in chunks)
            count = landing_bytes(chunks, ring=True) // largest
            self._ring.extend(_Place(arena.cut(largest)) for _ in range(count))
        else:
            self._at = {chunk: _Place(arena.cut(chunk.copy_bytes)) for chunk in chunks}

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._chunks

    def send(self, chunk: Chunk, gradient: Tensor, written: Mark) -> None:
        """Send it down, once it is `written`: in backward the link has nothing else to do, and its memory is wanted."""
        if self._ring:
            self._at[chunk] = self._ring[0]
            self._ring.rotate(-1)
        place = self._at[chunk]
        if place.read is not None:
            place.read.result()  # or the cores would read the gradient of another step, or of another chunk
            place.read = None
        memory = self._memory(chunk)
        down = self._link.to_host.copy(memory, gradient, deadline=NOW, after=written, label="down")
        self._arrived[chunk] = down.result()

    def take(self, chunk: Chunk) -> tuple[Tensor, Mark]:
        """The gradient of this step, and when it is there."""
        return self._memory(chunk), self._arrived.pop(chunk, Mark())

    def in_use(self, chunk: Chunk, until: Future[Any]) -> None:
        """What lies there is read until then."""
        self._at[chunk].read = until

    def clear(self) -> None:
        """Let go of the arena."""
        self._at.clear()
        self._ring.clear()

    def _memory(self, chunk: Chunk) -> Tensor:
        return self._at[chunk].memory[: chunk.copy_bytes].view(DTYPES[chunk.weight_bytes])
