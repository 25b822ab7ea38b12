"""When one rank fails, the others learn which and why, and end.

A rank that waits for another does so for ever: no kernel of NCCL asks whether the other end still lives, and only the
launcher of its own machine sees a process die. So whoever knows writes it into the store through which the ranks met: a
rank before it leaves by an error, a launcher for one that was killed. Every rank has a thread that looks there. Time
limits of torch's collectives were rejected: while one rank reads weights the others wait long, and nothing is wrong.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import RankLost, tell

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

KEY = f"penstock/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
"""torchrun keeps its store when it starts the ranks again."""
LOOK_SECONDS = 2.0
WORD_SECONDS = 20.0
"""How long a rank that lost a connection waits to hear whose: the launcher of a killed one takes some seconds."""
GRACE_SECONDS = 5.0
"""What a rank that heard of a failure has to end by itself: often all fail alike, each with its own message."""
CONNECTION_WORDS = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "remote process exited")
"""What gloo and NCCL say, in errors of no type of their own, when another rank is gone."""


def meeting_store(address: tuple[str, int], seconds: float = 30.0) -> TCPStore:
    """A connection of its own to the store of the ranks, whose other users may be waiting in it."""
    # Not above: the launcher imports this module, and nothing heavy until a rank has died.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address[0], address[1], is_master=False, timeout=timedelta(seconds=seconds))


def announce(store: TCPStore, text: str) -> None:
    """Say which rank failed, if nobody has said it before: what comes later mostly follows from it."""
    store.compare_set(KEY, "", text)


def lost_connection(error: BaseException) -> bool:
    """Whether this error only says that another rank is gone."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in CONNECTION_WORDS)


class Watch:
    """Looks for word of a failed rank while this one trains, and ends it if it cannot end itself."""

    def __init__(self, address: tuple[str, int], rank: int) -> None:
        self._store, self._rank = meeting_store(address), rank
        self._over = Event()
        self._heard = ""
        self._thread = Thread(target=self._look, name="penstock-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            if self._ask() and not self._over.wait(GRACE_SECONDS):
                leave(self._loss(), self._rank)

    def _ask(self) -> str:
        try:
            if not self._heard and self._store.check([KEY]):
                self._heard = self._store.get(KEY).decode()
        except RuntimeError:  # the store is in the process of the first rank
            self._heard = "rank 0 is gone"
        return self._heard

    def _loss(self) -> RankLost:
        remedy = "Its machine shows why. The same command with --resume goes on from the newest checkpoint."
        heard = self._heard or "a connection was closed"
        return RankLost(heard, where="the run has lost a rank", remedy=remedy)

    def end(self, error: BaseException | None) -> None:
        """This rank ends now. Others are told of an error of its own; one that is another's becomes that one's."""
        self._over.set()
        self._thread.join(LOOK_SECONDS)
        answers = not self._thread.is_alive()  # a store whose machine is frozen gives none, for as long as it is asked
        if error is None:
            return
        if not lost_connection(error):
            with suppress(RuntimeError):  # nobody may be left to be told
                if answers:
                    announce(self._store, f"rank {self._rank} failed: {first_line(error)}")
            return
        deadline = time.monotonic() + WORD_SECONDS
        while answers and not self._ask() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 10)
        raise self._loss() from error


def first_line(error: BaseException) -> str:
    """Of its message, or its name."""
    return (str(error) or repr(error)).splitlines()[0]


def leave(error: RankLost, rank: int) -> NoReturn:
    """End this process although it is waiting for a rank that is gone."""
    from penstock.machine.launch import leave_error

    try:
        if not leave_error(str(error)):
            tell(f"rank {rank}: {error}", error.exit_code, sys.argv)
            sys.stdout.flush()
    finally:
        os._exit(error.exit_code)
