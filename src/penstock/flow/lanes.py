"""Lanes: ordered queues of device work that run beside the arithmetic, and the tape that says when each was busy.

On CUDA (and ROCm, which speaks the same torch calls) a lane is a stream. On a device without streams work runs at once,
in the order in which it is given, so every schedule can be tested on a CPU.

The copy engine of a direction serves one stream as long as it has work, and streamed state always has: any other copy,
however small, waits until the last chunk is through (0.7 s a step of qwen3-14b on an H200, the first line of
benchmarks/results/2026-11-15-h200/timelines.jsonl; the second is as it is here). So nothing that the model waits for is
copied on the model's stream while state streams: numbers go in as arguments of kernels (`norm.py`), what the host reads
leaves on a stream of its own (`ToHost`), and everything large that goes to the device, streamed state, weights from
`host` and the next batch, is in one queue, where a copy waits only for those that were there before it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LaneName = Literal["in", "update", "out", "down", "cpu", "up", "wait", "forward", "backward"]
"""`in` and `out` carry streamed state, `down` and `up` gradients and weights of `host`, `cpu` are its threads. The rest
is the model itself: its arithmetic, and in `wait` its waiting for an update, which is what the lanes did not hide."""


@dataclass(frozen=True)
class Span:
    """A stretch of time in which a lane was busy, in seconds since the tape was started."""

    lane: LaneName
    start: float
    end: float


class Tape:
    """Records when lanes are busy, from `start` to `stop`. Off, it costs nothing; on, two events a piece of work."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on = device, False
        self._events: list[tuple[LaneName, torch.cuda.Event, torch.cuda.Event]] = []
        self._spans: list[Span] = []

    def start(self) -> None:
        """Forget what was recorded and begin again."""
        self._events, self._spans = [], []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # so that the device's clock and the host's have one zero
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
        self._start = time.perf_counter()
        self._on = True  # last: another thread may be timing already

    def stop(self) -> list[Span]:
        """Wait for the device; everything that was recorded, in no particular order."""
        self._on = False
        if self._events:
            torch.cuda.synchronize(self._device)
        timed = [
            Span(lane, self._zero.elapsed_time(a) / 1e3, self._zero.elapsed_time(b) / 1e3)
            for lane, a, b in self._events
        ]
        return self._spans + timed

    @contextmanager
    def on_host(self, lane: LaneName) -> Iterator[None]:
        """Time what the calling thread does."""
        start = time.perf_counter()
        yield
        self.spent(lane, start, time.perf_counter())

    def spent(self, lane: LaneName, start: float, end: float) -> None:
        """Time that went by on the host's clock."""
        if self._on:
            self._spans.append(Span(lane, start - self._start, end - self._start))

    @contextmanager
    def on_device(self, lane: LaneName) -> Iterator[None]:
        """Time what is enqueued on the calling thread's current stream."""
        if not self._on:
            yield
        elif self._device.type != "cuda":
            with self.on_host(lane):
                yield
        else:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._events.append((lane, first, last))


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


class ToHost:
    """A tensor on its way to the host. Reading it waits for what made it and for nothing after."""

    def __init__(self, values: Tensor, done: Mark) -> None:
        self._values, self._done = values, done

    @classmethod
    def of(cls, tensor: Tensor) -> ToHost:
        """Start it on its way, after what the calling thread has enqueued on its current stream."""
        if not tensor.is_cuda:
            return cls(tensor, Mark())
        landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # or the copy would be waited for
        side = _side(tensor.device, "to host")
        main_mark(tensor.device).hold(side)
        with torch.cuda.stream(side):
            landing.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)
        return cls(landing, Mark(side.record_event()))

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._done.ready()

    def read(self) -> Tensor:
        """The values, on the host."""
        self._done.wait_on_host()
        return self._values


class Lane:
    """One ordered queue of work; `to_device`, that of all copies to the device, under a name of its own."""

    def __init__(
        self, name: LaneName, device: torch.device, tape: Tape, *, urgent: bool = False, to_device: bool = False
    ) -> None:
        self.name, self._tape = name, tape
        self._stream: torch.cuda.Stream | None = None
        self._last: Mark | None = None
        if device.type == "cuda":
            self._stream = _side(device, "to device") if to_device else torch.cuda.Stream(device, -1 if urgent else 0)

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is enqueued inside goes to this lane."""
        with torch.cuda.stream(self._stream), self._tape.on_device(self.name):  # no stream: no change of stream
            yield

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


def main_mark(device: torch.device) -> Mark:
    """The point after all that the calling thread has enqueued on its current stream."""
    return Mark(torch.cuda.current_stream(device).record_event()) if device.type == "cuda" else Mark()


def main_waits(device: torch.device, mark: Mark) -> None:
    """What the calling thread enqueues from now on its current stream starts after `mark`."""
    if device.type == "cuda":
        mark.hold(torch.cuda.current_stream(device))


@contextmanager
def to_device(device: torch.device) -> Iterator[list[Tensor]]:
    """What is copied inside is in the queue of such copies, and the model waits for it. List what was made."""
    made: list[Tensor] = []
    if device.type != "cuda":
        yield made
        return
    main, side = torch.cuda.current_stream(device), _side(device, "to device")
    with torch.cuda.stream(side):
        yield made
    main.wait_stream(side)
    for tensor in made:
        tensor.record_stream(main)


@functools.cache
def _side(device: torch.device, _: str) -> torch.cuda.Stream:
    """A stream for copies beside everything else, one for every purpose."""
    return torch.cuda.Stream(device)
