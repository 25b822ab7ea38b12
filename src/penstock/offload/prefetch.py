"""Streamed state that comes before its update: how much of it backward has room for.

With `after-norm` nothing can be updated before backward has ended, and then everything has to travel in one forward.
But activations go while backward runs, and what they leave, less the gradients that take their place, is room for state
to come into while the link has nothing else to do. How much is left after each gradient is known from a trial.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.flow.lanes import Mark
from penstock.offload.homes import StreamHome

MOST_GOING = 2**31
"""Bytes of gradients that may be on their way down. Their memory is free only when the device has come so far, and the
host, which enqueues a backward in a tenth of its time, would count on room that is not there yet. With half of it the
host was not far enough ahead when backward ended, and the next forward began 0.14 s late (qwen3-14b, the fourth line of
benchmarks/results/2026-11-15-h200/timelines.jsonl)."""


class Ahead:
    """Lets state come as gradients become final."""

    def __init__(self, stream: StreamHome, peak_bytes: float, taken_after: Sequence[float], left_bytes: float) -> None:
        """Choose what may come.

        `peak_bytes`: what forward and backward may take. `taken_after`: what they take from the gradient of each
        parameter to the end, with all gradients kept; `left_bytes` of these leave the device in backward.
        """
        self._stream, self._free = stream, [peak_bytes - taken for taken in taken_after]
        self._going: deque[tuple[Mark, int]] = deque()
        self._going_bytes = self._gone_bytes = 0
        stream.choose_early(max(self._free, default=0.0) + left_bytes)

    def leaves(self, mark: Mark, num_bytes: int) -> None:
        """A gradient has left when `mark` is passed."""
        self._going.append((mark, num_bytes))
        self._going_bytes += num_bytes
        while self._going_bytes > MOST_GOING and len(self._going) > 1:  # never for the one that was just sent
            first, gone = self._going.popleft()
            first.wait_on_host()
            self._going_bytes -= gone
            self._gone_bytes += gone

    def final(self, index: int) -> None:
        """The gradient of this parameter is final."""
        self._stream.bring(self._free[index] + self._gone_bytes)

    def new_step(self) -> None:
        """The next backward begins with nothing."""
        self._going.clear()
        self._going_bytes = self._gone_bytes = 0
        self._stream.new_step()
