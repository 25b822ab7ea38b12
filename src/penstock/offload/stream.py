"""`stream`: state in an arena; a chunk travels into a slot, is updated on the device, and travels home.

Of a unit that streams the weight travels with it, and the gradient, which has left the device in backward.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from penstock.flow.arena import Arena
from penstock.flow.lanes import Mark
from penstock.flow.slots import SlotRing
from penstock.offload.homes import Surroundings, Update, update_on_device
from penstock.offload.landings import DTYPES, Landings
from penstock.plan.layout import NUM_SLOTS, Chunk, landing_bytes, padded
from penstock.update.formats import view_state


class StreamHome:
    """A ring of slots, and a thread that takes the chunks of a step through it.

    The thread asks for a copy only when its slot is free. Enqueueing all of them at once was rejected: a copy that
    waits for its slot would hold up the next batch and the weights of `host`. Some chunks come before their update,
    into memory of their own, while backward still runs (`prefetch.py`).
    """

    name = "stream"

    def __init__(
        self, chunks: Sequence[Chunk], around: Surroundings, *, cores: Sequence[int], most_waiting: int = 0
    ) -> None:
        """`most_waiting`: chunks that may wait for a slot, whose gradients take memory meanwhile; 0: all of them."""
        self._link, self._streams, self._rule = around.link, around.link.streams, around.rule
        self._deadlines, self.chunks = around.deadlines, list(chunks)
        self._away = {c for c in chunks if c.parameter in around.streamed}
        # In backward a gradient is where it is needed; after it, it would be kept there until the norm is known.
        landing = [c for c in chunks if c in self._away] if self._streams.separate_memory and not most_waiting else []
        pinned = self._streams.device.type == "cuda"
        total = sum(padded(c.state_bytes) for c in chunks) + landing_bytes(landing)
        self.arena = Arena(total, pinned=pinned, cores=cores)
        self._state = {c: self.arena.cut(c.state_bytes) for c in chunks}
        self._landings = Landings(landing, self.arena, self._link)
        self._ring = SlotRing(NUM_SLOTS, max(self._slot_bytes(c) for c in chunks), self._streams)
        self._lane = self._streams.lane("update", urgent=True)
        self._thread = self._streams.thread("penstock-stream")
        self._home_again: dict[Chunk, Mark] = {}  # after which a chunk's state is back from its last update
        self._prefetched: dict[Chunk, tuple[Tensor, Mark]] = {}  # the thread's: where each lies, and when it arrives
        self._prefetched_out: deque[Mark] = deque()
        self._most_waiting = most_waiting
        self._waiting: deque[Future[Mark]] = deque()

    def _slot_bytes(self, chunk: Chunk) -> int:
        """State, and of a weight that lies in host memory room for it and for its gradient."""
        beside = 2 * padded(chunk.copy_bytes) if chunk in self._away else 0
        return padded(chunk.state_bytes) + beside

    def sends_down(self, chunk: Chunk) -> bool:
        """That of a weight which lies in host memory, to come back with it."""
        return chunk in self._landings

    def gradient_final(self, chunk: Chunk, gradient: Tensor, written: Mark) -> None:
        """It is where it is needed, or leaves."""
        if chunk in self._landings:
            self._landings.send(chunk, gradient, written)

    def update(self, update: Update) -> Future[Mark]:
        """Queue the chunk for the thread; with `most_waiting`, not before the queue is that short."""
        if update.chunk in self._away:
            future = self._thread.submit(self._update_away, update, self._landed(update.chunk))
        else:
            future = self._thread.submit(self._update_now, update)
        if self._most_waiting:
            self._waiting.append(future)
            if len(self._waiting) > self._most_waiting:
                self._waiting.popleft().exception()  # waits; whoever waits for that chunk is told of an error
        return future

    def prefetch(self, chunk: Chunk, memory: Tensor, free: Mark) -> Future[None]:
        """Bring a chunk in before its update, into `memory`, which the device still uses until `free`."""
        return self._thread.submit(self._prefetch_now, chunk, memory, free)

    def forget_prefetched(self) -> Future[None]:
        """What came and was not updated is void."""
        return self._thread.submit(self._prefetched.clear)

    @torch.no_grad()
    def _prefetch_now(self, chunk: Chunk, memory: Tensor, free: Mark) -> None:
        self._prefetched[chunk] = memory, self._copy_in(chunk, memory, free)

    @torch.no_grad()
    def _update_now(self, update: Update) -> Mark:
        """In, update, out, each on its lane; the lanes of different chunks overlap."""
        chunk, slot = update.chunk, None
        prefetched = self._prefetched.pop(chunk, None)
        if prefetched is not None:
            memory, arrived = prefetched
            if len(self._prefetched_out) >= NUM_SLOTS:  # or forward would be enqueued before there is memory for it
                self._prefetched_out.popleft().wait_on_host()
        else:
            slot = self._ring.take()
            memory = slot.memory[: chunk.state_bytes]
            arrived = self._copy_in(chunk, memory, Mark())
        self._lane.wait(arrived)  # or the kernel would read what was in the slot before
        updated = update_on_device(self._lane, self._rule, update, view_state(chunk, memory))
        self._lane.uses(memory)
        gone = self._send(chunk, memory, updated)
        self._home_again[chunk] = gone
        if slot is not None:
            slot.free = gone
        else:
            self._prefetched_out.append(gone)
        return updated

    def _landed(self, chunk: Chunk) -> tuple[Tensor, Mark] | None:
        return self._landings.take(chunk) if chunk in self._landings else None

    @torch.no_grad()
    def _update_away(self, update: Update, landed: tuple[Tensor, Mark] | None) -> Mark:
        """The same with a weight that lies in host memory: it travels too, and so does a gradient that left."""
        chunk, slot = update.chunk, self._ring.take()
        sizes = (chunk.state_bytes, chunk.copy_bytes, chunk.copy_bytes)
        starts = (0, padded(sizes[0]), padded(sizes[0]) + padded(sizes[1]))
        state, *copies = (slot.memory[start : start + size] for start, size in zip(starts, sizes, strict=True))
        weight, gradient = (copy.view(DTYPES[chunk.weight_bytes]) for copy in copies)
        beside, after = [(weight, update.weight)], Mark()
        if landed is not None:
            beside.append((gradient, landed[0]))
            update, after = dataclasses.replace(update, gradient=gradient), landed[1]
        self._lane.wait(self._copy_in(chunk, state, after, *beside))
        here = dataclasses.replace(update, weight=weight)
        updated = update_on_device(self._lane, self._rule, here, view_state(chunk, state))
        self._home_again[chunk] = slot.free = gone = self._send(chunk, state, updated, (update.weight, weight))
        return gone

    def _copy_in(self, chunk: Chunk, memory: Tensor, after: Mark, *beside: tuple[Tensor, Tensor]) -> Mark:
        self._home_again.get(chunk, Mark()).wait_on_host()  # or, of few chunks, it would set out before it came home
        pairs, deadline = [(memory, self._state[chunk]), *beside], self._deadlines[chunk.parameter]
        return self._link.to_device.copy_together(pairs, deadline=deadline, after=after).result()

    def _send(self, chunk: Chunk, memory: Tensor, updated: Mark, *beside: tuple[Tensor, Tensor]) -> Mark:
        pairs, deadline = [(self._state[chunk], memory), *beside], self._deadlines[chunk.parameter]
        return self._link.to_host.copy_together(pairs, deadline=deadline, after=updated).result()

    def end_step(self) -> None:
        """Nothing is left for later."""

    def settle(self) -> None:
        """Nothing was left."""

    def state(self, chunk: Chunk) -> Tensor:
        """In the arena, once everything is home. It may be written, so that what was prefetched is void."""
        self._come_home()
        return self._state[chunk]

    def _come_home(self) -> None:
        self.forget_prefetched().result()
        self._link.to_device.mark().wait_on_host()  # what was prefetched and is not wanted any more reads the arena too
        self._link.to_host.mark().wait_on_host()

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """There is no second copy of it."""

    def close(self) -> None:
        """Let the last chunk come home, then free slots and arena."""
        self._come_home()
        self._thread.shutdown()
        self._state.clear()
        self._landings.clear()
        self._ring.close()
        self.arena.close()
