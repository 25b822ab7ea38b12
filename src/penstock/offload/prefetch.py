"""Prefetch: streamed state that comes before its update, as far as backward has room for it.

With `after-norm` nothing can be updated before backward has ended, and then everything has to travel in one forward.
But activations go while backward runs, and what they leave, less the gradients that take their place, is room for state
to come into while the link has nothing else to do. How much is left after each gradient is known from a trial.
"""

from __future__ import annotations

import warnings
from collections import deque
from concurrent.futures import Future

import torch

from penstock.flow.lanes import Mark, Streams
from penstock.offload.stream import StreamHome
from penstock.plan.layout import Chunk
from penstock.plan.placement import PrefetchRoom

MOST_GOING = 2**31
"""Bytes of gradients that may be on their way down. Their memory is free only when the device has come so far, and the
host, which enqueues a backward in a tenth of its time, would count on room that is not there yet. With half of it the
host was not far enough ahead when backward ended, and the next forward began 0.14 s late (qwen3-14b,
benchmarks/results/2026-11-15-h200/timelines.jsonl)."""
IN_PIECES = (
    "GPU memory is in pieces: no more state comes before its update, and steps take a little longer. "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps."
)


class Prefetcher:
    """Lets state come as gradients become final.

    The chunks are spread over forward, so that both ways of the link are busy in all of it.
    """

    def __init__(self, home: StreamHome, streams: Streams, room: PrefetchRoom) -> None:
        self._home, self._streams, self._room = home, streams, room
        self._chosen = _spread(home.chunks, max(room.free_after, default=0.0) + room.sent_bytes)
        self._fetching: list[Future[None]] = []
        self._begin()

    def _begin(self) -> None:
        self._next = deque(self._chosen)
        self._fetched_bytes = 0
        self._going: deque[tuple[Mark, int]] = deque()  # gradients on their way down
        self._going_bytes = self._gone_bytes = 0

    def gradient_sent(self, mark: Mark, num_bytes: int) -> None:
        """A gradient has left when `mark` is passed."""
        self._going.append((mark, num_bytes))
        self._going_bytes += num_bytes
        while self._going_bytes > MOST_GOING and len(self._going) > 1:  # never for the one that was just sent
            first, gone = self._going.popleft()
            first.wait_on_host()
            self._going_bytes -= gone
            self._gone_bytes += gone

    def gradient_final(self, index: int) -> None:
        """The gradient of this parameter is final: fetch as long as all that came in this step fits."""
        room = self._room.free_after[index] + self._gone_bytes
        while self._next and self._fetched_bytes + self._next[0].state_bytes <= room:
            chunk = self._next.popleft()
            try:
                memory = torch.empty(chunk.state_bytes, dtype=torch.uint8, device=self._streams.device)
            except torch.OutOfMemoryError:  # in pieces that are too small: what cannot come early streams
                self._chosen, self._next = [], deque()
                self._home.forget_prefetched()
                warnings.warn(IN_PIECES, stacklevel=1)
                return
            self._fetched_bytes += chunk.state_bytes
            # Its memory was an activation's until here, so nothing may be written there before the device is as far.
            self._fetching.append(self._home.prefetch(chunk, memory, self._streams.main_mark()))

    def step_ended(self) -> None:
        """Forget what came and was not updated; the next backward begins with nothing."""
        if self._fetched_bytes:
            self._home.forget_prefetched()
        done = [fetching for fetching in self._fetching if fetching.done()]
        self._fetching = [fetching for fetching in self._fetching if fetching not in done]
        self._begin()
        for fetching in done:
            fetching.result()  # an error there is an error here


def _spread(chunks: list[Chunk], num_bytes: float) -> list[Chunk]:
    """As many chunks as that holds, evenly over all of them."""
    mean = sum(chunk.state_bytes for chunk in chunks) / len(chunks)
    count = min(len(chunks), int(max(0.0, num_bytes) / mean))
    return [chunks[(2 * i + 1) * len(chunks) // (2 * count)] for i in range(count)]
