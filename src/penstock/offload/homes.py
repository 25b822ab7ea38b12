"""The three homes of state. They differ in where a chunk's state lies and who updates it, never in a bit of the result.

`gpu`: state lies beside the weights and is updated there.
`stream`: state lies in an arena; a chunk travels in, is updated by the same kernel, and travels out: one copy each way.
`host`: state lies in an arena and is updated there by CPU threads; the gradient comes down, the weight goes up.

A queue to another process was rejected for `host`: it needs a second copy of every tensor and loses the pinning. The C
kernel releases the interpreter lock, so threads do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.offload.arena import Arena, padded
from penstock.offload.formats import StateFormat, StateView
from penstock.offload.kernels import adamw_
from penstock.offload.lanes import Lane, Mark, main_mark

NUM_SLOTS = 4
"""Staging slots of `stream`: one arriving, one updating, one leaving, one to absorb jitter."""
HOST_PART = 1 << 20
"""Elements that one thread updates in one call of the C kernel: a few milliseconds, so little waiting at the end. A
multiple of every format's block."""


@dataclass(frozen=True)
class Chunk:
    """A slice of one parameter: what has a home and moves."""

    parameter: int
    start: int
    size: int
    dtype: torch.dtype
    states: StateFormat

    @property
    def state_bytes(self) -> int:
        """Bytes of its state."""
        return self.states.num_bytes(self.size, self.dtype)

    def view(self, buffer: Tensor) -> StateView:
        """`buffer` of bytes as the tensors of its state."""
        return self.states.cut(buffer, self.size, self.dtype, start=self.start, salt=self.parameter)

    def of(self, flat: Tensor) -> Tensor:
        """This chunk's part of its parameter's flat tensor."""
        return flat[self.start : self.start + self.size]


