"""How a step is timed, for us and for every peer alike."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

WARM_UP = 2
"""Steps that are not counted: kernels are compiled and buffers made in the first, and the second still settles."""


def median_seconds(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Median time of `steps` steps that follow one another without a pause, after the warm-up.

    On a GPU the marks are events on its own clock. Waiting for the device after every step was rejected: it would hide
    what a system gains by enqueueing the next step early.
    """
    if device.type != "cuda":
        times = []
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return statistics.median(times[WARM_UP:])
    marks = [_mark()]
    for _ in range(WARM_UP + steps):
        step()
        marks.append(_mark())
    torch.cuda.synchronize(device)
    times = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return statistics.median(times[WARM_UP:])


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def rate(run: Callable[[], object], amount: float, device: torch.device, seconds: float) -> float:
    """`amount` a call over time, with calls one after another for about `seconds` after one to warm up."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    finish()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or calls < 2:
        run()
        finish()
        calls += 1
    return amount * calls / (time.perf_counter() - start)
