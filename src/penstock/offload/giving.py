"""How the updates of a unit come to the homes of their chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from penstock.flow.lanes import Mark, Streams
from penstock.offload.homes import Home, Update
from penstock.plan.layout import Chunk

Given = Future[list[Future[Mark]]]
"""Done once all updates of a unit are with their homes: the marks after which its weights may be read."""


class Giver:
    """Gives them at once, or, of updates in backward, in a thread.

    Gradients of a unit that streams are final all at once, and it has dozens of chunks, each of which may have to wait
    for a place. A backward that gave them itself was rejected: meanwhile the device had nothing to do (50 ms after each
    layer of llama-70b, benchmarks/results/2026-11-17-h200/streamed/one_layer.txt). Now it computes the next unit, and
    waits only if the one before has still not been given, so that gradients of no more than one lie there.
    """

    def __init__(self, home_of: Mapping[Chunk, Home], streams: Streams, *, in_backward: bool) -> None:
        self._home_of, self._thread = home_of, streams.thread("penstock-updates") if in_backward else None
        self._last: Given | None = None

    def give(self, updates: Sequence[Update], *, sent: bool, ahead: bool) -> Given:
        """`sent`: gradients that leave the device have done so. `ahead`: wait for those before, not for these."""
        if self._thread is None:
            given: Given = Future()
            given.set_result(self._give(updates, sent=sent))
            return given
        before, self._last = self._last, self._thread.submit(self._give, updates, sent=sent)
        if ahead and before is not None:
            before.exception()  # waits; whoever waits for that unit is told of an error
        elif not ahead:
            self._last.result()
        return self._last

    def _give(self, updates: Sequence[Update], *, sent: bool) -> list[Future[Mark]]:
        made: list[Future[Mark]] = []
        try:
            for update in updates:
                home = self._home_of[update.chunk]
                if update.gradient is not None and not sent:
                    home.gradient_final(update.chunk, update.gradient, update.ready)
                made.append(home.update(update))
        except BaseException:
            for one in made:
                one.exception()  # waits: whoever is told of the error may read weights that these still write
            raise
        return made

    def close(self) -> None:
        """Let the last ones come to their homes."""
        if self._thread is not None:
            self._thread.shutdown()
