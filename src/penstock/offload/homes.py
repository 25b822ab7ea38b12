"""The three homes of state. They differ in where a chunk's state lies and who updates it, never in a bit of the result.

`gpu`: state lies beside the weights and is updated there.
`stream`: state lies in an arena; a chunk travels in, is updated by the same kernel, and travels out: one copy each way.
`host`: state lies in an arena and is updated there by CPU threads; the gradient comes down, the weight goes up.

A queue to another process was rejected for `host`: it needs a second copy of every tensor and loses the pinning.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.flow.arena import Arena
from penstock.flow.lanes import Lane, Mark, Tape, ToHost, main_mark
from penstock.plan.layout import NUM_SLOTS, padded
from penstock.update.formats import StateFormat, StateView
from penstock.update.host_threads import Pool
from penstock.update.kernels import adamw_

IN_PIECES = (
    "GPU memory is in pieces: no more state comes before its update, and steps take a little longer. "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps."
)


@dataclass(frozen=True)
class Chunk:
    """A slice of one parameter, or of this rank's shard of it: what has a home and moves."""

    parameter: int
    start: int
    size: int
    dtype: torch.dtype
    states: StateFormat
    offset: int = 0
    """Elements of the parameter before this rank's shard, from which `start` counts. Stochastic rounding goes by the
    place in the whole parameter, so that the number of ranks does not show in it."""

    @property
    def state_bytes(self) -> int:
        """Bytes of its state."""
        return self.states.num_bytes(self.size, self.dtype)

    def view(self, buffer: Tensor) -> StateView:
        """`buffer` of bytes as the tensors of its state."""
        return self.states.cut(buffer, self.size, self.dtype, start=self.offset + self.start, salt=self.parameter)

    def of(self, flat: Tensor) -> Tensor:
        """This chunk's part of its parameter's flat tensor."""
        return flat[self.start : self.start + self.size]


@dataclass(frozen=True)
class Coefficients:
    """The scalars of one step: a row of its group on the device, and all rows on their way to the host."""

    device: Tensor
    host: ToHost
    group: int


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


class Home(Protocol):
    """Where chunks live."""

    name: str

    @property
    def arena(self) -> Arena | None:
        """The host memory it took, if any."""

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """The gradient will not change any more in this step."""

    def update(self, update: Update) -> Future[Mark]:
        """Have the update made. The result is the mark after which the weight may be read."""

    def state(self, chunk: Chunk) -> Tensor:
        """The chunk's bytes where they lie, to be read or written while no update is under way."""

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """Someone else wrote the weight."""

    def close(self) -> None:
        """Give everything back."""


class ResidentHome:
    """`gpu`: state beside the weights."""

    name = "gpu"
    arena = None

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, tape: Tape) -> None:
        self._lane = Lane("update", device, tape, urgent=True)
        self._state = {c: torch.zeros(c.state_bytes, dtype=torch.uint8, device=device) for c in chunks}
        self._views = {c: c.view(state) for c, state in self._state.items()}

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """It is where it is needed."""

    def update(self, update: Update) -> Future[Mark]:
        """Update in place."""
        future: Future[Mark] = Future()
        future.set_result(_update_on_device(self._lane, update, self._views[update.chunk]))
        return future

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


def _one_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """A thread for a home. Every thread begins on the first GPU and would take memory there for nothing."""
    if device.type != "cuda":
        return ThreadPoolExecutor(1, name)
    number = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(1, name, initializer=torch.cuda.set_device, initargs=(number,))


def _update_on_device(lane: Lane, update: Update, state: StateView) -> Mark:
    """Enqueue the kernel on `lane`; `state` is on the device."""
    assert update.gradient is not None, "only host chunks send their gradients away"
    lane.wait(update.ready)  # backward is still writing gradients and reading weights
    with lane.work():
        adamw_(update.weight, update.gradient, state, update.coefficients.device)
    lane.uses(update.gradient)  # or its memory could go to the next layer's backward while the lane still reads it
    lane.uses(update.coefficients.device)
    return lane.mark()


