"""When each lane was busy in a step, for the report and the bench."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

LaneName = Literal[
    "in", "update", "out", "down", "cpu", "moments", "up", "weights", "park", "wait", "forward", "backward"
]  # fmt: skip
"""`in` and `out` carry streamed state, `down` and `up` gradients and weights of `host`, `cpu` are its threads, and
`moments` the same threads at what no forward waits for.
`weights` brings those of layers that stream, `park` saved inputs both ways. The rest is the model itself: its
arithmetic, and in `wait` its waiting for an update or for weights, which is what the lanes did not hide."""


@dataclass(frozen=True)
class Span:
    """A stretch of time in which a lane was busy, in seconds since the timeline was started."""

    lane: LaneName
    start: float
    end: float


class Timeline:
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
