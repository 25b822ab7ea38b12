"""Lanes: ordered queues of device work that run beside the arithmetic, and what orders them among each other.

On CUDA (and ROCm, which speaks the same torch calls) a lane is a stream. On a device without streams work runs at once,
in the order in which it is given. `Streams` makes everything that can run beside something else: lanes, threads, marks.
Tests put one in its place that keeps vector clocks, and sees every wait that is missing (`tests/flow/checked.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from penstock.flow.timeline import LaneName, Timeline


class Mark:
    """A point in a lane. Waiting for it orders everything that follows after everything before the mark."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def ready(self) -> bool:
        """Whether the device has passed the mark."""
        return self._event is None or self._event.query()

    def wait_on_host(self) -> None:
        """Block this thread, not the device, until the mark is passed."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Make `stream` wait."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class Lane:
    """One ordered queue of work."""

    def __init__(self, name: LaneName, timeline: Timeline, stream: torch.cuda.Stream | None = None) -> None:
        self.name, self._timeline, self._stream = name, timeline, stream
        self._last: Mark | None = None

    @contextmanager
    def work(self, label: LaneName | None = None) -> Iterator[None]:
        """What is enqueued inside goes to this lane; on the timeline under its name or another."""
        with torch.cuda.stream(self._stream), self._timeline.on_device(label or self.name):  # None: the current stream
            yield

    def current(self) -> AbstractContextManager[object]:
        """The same without a place on the timeline."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """The point after all that was enqueued so far."""
        return Mark(self._stream.record_event()) if self._stream is not None else Mark()

    def wait(self, mark: Mark) -> None:
        """Nothing enqueued from now on starts before `mark`."""
        if mark is not self._last:  # a queue holds about a thousand things, then the host waits
            mark.hold(self._stream)
            self._last = mark

    def uses(self, tensor: Tensor) -> None:
        """Keep the allocator from handing out `tensor`'s memory while this lane still works with it."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)


class Instant:
    """When the device came to a point of the calling thread's stream; known once it has."""

    def __init__(self, device: torch.device) -> None:
        self._time, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def since(self, before: Instant) -> float:
        """Seconds from one to the other, both of the same device."""
        if self._event is None or before._event is None:
            return self._time - before._time
        milliseconds: float = before._event.elapsed_time(self._event)
        return milliseconds / 1e3


class ToHost:
    """A tensor on its way to the host. Reading it waits for what made it and for nothing after."""

    def __init__(self, values: Tensor, done: Mark) -> None:
        self._values, self._done = values, done

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._done.ready()

    def read(self) -> Tensor:
        """The values, on the host."""
        self._done.wait_on_host()
        return self._values


class Streams:
    """What runs beside what on one device: the model's own stream (`main`), lanes and threads."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.timeline = device, Timeline(device)
        self._numbers = self.lane("out")

    @property
    def separate_memory(self) -> bool:
        """Whether device and host have memories of their own, so that what moves between them is copied."""
        return self.device.type == "cuda"

    def lane(self, name: LaneName, *, urgent: bool = False) -> Lane:
        """A new lane."""
        stream = torch.cuda.Stream(self.device, -1 if urgent else 0) if self.device.type == "cuda" else None
        return Lane(name, self.timeline, stream)

    def thread(self, name: str) -> Executor:
        """A thread. Every thread begins on the first GPU and would take memory there for nothing."""
        if self.device.type != "cuda":
            return ThreadPoolExecutor(1, name)
        number = torch.cuda.current_device() if self.device.index is None else self.device.index
        return ThreadPoolExecutor(1, name, initializer=torch.cuda.set_device, initargs=(number,))

    def caller(self) -> int:
        """Whom `main_waits` holds up: the calling thread's current stream; where there are none, the thread."""
        if self.device.type != "cuda":
            return threading.get_ident()
        return torch.cuda.current_stream(self.device).cuda_stream

    def main_mark(self) -> Mark:
        """The point after all that the calling thread has enqueued on its current stream."""
        return Mark(torch.cuda.current_stream(self.device).record_event()) if self.device.type == "cuda" else Mark()

    def main_waits(self, mark: Mark) -> None:
        """What the calling thread enqueues from now on its current stream starts after `mark`."""
        if self.device.type == "cuda":
            mark.hold(torch.cuda.current_stream(self.device))

    def main_uses(self, tensor: Tensor) -> None:
        """`Lane.uses` of the calling thread's current stream, for what was made on a lane."""
        if self.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def to_host(self, tensor: Tensor) -> ToHost:
        """Start a few numbers on their way to the host, after what the calling thread has enqueued.

        On a lane of their own, outside of the queue of transfers: the model waits for them, and they are small.
        """
        if not self.separate_memory:
            return ToHost(tensor, Mark())
        pinned = tensor.is_cuda  # or the copy is waited for
        landing = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        self._numbers.wait(self.main_mark())  # what makes the numbers is still under way
        with self._numbers.work():
            landing.copy_(tensor, non_blocking=True)
        self._numbers.uses(tensor)
        return ToHost(landing, self._numbers.mark())

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
