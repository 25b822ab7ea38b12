"""Slots for units that stream: device memory in which the weights of a unit lie while it computes.

A unit has one slot that it may come to, by its number, so that after a forward the last ones still lie there when
backward begins with them. A thread brings units in the order in which they were announced, each as soon as the one
before it has left its slot. Copies that wait on the device for their slot were rejected: they would hold up everything
that goes the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.flow.lanes import Mark
from penstock.flow.transfers import NOW, Link


@dataclass
class _UnitSlot:
    memory: Tensor
    free: Mark
    """The point after which the device is done with what lies there."""
    unit: int | None = None
    """What lies there, or is on its way."""
    arrival: Future[Mark] | None = None
    wanted: int = 0
    """Announced uses of what lies there that have not ended."""


@dataclass
class _Announced:
    """Uses in their order: those that wait for their slot, and those that are to be taken."""

    to_fetch: deque[int] = field(default_factory=deque)
    to_take: deque[int] = field(default_factory=deque)


class UnitSlots:
    """Brings units in, and says where they lie. Units are numbers; their bytes are `sources`, in host memory."""

    def __init__(
        self, num_slots: int, sources: Sequence[Tensor], link: Link, ready: Callable[[int], None] = lambda unit: None
    ) -> None:
        """`ready` is called in a thread and returns once the bytes of a unit may be read."""
        self._link, self._streams, self._sources, self._ready = link, link.streams, sources, ready
        largest, device = max(source.nbytes for source in sources), self._streams.device
        num_slots = min(num_slots, len(sources))
        memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(num_slots)]
        free = self._streams.main_mark()  # after which the device is done with what the memory was before
        self._slots = [_UnitSlot(part, free) for part in memory]
        self._thread = self._streams.thread("penstock-weights")
        self._announced = _Announced()

    def announce(self, units: Iterable[int]) -> None:
        """The units that will be taken, in this order; what was announced before and not taken is forgotten."""
        order = list(units)
        self._announced = _Announced(deque(order), deque(order))
        for slot in self._slots:
            slot.wanted = 0
        self._fetch_those_with_room()

    def take(self, unit: int) -> Tensor:
        """Where the unit lies; the calling thread's stream waits until it is there.

        One that was not announced begins a forward of its own.
        """
        if not self._announced.to_take or self._announced.to_take[0] != unit:
            self.announce(range(unit, len(self._sources)))
        self._announced.to_take.popleft()
        slot = self._slots[unit % len(self._slots)]
        assert slot.unit == unit, "a unit is announced, so that it was fetched as soon as its slot was left"
        assert slot.arrival is not None, "whoever set the unit set its arrival"
        with self._streams.timeline.on_device("wait"):
            self._streams.main_waits(slot.arrival.result())
        return slot.memory[: self._sources[unit].nbytes]

    def leave(self, unit: int, *, stale: bool) -> None:
        """The calling thread's stream is done with it. `stale`: it will be another when it is needed again."""
        slot = self._slots[unit % len(self._slots)]
        slot.free = self._streams.main_mark()
        slot.wanted = max(0, slot.wanted - 1)
        if stale:
            slot.unit = slot.arrival = None
        self._fetch_those_with_room()

    def forget(self) -> None:
        """All units were written to: nothing that lies here is true any more."""
        self._announced = _Announced()
        for slot in self._slots:
            slot.unit, slot.arrival, slot.wanted = None, None, 0

    def close(self) -> None:
        """Let what is under way arrive, then give the memory back."""
        self._thread.shutdown()
        self._link.to_device.mark().wait_on_host()  # or copies would go on in memory that is given back
        self._slots.clear()

    def _fetch_those_with_room(self) -> None:
        waiting = self._announced.to_fetch
        while waiting:
            unit = waiting[0]
            slot = self._slots[unit % len(self._slots)]
            if slot.unit != unit:
                if slot.wanted:
                    return
                slot.unit, slot.arrival = unit, self._thread.submit(self._fetch, unit, slot.memory, slot.free)
            slot.wanted += 1
            waiting.popleft()

    def _fetch(self, unit: int, memory: Tensor, free: Mark) -> Mark:
        source = self._sources[unit]
        self._ready(unit)  # or the weights of the step before would come
        free.wait_on_host()  # or they would land on what is still computed with
        return self._link.to_device.copy(memory[: source.nbytes], source, deadline=NOW, label="weights").result()
