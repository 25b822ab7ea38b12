"""Inputs of layers, from which backward computes the layers again: kept on the device, or parked in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.packed import PackedModel
from penstock.flow.arena import INPUTS, Arena
from penstock.flow.lanes import Mark
from penstock.flow.transfers import NOW, Link
from penstock.machine.hardware import near_cores
from penstock.plan.layout import PREFETCHED_INPUTS, padded, parked_bytes
from penstock.recipe.recipe import Recipe, inputs_every

Key = tuple[int, int]
"""Of a layer and a micro-batch."""
AHEAD_BYTES = 2 * 2**30
"""Inputs that have not arrived, of more than two: each takes its memory until then, and the host, which is far ahead of
the device in a forward of few and long rows, would ask for more than there is."""


class SavedInputs(Protocol):
    """Where inputs are between forward and backward."""

    def save(self, key: Key, hidden: Tensor) -> None:
        """An input that the model does not change any more."""

    def announce(self, keys: Iterable[Key]) -> None:
        """The order in which they will be wanted."""

    def take(self, key: Key) -> Tensor:
        """It is back, and not kept any longer."""

    def forget(self) -> None:
        """Nothing of a step that ended, however it ended, is kept."""

    def close(self) -> None:
        """Give all memory back."""


class KeptInputs:
    """On the device."""

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}

    def save(self, key: Key, hidden: Tensor) -> None:
        """Keep it."""
        self._kept[key] = hidden

    def announce(self, keys: Iterable[Key]) -> None:
        """They are there."""

    def take(self, key: Key) -> Tensor:
        """It never left."""
        return self._kept.pop(key)

    def forget(self) -> None:
        """Drop them."""
        self._kept.clear()

    def close(self) -> None:
        """Drop them."""
        self._kept.clear()


@dataclass(frozen=True)
class _Parked:
    bytes: Tensor
    """In the arena."""
    shape: torch.Size
    dtype: torch.dtype
    arrived: Mark


class ParkedInputs:
    """In an arena; each goes down while the layer computes, and comes back a little before backward wants it.

    A thread brings it once there is memory for it. A copy that waits on the device for that memory was rejected: it
    held up the state that came behind it until backward was as far.
    """

    def __init__(self, num_bytes: int, link: Link, cores: Sequence[int]) -> None:
        """`num_bytes`: the most that the inputs of a step take."""
        self._link, self._streams = link, link.streams
        self.arena = Arena(num_bytes, pinned=self._streams.device.type == "cuda", cores=cores, what=INPUTS)
        self._memory, self._used = self.arena.cut(num_bytes), 0
        self._parked: dict[Key, _Parked] = {}
        self._leaving: deque[_Parked] = deque()
        self._to_fetch: deque[Key] = deque()
        self._fetched: dict[Key, tuple[Tensor, Future[Mark]]] = {}
        self._thread = self._streams.thread("penstock-parked")
        self._left = Mark()  # after which all that came back from the arena has left it

    def save(self, key: Key, hidden: Tensor) -> None:
        """Send it down at once: its memory is wanted."""
        hidden = hidden.contiguous()
        place = self._memory[self._used : self._used + hidden.nbytes]
        assert place.nbytes == hidden.nbytes, "an arena of inputs holds those of the longest rows"
        self._used += padded(hidden.nbytes)
        while len(self._leaving) > 1 and sum(parked.bytes.nbytes for parked in self._leaving) > AHEAD_BYTES:
            self._leaving.popleft().arrived.wait_on_host()
        written = self._streams.main_mark()  # the layer before is still writing it
        source = hidden.detach().view(-1).view(torch.uint8)
        after = (written, self._left)  # what lay there in the step before may still be on its way
        down = self._link.to_host.copy(place, source, deadline=NOW, after=after, label="park")
        self._parked[key] = _Parked(place, hidden.shape, hidden.dtype, down.result())
        self._leaving.append(self._parked[key])

    def announce(self, keys: Iterable[Key]) -> None:
        """The first ones set out."""
        self._to_fetch = deque(keys)
        for _ in range(PREFETCHED_INPUTS):
            self._fetch_next()

    def take(self, key: Key) -> Tensor:
        """The stream of the calling thread waits for it; another one sets out."""
        memory, fetched = self._fetched.pop(key)
        self._left = fetched.result()
        self._streams.main_waits(self._left)
        self._fetch_next()
        return memory

    def _fetch_next(self) -> None:
        if not self._to_fetch:
            return
        key = self._to_fetch.popleft()
        parked = self._parked.pop(key)
        memory = torch.empty(parked.shape, dtype=parked.dtype, device=self._streams.device)
        free = self._streams.main_mark()  # its memory was something else until here
        self._fetched[key] = memory, self._thread.submit(self._fetch, memory, parked, free)

    def _fetch(self, memory: Tensor, parked: _Parked, free: Mark) -> Mark:
        free.wait_on_host()  # or it would land on what is still computed with
        parked.arrived.wait_on_host()  # or it would leave before it has come
        target = memory.view(-1).view(torch.uint8)
        return self._link.to_device.copy(target, parked.bytes, deadline=NOW, label="park").result()

    def forget(self) -> None:
        """The arena is empty again."""
        for _, fetched in self._fetched.values():  # of a step that was given up
            if fetched.exception() is None:
                self._left = fetched.result()
        self._parked.clear()
        self._leaving.clear()
        self._fetched.clear()
        self._to_fetch.clear()
        self._used = 0

    def close(self) -> None:
        """Let what is under way arrive, then give the arena back."""
        self.forget()
        self._thread.shutdown()
        for way in (self._link.to_device, self._link.to_host):
            way.mark().wait_on_host()  # or copies would go on in memory that is given back
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.arena.close()


def rows_together(recipe: Recipe) -> int:
    """Rows that go through the layers together, with the empty ones that the loader adds for compiled layers."""
    at_once = recipe.rows_at_once
    if recipe.order == "rows":
        return at_once
    return -(-recipe.batch_size // at_once) * at_once if recipe.compile else recipe.batch_size


def saved_inputs(packed: PackedModel, recipe: Recipe, link: Link) -> SavedInputs:
    """Kept, or parked with room for the longest rows of a step."""
    if not recipe.inputs.startswith("parked"):
        return KeptInputs()
    config, rows = packed.model.config.get_text_config(), rows_together(recipe)
    width = 2 if recipe.dtype == "bf16" else 4
    count = -(-len(packed.decoder.layers) // inputs_every(recipe.inputs))
    num_bytes = parked_bytes(count, rows, recipe.max_length * config.hidden_size, width)
    return ParkedInputs(num_bytes, link, near_cores(packed.device))
