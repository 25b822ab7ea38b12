"""A ring of slots: device memory that what streams passes through, used in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.flow.lanes import Mark, Streams


@dataclass
class Slot:
    """One of the ring, and when it is free again."""

    memory: Tensor
    free: Mark


class SlotRing:
    """As many slots as copies, updates and copies back overlap; whoever takes one waits until it is free."""

    def __init__(self, num_slots: int, slot_bytes: int, streams: Streams) -> None:
        memory = [torch.empty(slot_bytes, dtype=torch.uint8, device=streams.device) for _ in range(num_slots)]
        free = streams.main_mark()  # after which the device is done with what the memory was before
        self._slots = [Slot(part, free) for part in memory]
        self._turn = 0

    def take(self) -> Slot:
        """The next one. Its user sets `free` to the point after which nobody works with it."""
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        slot.free.wait_on_host()  # or what comes would land on what has not left yet
        return slot

    def close(self) -> None:
        """Give the memory back."""
        self._slots.clear()
