"""`host`: state in an arena, updated there by CPU threads; the gradient comes down, the weight goes up.

Of a unit that streams nothing goes up: the weight is updated where it lies, and comes when forward wants it.

The next forward waits for masters, not for moments. So where updates run beside that forward, the masters of the whole
model come first, and the moments are updated after them, from the gradients that are still there, under the backward
in which the cores have nothing else to do. A parameter in fp32 state then moves 18 bytes instead of 26 through host
memory while forward waits, and 36 in all.
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
from penstock.flow.timeline import LaneName
from penstock.offload.homes import Surroundings, Update
from penstock.offload.landings import DTYPES, Landings
from penstock.plan.layout import Chunk, landing_bytes, padded
from penstock.update.formats import view_state
from penstock.update.host_threads import HostThreads
from penstock.update.rule import Stage

Given = tuple[float, Callable[[], None] | None]
"""When a chunk was given to the cores, and what waits for them; nothing if the step is not applied."""


class HostHome:
    """Two threads of the interpreter: one gives chunks to the cores, the other waits for them and sends weights up.

    One for both was rejected: the cores stood still for a tenth of the time, while it gave copies to the device
    (benchmarks/results/2026-11-15-h200/timelines.jsonl, qwen3-14b with one thread and with two).
    """

    name = "host"

    def __init__(
        self,
        chunks: Sequence[Chunk],
        around: Surroundings,
        *,
        cores: Sequence[int],
        masters_first: bool = False,
        in_backward: bool = False,
    ) -> None:
        """`in_backward`: updates follow their gradients at once, so that few of those lie here at a time."""
        self._link, self._streams, self._rule = around.link, around.link.streams, around.rule
        self._deadlines = around.deadlines
        copied = chunks if self._streams.separate_memory else []
        here = [c for c in copied if c.parameter not in around.streamed]  # others are updated where they lie
        total = sum(padded(c.state_bytes) for c in chunks) + sum(padded(c.copy_bytes) for c in here)
        total += landing_bytes(copied, ring=in_backward)
        self.arena = Arena(total, pinned=self._streams.device.type == "cuda", cores=cores)
        self._state = {c: self.arena.cut(c.state_bytes) for c in chunks}
        self._views = {c: view_state(c, state) for c, state in self._state.items()}
        self._weights = {c: self.arena.cut(c.copy_bytes).view(DTYPES[c.weight_bytes]) for c in here}
        self._landings = Landings(copied, self.arena, self._link, ring=in_backward)
        self._threads = HostThreads(cores)
        self._order, self._sender = (self._streams.thread(name) for name in ("penstock-host", "penstock-up"))
        self._idle_since = 0.0
        self._masters_first = masters_first and self._rule.in_stages and self._streams.separate_memory
        self._owed: list[tuple[Update, Future[None]]] = []  # masters of this step, and when they are updated
        self._late: list[Future[bool]] = []  # moments that may still fail

    def sends_down(self, chunk: Chunk) -> bool:
        """Wherever device and host have memories of their own."""
        return chunk in self._landings

    def gradient_final(self, chunk: Chunk, gradient: Tensor, written: Mark) -> None:
        """Send it down."""
        if chunk in self._landings:
            self._landings.send(chunk, gradient, written)

    def update(self, update: Update) -> Future[Mark]:
        """Queue the chunk for the threads; they take it when its gradient and the scalars are there."""
        arrived = Mark()
        if update.chunk in self._landings:  # what was sent down is not kept on the GPU until the threads come to it
            landed, arrived = self._landings.take(update.chunk)
            update = dataclasses.replace(update, gradient=landed)
        done: Future[Mark] = Future()
        given = self._order.submit(self._begin, update, arrived, "master" if self._masters_first else "whole")
        read = self._sender.submit(self._send_up, update, given, done)
        if update.chunk in self._landings:
            self._landings.in_use(update.chunk, read)
        if self._masters_first:
            self._owed.append((update, read))
        return done

    def end_step(self) -> None:
        """Queue the moments, in the order in which backward brings the next gradients."""
        self._late = [moments for moments in self._late if not moments.done() or moments.exception()]
        while self._owed:
            update, master = self._owed.pop()
            given = self._order.submit(self._begin_moments, update, master)
            self._late.append(self._sender.submit(self._finish, given))
            self._landings.in_use(update.chunk, self._late[-1])

    def settle(self) -> None:
        """Wait for moments too; an error there is an error here."""
        for moments in self._late:
            moments.result()

    def _begin_moments(self, update: Update, master: Future[None]) -> Given:
        master.result()  # cores that are done with a chunk begin the next: of the same, they would write what is read
        return self._begin(update, Mark(), "moments")

    @torch.no_grad()
    def _begin(self, update: Update, arrived: Mark, stage: Stage) -> Given:
        """Give the chunk to the cores."""
        chunk, gradient, coefficients = update.chunk, update.gradient, update.coefficients
        weight = self._weights.get(chunk, update.weight)
        assert gradient is not None, "a gradient is on the device, or was sent down"
        arrived.wait_on_host()  # or the cores would read the gradient of the step before
        # Once the scalars are here the device has passed the norm, so that no backward reads the weight any more.
        row, state = coefficients.host.read()[coefficients.group], self._views[chunk]
        began = time.perf_counter()
        return began, self._threads.begin(self._rule, weight, gradient, state, row, stage)

    def _finish(self, given: Future[Given], lane: LaneName = "moments") -> bool:
        """Wait for the cores; whether they had anything to do."""
        began, wait = given.result()
        if wait is None:
            return False
        wait()
        busy_since, self._idle_since = max(began, self._idle_since), time.perf_counter()
        self._streams.timeline.spent(lane, busy_since, self._idle_since)
        return True

    def _send_up(self, update: Update, given: Future[Given], done: Future[Mark]) -> None:
        """Wait for the cores, then send the weight up; `done` is told once the copy is enqueued, or of an error."""
        try:
            applied = self._finish(given, "cpu")
            copy, deadline = self._weights.get(update.chunk), self._deadlines[update.chunk.parameter]
            if copy is None or not applied:
                done.set_result(Mark())
            else:  # not waited for: the next chunk may be more urgent
                up = self._link.to_device.copy(update.weight, copy, deadline=deadline, label="up")
                up.add_done_callback(lambda copied: _pass_on(copied, done))
        except BaseException as error:
            done.set_exception(error)

    def state(self, chunk: Chunk) -> Tensor:
        """In the arena, once the threads are done."""
        self._sender.submit(lambda: None).result()
        self.settle()
        return self._state[chunk]

    def weight_was_set(self, chunk: Chunk, weight: Tensor) -> None:
        """Take the new weight as the high half of the master."""
        copy = self._weights.get(chunk)
        if copy is not None:
            copy.copy_(weight)

    def close(self) -> None:
        """Stop the threads, free the arena."""
        self._order.shutdown()
        self._sender.shutdown()
        for way in (self._link.to_device, self._link.to_host):
            way.mark().wait_on_host()  # or copies would go on in memory that is given back
        self._threads.close()
        self._views.clear()
        self._state.clear()
        self._weights.clear()
        self._landings.clear()
        self.arena.close()


def _pass_on(copied: Future[Mark], done: Future[Mark]) -> None:
    """The result of one future as that of another, be it an error."""
    error = copied.exception()
    if error is None:
        done.set_result(copied.result())
    else:
        done.set_exception(error)