class Home(Protocol):
    """Where chunks live. `weight` and `gradient` are the chunk's flat slices on the device."""

    name: str

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """The gradient will not change any more in this step."""

    def update(self, chunk: Chunk, weight: Tensor, gradient: Tensor | None, coefficients: Coefficients) -> Future[Mark]:
        """Enqueue the update. The result is the mark after which the weight may be read."""

    def state(self, chunk: Chunk) -> Tensor:
        """The chunk's bytes where they lie, to be read or written while no update is under way."""

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """Someone else wrote the weight."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True)
class Coefficients:
    """The scalars of one group in one step, on the device, and on the host once `on_host` is passed."""

    device: Tensor
    host: Tensor
    on_host: Mark


def finished(mark: Mark) -> Future[Mark]:
    """A future that is done already."""
    future: Future[Mark] = Future()
    future.set_result(mark)
    return future


class ResidentHome:
    """`gpu`: state beside the weights."""

    name = "gpu"

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, lane: Lane) -> None:
        self._lane = lane
        self._state = {c: torch.zeros(c.state_bytes, dtype=torch.uint8, device=device) for c in chunks}

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """It is where it is needed."""

    def update(self, chunk: Chunk, weight: Tensor, gradient: Tensor | None, coefficients: Coefficients) -> Future[Mark]:
        """Update in place, on the update lane."""
        assert gradient is not None
        with self._lane:
            adamw_(weight, gradient, chunk.view(self._state[chunk]), coefficients.device)
        return finished(self._lane.mark())

    def state(self, chunk: Chunk) -> Tensor:
        """On the device."""
        return self._state[chunk]

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """There is no second copy of it."""

    def close(self) -> None:
        """Free the device memory."""
        self._state.clear()


class StreamHome:
    """`stream`: state in an arena, updated on the device in one of a few staging slots."""

    name = "stream"

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, update_lane: Lane) -> None:
        self._arena = Arena(sum(padded(c.state_bytes) for c in chunks), pinned=device.type == "cuda")
        self._state = {c: self._arena.cut(c.state_bytes) for c in chunks}
        slot_bytes = max((c.state_bytes for c in chunks), default=0)
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._free = [main_mark(device)] * NUM_SLOTS
        self._in, self._update, self._out = Lane(device), update_lane, Lane(device)
        self._home: dict[Chunk, Mark] = {}
        self._turn = 0

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """It is where it is needed."""

    def update(self, chunk: Chunk, weight: Tensor, gradient: Tensor | None, coefficients: Coefficients) -> Future[Mark]:
        """In, update, out, each on its lane; the lanes of different chunks overlap."""
        assert gradient is not None
        turn, self._turn = self._turn % len(self._slots), self._turn + 1
        slot, home = self._slots[turn][: chunk.state_bytes], self._state[chunk]
        self._in.wait(self._free[turn])  # or the chunk would land on one that has not left yet
        self._in.wait(self._home.get(chunk, Mark()))  # or it would set out again before it came home
        with self._in:
            slot.copy_(home, non_blocking=True)
        self._update.wait(self._in.mark())  # or the kernel would read what was in the slot before
        with self._update:
            adamw_(weight, gradient, chunk.view(slot), coefficients.device)
        updated = self._update.mark()
        self._out.wait(updated)  # or old state would travel home
        with self._out:
            home.copy_(slot, non_blocking=True)
        self._free[turn] = self._home[chunk] = self._out.mark()
        return finished(updated)

    def state(self, chunk: Chunk) -> Tensor:
        """In the arena, once everything is home."""
        for mark in self._free:
            mark.wait_on_host()
        return self._state[chunk]

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """There is no second copy of it."""

    def close(self) -> None:
        """Let the last chunk come home, then free slots and arena."""
        for mark in self._free:
            mark.wait_on_host()
        self._state.clear()
        self._slots.clear()
        self._arena.close()


@dataclass(frozen=True)
class _HostCopy:
    """What a host chunk has in the arena. On a CPU device weight and gradient are used where they are."""

    state: Tensor
    weight: Tensor | None
    gradient: Tensor | None


class HostHome:
    """`host`: state in an arena, updated there by threads."""

    name = "host"

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, *, cores: Sequence[int]) -> None:
        self._device, self._mirrored = device, device.type == "cuda"
        itemsize = {c: c.dtype.itemsize if self._mirrored else 0 for c in chunks}
        total = sum(padded(c.state_bytes) + 2 * padded(c.size * itemsize[c]) for c in chunks)
        self._arena = Arena(total, pinned=self._mirrored)
        self._copies = {c: self._place(c) for c in chunks}
        self._down, self._up = Lane(device), Lane(device)
        self._arrived: dict[Chunk, Mark] = {}
        self._threads = ThreadPoolExecutor(max(1, len(cores)), "penstock-adam")
        self._order = ThreadPoolExecutor(1, "penstock-host")  # takes chunks in the order given, one after another

    def _place(self, chunk: Chunk) -> _HostCopy:
        state = self._arena.cut(chunk.state_bytes)
        if not self._mirrored:
            return _HostCopy(state, None, None)
        weight, gradient = (self._arena.cut(chunk.size * chunk.dtype.itemsize).view(chunk.dtype) for _ in range(2))
        return _HostCopy(state, weight, gradient)

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """Send it down at once: during backward the link has nothing else to do."""
        landing = self._copies[chunk].gradient
        if landing is not None:
            self._down.wait(main_mark(self._device))  # backward is still writing it
            with self._down:
                landing.copy_(gradient, non_blocking=True)
            self._down.uses(gradient)  # or the allocator would give its memory to the next layer in mid-copy
            self._arrived[chunk] = self._down.mark()

    def update(self, chunk: Chunk, weight: Tensor, gradient: Tensor | None, coefficients: Coefficients) -> Future[Mark]:
        """Queue the chunk for the threads; they take it when its gradient and the scalars are there."""
        self._up.wait(main_mark(self._device))  # or a weight could change under a backward that still reads it
        arrived = self._arrived.pop(chunk, Mark())
        # What was sent down is not kept on the GPU until the threads come to it.
        return self._order.submit(
            self._update_now, chunk, weight, None if self._mirrored else gradient, coefficients, arrived
        )

    def _update_now(
        self, chunk: Chunk, weight: Tensor, gradient: Tensor | None, coefficients: Coefficients, arrived: Mark
    ) -> Mark:
        copy = self._copies[chunk]
        host_weight = weight if copy.weight is None else copy.weight
        host_gradient = gradient if copy.gradient is None else copy.gradient
        assert host_gradient is not None, "a gradient is on the device, or was sent down"
        arrived.wait_on_host()
        coefficients.on_host.wait_on_host()
        state = chunk.view(copy.state)

        def update_part(start: int) -> None:
            stop = min(start + HOST_PART, chunk.size)
            own = state.part(start, stop)
            adamw_(host_weight[start:stop], host_gradient[start:stop], own, coefficients.host)

        for _ in self._threads.map(update_part, range(0, chunk.size, HOST_PART)):
            pass
        if copy.weight is not None:
            with self._up:
                weight.copy_(copy.weight, non_blocking=True)
        return self._up.mark()

    def state(self, chunk: Chunk) -> Tensor:
        """In the arena, once the threads are done."""
        self._order.submit(lambda: None).result()
        return self._copies[chunk].state

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """Take the new weight as the high half of the master."""
        copy = self._copies[chunk].weight
        if copy is not None:
            copy.copy_(weight)

    def close(self) -> None:
        """Stop the threads, free the arena."""
        self._order.shutdown()
        self._threads.shutdown()
        self._copies.clear()
        self._arena.close()