class StreamHome:
    """`stream`: state in an arena, updated on the device in one of a few staging slots.

    A thread gives the copies to the device, each only when its slot is free. Enqueueing all of them at once was
    rejected: the copies of one direction, whatever their stream, are made in the order in which they were enqueued, so
    that a copy waiting for its slot would hold up the next batch and the weights of `host`.

    Some chunks come before their update, while backward still runs, into memory that activations have left: then the
    link has nothing else to bring. They are spread over forward, so that both ways are busy in all of it.
    """

    name = "stream"

    def __init__(
        self,
        chunks: Sequence[Chunk],
        device: torch.device,
        tape: Tape,
        *,
        cores: Sequence[int],
        most_waiting: int = 0,
    ) -> None:
        self.arena = Arena(sum(padded(c.state_bytes) for c in chunks), pinned=device.type == "cuda", cores=cores)
        self._state = {c: self.arena.cut(c.state_bytes) for c in chunks}
        slot_bytes = max((c.state_bytes for c in chunks), default=0)
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._free = [main_mark(device)] * NUM_SLOTS
        self._home_again: dict[Chunk, Mark] = {}  # after which a chunk's state is back from its last update
        self._last_out = Mark()
        self._device, self._chunks = device, list(chunks)
        self._early: list[Chunk] = []  # those that come before their update, in the order of forward
        self._to_come: deque[Chunk] = deque()  # of them, those that have not come in this step
        self._come_bytes = 0
        self._bringing: list[Future[None]] = []
        self._there: dict[Chunk, tuple[Tensor, Mark]] = {}  # the thread's: what has come, and when it has arrived
        self._early_out: deque[Mark] = deque()
        self._in, self._out = Lane("in", device, tape, to_device=True), Lane("out", device, tape)
        self._lane = Lane("update", device, tape, urgent=True)
        self._turn = 0
        self._order = _one_thread("penstock-stream", device)
        self._most_waiting = most_waiting
        self._waiting: deque[Future[Mark]] = deque()

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """It is where it is needed."""

    def update(self, update: Update) -> Future[Mark]:
        """Queue the chunk for the thread; with `most_waiting`, not before the queue is that short."""
        future = self._order.submit(self._update_now, update)
        if self._most_waiting:
            self._waiting.append(future)
            if len(self._waiting) > self._most_waiting:
                self._waiting.popleft().exception()  # waits; whoever waits for that chunk is told of an error
        return future

    def choose_early(self, num_bytes: float) -> None:
        """As many chunks as that holds come before their update from now on, where `bring` has room for them."""
        mean = sum(chunk.state_bytes for chunk in self._chunks) / len(self._chunks)
        count = min(len(self._chunks), int(max(0.0, num_bytes) / mean))
        self._early = [self._chunks[(2 * i + 1) * len(self._chunks) // (2 * count)] for i in range(count)]
        self.new_step()

    def bring(self, room: float) -> None:
        """Bring the next of them in, as long as all that came in this step fit `room` bytes."""
        while self._to_come and self._come_bytes + self._to_come[0].state_bytes <= room:
            chunk = self._to_come.popleft()
            try:
                slot = torch.empty(chunk.state_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:  # in pieces that are too small: what cannot come early streams
                self._early, self._to_come = [], deque()
                self._order.submit(self._there.clear)
                warnings.warn(IN_PIECES, stacklevel=1)
                return
            self._come_bytes += chunk.state_bytes
            # Its memory was an activation's until here, so nothing may be written there before the device is as far.
            self._bringing.append(self._order.submit(self._bring_now, chunk, slot, main_mark(self._device)))

    def new_step(self) -> None:
        """Forget what came and was not updated."""
        if self._come_bytes:
            self._order.submit(self._there.clear)
        self._to_come, self._come_bytes = deque(self._early), 0
        done = [bringing for bringing in self._bringing if bringing.done()]
        self._bringing = [bringing for bringing in self._bringing if bringing not in done]
        for bringing in done:
            bringing.result()  # an error there is an error here

    @torch.no_grad()
    def _bring_now(self, chunk: Chunk, slot: Tensor, free: Mark) -> None:
        self._in.wait(free)
        self._there[chunk] = slot, self._copy_in(chunk, slot)
        self._in.uses(slot)

    @torch.no_grad()
    def _update_now(self, update: Update) -> Mark:
        """In, update, out, each on its lane; the lanes of different chunks overlap."""
        there = self._there.pop(update.chunk, None)
        if there is not None:
            slot, arrived = there
            if len(self._early_out) >= NUM_SLOTS:  # or forward would be enqueued before there is memory for it
                self._early_out.popleft().wait_on_host()
        else:
            turn, self._turn = self._turn % len(self._slots), self._turn + 1
            slot = self._slots[turn][: update.chunk.state_bytes]
            self._free[turn].wait_on_host()  # or the chunk would land on one that has not left yet
            arrived = self._copy_in(update.chunk, slot)
        self._lane.wait(arrived)  # or the kernel would read what was in the slot before
        updated = _update_on_device(self._lane, update, update.chunk.view(slot))
        self._out.wait(updated)  # or old state would travel home
        with self._out.work():
            self._state[update.chunk].copy_(slot, non_blocking=True)
        self._last_out = self._home_again[update.chunk] = self._out.mark()
        if there is None:
            self._free[turn] = self._last_out
        else:
            self._early_out.append(self._last_out)
            self._lane.uses(slot)
            self._out.uses(slot)
        return updated

    def _copy_in(self, chunk: Chunk, slot: Tensor) -> Mark:
        last = self._home_again.get(chunk, Mark())
        last.wait_on_host()  # or, of few chunks, it would set out before it came home
        with self._in.work():
            slot.copy_(self._state[chunk], non_blocking=True)
        return self._in.mark()

    def state(self, chunk: Chunk) -> Tensor:
        """In the arena, once everything is home. It may be written, so that what came early is void."""
        self._come_home()
        return self._state[chunk]

    def _come_home(self) -> None:
        self._order.submit(self._there.clear).result()
        self._in.mark().wait_on_host()  # what came early and is not wanted any more reads the arena too
        self._last_out.wait_on_host()

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """There is no second copy of it."""

    def close(self) -> None:
        """Let the last chunk come home, then free slots and arena."""
        self._come_home()
        self._order.shutdown()
        self._state.clear()
        self._slots.clear()
        self.arena.close()


@dataclass(frozen=True)
class _HostCopy:
    """What a host chunk has in the arena. On a CPU device weight and gradient are used where they are."""

    state: Tensor
    weight: Tensor | None
    gradient: Tensor | None


class HostHome:
    """`host`: state in an arena, updated there by threads.

    Two threads of the interpreter take chunks in the order given: one gives them to the cores, the other waits for them
    and sends weights up. One for both was rejected: the cores stood still for a tenth of the time, while it gave copies
    to the device (the second line of benchmarks/results/2026-11-15-h200/timelines.jsonl; the last is as it is here).
    """

    name = "host"

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, tape: Tape, *, cores: Sequence[int]) -> None:
        self._device, self._mirrored, self._tape = device, device.type == "cuda", tape
        itemsize = {c: c.dtype.itemsize if self._mirrored else 0 for c in chunks}
        total = sum(padded(c.state_bytes) + 2 * padded(c.size * itemsize[c]) for c in chunks)
        self.arena = Arena(total, pinned=self._mirrored, cores=cores)
        self._copies = {c: self._place(c) for c in chunks}
        self._down, self._up = Lane("down", device, tape), Lane("up", device, tape, to_device=True)
        self._arrived: dict[Chunk, Mark] = {}
        self._pool = Pool(cores)
        self._order, self._sender = (_one_thread(name, device) for name in ("penstock-host", "penstock-up"))
        self._idle_since = 0.0

    def _place(self, chunk: Chunk) -> _HostCopy:
        state = self.arena.cut(chunk.state_bytes)
        if not self._mirrored:
            return _HostCopy(state, None, None)
        weight, gradient = (self.arena.cut(chunk.size * chunk.dtype.itemsize).view(chunk.dtype) for _ in range(2))
        return _HostCopy(state, weight, gradient)

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """Send it down at once: during backward the link has nothing else to do."""
        landing = self._copies[chunk].gradient
        if landing is not None:
            self._down.wait(main_mark(self._device))  # backward is still writing it
            with self._down.work():
                landing.copy_(gradient, non_blocking=True)
            self._down.uses(gradient)  # or the allocator would give its memory to the next layer in mid-copy
            self._arrived[chunk] = self._down.mark()

    def sent(self) -> Mark:
        """The point after which all gradients that were sent down have arrived."""
        return self._down.mark()

    def update(self, update: Update) -> Future[Mark]:
        """Queue the chunk for the threads; they take it when its gradient and the scalars are there."""
        arrived = self._arrived.pop(update.chunk, Mark())
        if self._mirrored:  # what was sent down is not kept on the GPU until the threads come to it
            update = dataclasses.replace(update, gradient=None)
        return self._sender.submit(self._send_up, update, self._order.submit(self._begin, update, arrived))

    @torch.no_grad()
    def _begin(self, update: Update, arrived: Mark) -> tuple[float, Callable[[], None] | None]:
        """Give the chunk to the cores. When that was, and what waits for them; nothing if the step is not taken."""
        copy, coefficients = self._copies[update.chunk], update.coefficients
        weight = update.weight if copy.weight is None else copy.weight
        gradient = update.gradient if copy.gradient is None else copy.gradient
        assert gradient is not None, "a gradient is on the device, or was sent down"
        arrived.wait_on_host()
        row = coefficients.host.read()[coefficients.group]
        began = time.perf_counter()
        return began, self._pool.begin(weight, gradient, update.chunk.view(copy.state), row)

    @torch.no_grad()
    def _send_up(self, update: Update, given: Future[tuple[float, Callable[[], None] | None]]) -> Mark:
        began, wait = given.result()
        if wait is None:
            return Mark()
        wait()
        busy_since, self._idle_since = max(began, self._idle_since), time.perf_counter()
        self._tape.spent("cpu", busy_since, self._idle_since)
        update.ready.wait_on_host()  # or the weight could change under a backward that still reads it
        copy = self._copies[update.chunk].weight
        if copy is not None:
            with self._up.work():
                update.weight.copy_(copy, non_blocking=True)
        return self._up.mark()

    def state(self, chunk: Chunk) -> Tensor:
        """In the arena, once the threads are done."""
        self._sender.submit(lambda: None).result()
        return self._copies[chunk].state

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """Take the new weight as the high half of the master."""
        copy = self._copies[chunk].weight
        if copy is not None:
            copy.copy_(weight)

    def close(self) -> None:
        """Stop the threads, free the arena."""
        self._order.shutdown()
        self._sender.shutdown()
        for lane in (self._down, self._up):
            lane.mark().wait_on_host()  # or copies would go on in memory that is given back
        self._pool.close()
        self._copies.clear()
        self.arena.close()
