"""The queue of all large copies in one direction of the link: the most urgent first, and few of them under way.

The copy engine of a direction makes copies in the order in which they were enqueued, whatever their stream: what is
enqueued cannot be overtaken, and one that waits for something holds up all behind it. Streamed state always has more to
bring, so a copy that the model waits for would stand behind all of it (0.7 s a step of qwen3-14b on an H200,
benchmarks/results/2026-11-15-h200/timelines.jsonl). So only a few milliseconds' worth is given to the device at a time,
and the rest waits here, by deadline: the number of the unit that needs it. Small numbers are not copied at all: they go
in as arguments of kernels (`update/rule.py`) and come out on a lane of their own (`Streams.to_host`).
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from penstock.flow.lanes import Mark, Streams
from penstock.flow.timeline import LaneName

NOW = -1
"""The deadline of what goes at once: the model waits for it already, or its memory is wanted."""
UNDER_WAY_BYTES = 2**29
"""What the device is given ahead: ten milliseconds of PCIe 5, longer than a thread waits for the interpreter."""


@dataclass(order=True)
class _Waiting:
    deadline: int
    number: int
    """Of equals the first that was given."""
    num_bytes: int = field(compare=False)
    begin: Callable[[], Mark] = field(compare=False)
    future: Future[Mark] = field(compare=False)


class Transfers:
    """One direction."""

    def __init__(self, name: LaneName, streams: Streams) -> None:
        self._streams, self._lane = streams, streams.lane(name)
        self._thread: Executor | None = None
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._under_way: deque[tuple[Mark, int]] = deque()
        self._numbers = itertools.count()
        self._pumping = False

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        *,
        deadline: int,
        after: Mark | Sequence[Mark] = (),
        label: LaneName | None = None,
    ) -> Future[Mark]:
        """Copy, on the device not before `after`. The result, there once the copy is enqueued, is the mark after it."""
        return self.copy_together([(target, source)], deadline=deadline, after=after, label=label)

    def copy_together(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        *,
        deadline: int,
        after: Mark | Sequence[Mark] = (),
        label: LaneName | None = None,
    ) -> Future[Mark]:
        """The same of several targets and their sources, one after another."""

        def begin() -> Mark:
            for mark in (after,) if isinstance(after, Mark) else after:
                self._lane.wait(mark)  # whoever makes the source, or reads the target, is still at it
            with torch.no_grad(), self._lane.work(label):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            for tensor in itertools.chain(*pairs):
                self._lane.uses(tensor)  # or the allocator would give its memory away in mid-copy
            return self._lane.mark()

        future: Future[Mark] = Future()
        transfer = _Waiting(deadline, next(self._numbers), sum(source.nbytes for _, source in pairs), begin, future)
        with self._lock:
            if deadline == NOW:
                self._begin(transfer)
            else:
                heapq.heappush(self._waiting, transfer)
                self._begin_those_with_room()
            begin_pumping = bool(self._waiting) and not self._pumping
            self._pumping = self._pumping or begin_pumping
        if begin_pumping:
            self._thread = self._thread or self._streams.thread(f"penstock-{self._lane.name}")
            self._thread.submit(self._pump)
        return future

    def mark(self) -> Mark:
        """The point after all copies that were asked for so far; those that still wait here begin now."""
        with self._lock:
            while self._waiting:
                self._begin(heapq.heappop(self._waiting))
            return self._lane.mark()

    @contextmanager
    def for_the_model(self) -> Iterator[list[Tensor]]:
        """What is copied inside goes at once, and the model waits for it. List what was made."""
        made: list[Tensor] = []
        with self._lane.current():
            yield made
        self._streams.main_waits(self._lane.mark())
        for tensor in made:
            self._streams.main_uses(tensor)

    def _begin(self, transfer: _Waiting) -> None:
        try:
            mark = transfer.begin()
        except BaseException as error:  # whoever asked for it is told
            transfer.future.set_exception(error)
            return
        self._forget_ended()  # here too: where nothing waits, nobody else does
        self._under_way.append((mark, transfer.num_bytes))
        transfer.future.set_result(mark)

    def _forget_ended(self) -> None:
        while self._under_way and self._under_way[0][0].ready():
            self._under_way.popleft()

    def _begin_those_with_room(self) -> None:
        self._forget_ended()
        while self._waiting:
            under_way = sum(num_bytes for _, num_bytes in self._under_way)
            if self._under_way and under_way + self._waiting[0].num_bytes > UNDER_WAY_BYTES:
                return
            self._begin(heapq.heappop(self._waiting))

    def _pump(self) -> None:
        """Begin those that wait, as the device gets through those before them."""
        first: Mark | None = None
        while True:
            try:
                if first is not None:
                    first.wait_on_host()
                with self._lock:
                    self._begin_those_with_room()
                    if not self._waiting:
                        self._pumping = False
                        return
                    first = self._under_way[0][0]
            except BaseException as error:  # of the device: nobody must wait for what will never begin
                first = None
                self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._under_way.clear()
        for transfer in waiting:
            transfer.future.set_exception(error)


class Link:
    """Both directions between the host and one device."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.to_device, self.to_host = Transfers("in", streams), Transfers("out", streams)


def link_of(device: torch.device) -> Link:
    """The link of a device, which everybody in this process shares, by whatever name they call it."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _link_of(device)


@cache
def _link_of(device: torch.device) -> Link:
    return Link(Streams(device))
