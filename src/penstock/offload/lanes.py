"""Lanes: ordered queues of device work that run beside the arithmetic.

On CUDA (and ROCm, which speaks the same torch calls) a lane is a stream. On a device without streams work runs at once,
in the order in which it is given, so every schedule can be tested on a CPU.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor


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
    """One ordered queue of work: `with lane:` enqueues to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._context: list[torch.cuda.StreamContext] = []

    def __enter__(self) -> Lane:
        if self._stream is not None:
            self._context.append(torch.cuda.stream(self._stream))
            self._context[-1].__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._context.pop().__exit__(kind, error, trace)

    def mark(self) -> Mark:
        """The point after all that was enqueued so far."""
        return Mark(self._stream.record_event()) if self._stream is not None else Mark()

    def wait(self, mark: Mark) -> None:
        """Nothing enqueued from now on starts before `mark`."""
        mark.hold(self._stream)

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
