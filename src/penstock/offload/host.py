"""`host`: state in an arena, updated there by CPU threads; the gradient comes down, the weight goes up.

Of a unit that streams nothing goes up: the weight is updated where it lies, and comes when forward wants it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from penstock.flow.arena import Arena
from penstock.flow.lanes import Mark
from penstock.flow.transfers import NOW
from penstock.offload.homes import Surroundings, Update
from penstock.plan.layout import Chunk, padded
from penstock.update.formats import view_state
from penstock.update.host_threads import HostThreads


@dataclasses.dataclass(frozen=True)
class _HostCopy:
    """What a chunk has in the arena.

    A weight that lies in host memory is used in place; where device and host are one memory, the gradient too.
    """

    state: Tensor
    weight: Tensor | None
    gradient: Tensor | None


class HostHome:
    """Two threads of the interpreter: one gives chunks to the cores, the other waits for them and sends weights up.

    One for both was rejected: the cores stood still for a tenth of the time, while it gave copies to the device
    (benchmarks/results/2026-11-15-h200/timelines.jsonl, qwen3-14b with one thread and with two).
    """

    name = "host"

    def __init__(self, chunks: Sequence[Chunk], around: Surroundings, *, cores: Sequence[int]) -> None:
        self._link, self._streams, self._rule = around.link, around.link.streams, around.rule
        self._deadlines, self._copied = around.deadlines, self._streams.separate_memory
        self._streamed = around.streamed
        total = sum(padded(c.state_bytes) + self._num_copies(c) * padded(c.copy_bytes) for c in chunks)
        self.arena = Arena(total, pinned=self._streams.device.type == "cuda", cores=cores)
        self._dtypes = {2: torch.bfloat16, 4: torch.float32}
        self._copies = {c: self._place(c) for c in chunks}
        self._arrived: dict[Chunk, Mark] = {}
        self._threads = HostThreads(cores)
        self._order, self._sender = (self._streams.thread(name) for name in ("penstock-host", "penstock-up"))
        self._idle_since = 0.0

    def _num_copies(self, chunk: Chunk) -> int:
        """Of the gradient, and of a weight that lies on the device."""
        return 0 if not self._copied else 1 if chunk.parameter in self._streamed else 2

    def _place(self, chunk: Chunk) -> _HostCopy:
        state, dtype = self.arena.cut(chunk.state_bytes), self._dtypes[chunk.weight_bytes]
        copies = [self.arena.cut(chunk.copy_bytes).view(dtype) for _ in range(self._num_copies(chunk))]
        gradient, weight = (*copies, None, None)[:2]
        return _HostCopy(state, weight, gradient)

    def gradient_final(self, chunk: Chunk, gradient: Tensor) -> None:
        """Send it down at once: during backward the link has nothing else to do, and its memory is wanted."""
        landing = self._copies[chunk].gradient
        if landing is not None:
            written = self._streams.main_mark()  # backward is still writing it
            down = self._link.to_host.copy(landing, gradient, deadline=NOW, after=written, label="down")
            self._arrived[chunk] = down.result()

    def sent(self) -> Mark:
        """The point after which all gradients that were sent down have arrived."""
        return self._link.to_host.mark()

    def update(self, update: Update) -> Future[Mark]:
        """Queue the chunk for the threads; they take it when its gradient and the scalars are there."""
        arrived = self._arrived.pop(update.chunk, Mark())
        if self._copied:  # what was sent down is not kept on the GPU until the threads come to it
            update = dataclasses.replace(update, gradient=None)
        done: Future[Mark] = Future()
        given = self._order.submit(self._begin, update, arrived)
        self._sender.submit(self._send_up, update, given, done)
        return done

    @torch.no_grad()
    def _begin(self, update: Update, arrived: Mark) -> tuple[float, Callable[[], None] | None]:
        """Give the chunk to the cores. When that was, and what waits for them; nothing if the step is not applied."""
        copy, coefficients = self._copies[update.chunk], update.coefficients
        weight = update.weight if copy.weight is None else copy.weight
        gradient = update.gradient if copy.gradient is None else copy.gradient
        assert gradient is not None, "a gradient is on the device, or was sent down"
        arrived.wait_on_host()  # or the cores would read the gradient of the step before
        # Once the scalars are here the device has passed the norm, so that no backward reads the weight any more.
        row = coefficients.host.read()[coefficients.group]
        began = time.perf_counter()
        return began, self._threads.begin(self._rule, weight, gradient, view_state(update.chunk, copy.state), row)

    def _send_up(
        self, update: Update, given: Future[tuple[float, Callable[[], None] | None]], done: Future[Mark]
    ) -> None:
        """Wait for the cores, then send the weight up; `done` is told once the copy is enqueued, or of an error."""
        try:
            began, wait = given.result()
            if wait is None:
                done.set_result(Mark())
                return
            wait()
            busy_since, self._idle_since = max(began, self._idle_since), time.perf_counter()
            self._streams.timeline.spent("cpu", busy_since, self._idle_since)
            copy, deadline = self._copies[update.chunk].weight, self._deadlines[update.chunk.parameter]
            if copy is None:
                done.set_result(Mark())
            else:  # not waited for: the next chunk may be more urgent
                up = self._link.to_device.copy(update.weight, copy, deadline=deadline, label="up")
                up.add_done_callback(lambda copied: _pass_on(copied, done))
        except BaseException as error:
            done.set_exception(error)

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
        for way in (self._link.to_device, self._link.to_host):
            way.mark().wait_on_host()  # or copies would go on in memory that is given back
        self._threads.close()
        self._copies.clear()
        self.arena.close()


def _pass_on(copied: Future[Mark], done: Future[Mark]) -> None:
    """The result of one future as that of another, be it an error."""
    error = copied.exception()
    if error is None:
        done.set_result(copied.result())
    else:
        done.set_exception(error)
