"""When one rank fails, the others learn which and why, and end.

A rank that waits for another does so for ever: no kernel of NCCL asks whether the other end still lives, and only the
launcher of its own machine sees a process die. So whoever knows writes it into the store through which the ranks met: a
rank before it leaves by an error, a launcher for one that was killed. Every rank has a thread that looks there. Of a
machine that freezes or loses power nobody can write anything: so that thread counts too, the first rank looks whether
all counters move, and the others whether the first rank, which keeps the store, still answers, or counts on where its
launcher keeps the store. Where no launcher of ours sees a rank die, the counters show as well whose connection was
closed. Time limits of torch's collectives were rejected: while one rank reads weights the others wait long, and nothing
is wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import RankLost, RecipeError, counted, tell
from penstock.machine.launched import ERRORS, GOING_ON, leave_error

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

KEYS = f"penstock/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
"""Where all keys of these ranks begin: torchrun keeps its store when it starts the ranks again."""
KEY = f"{KEYS}/failure"
GONE = "rank 0 is gone"
"""When nobody keeps the store any more."""
LOOK_SECONDS = 2.0
SILENT_SECONDS = 120.0
"""How long a rank may give no sign of life. Its thread needs the lock of the interpreter for one, which a call into a
compiler or a driver may keep for a minute. Two minutes are longer than that, and little beside what is lost anyway."""
WORD_SECONDS = 45.0
"""How long a rank that lost a connection waits to hear whose: the launcher of a killed one first imports torch."""
SIGN_LOOKS = 3
"""Looks until every rank that lives has counted on, but for one that is kept by a compiler as above."""
GRACE_SECONDS = 5.0
"""What a rank that heard of a failure has to end by itself: often all fail alike, each with its own message."""
CONNECTION_WORDS = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "remote process exited")
"""What gloo and NCCL say, in errors of no type of their own, when another rank is gone."""


def event_key(event: str, rank: int) -> str:
    """Where a rank says that it has come to `event`; under `alive` it counts for as long as it lives."""
    return f"{KEYS}/{event}/{rank}"


def launcher_keeps_store() -> bool:
    """Whether it is torchrun's, and not rank 0's own."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def named(ranks: Collection[int]) -> str:
    """`rank 1`, `ranks 1, 3`, `ranks 4 to 7`."""
    first, last = min(ranks), max(ranks)
    if len(ranks) == 1:
        return f"rank {first}"
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, ranks))}"


def meeting_store(address: tuple[str, int], seconds: float = 30.0) -> TCPStore:
    """A connection of its own to the store of the ranks, whose other users may be waiting in it."""
    # Not above: the launcher imports this module, and nothing heavy until a rank has died.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address[0], address[1], is_master=False, timeout=timedelta(seconds=seconds))


def announce(store: TCPStore, text: str) -> str:
    """Say which rank failed, if nobody has said it: what comes later mostly follows from it. What is said then."""
    return bytes(store.compare_set(KEY, "", text)).decode()


def announce_for(seconds: float, text: str, address: tuple[str, int], ranks: Iterable[int]) -> None:
    """Keep the store in place of rank 0, which has failed before it could, until all of these ranks have come."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=seconds)
    store = TCPStore(*address, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=limit)
    announce(store, text)
    deadline = time.monotonic() + seconds
    keys = [event_key("here", rank) for rank in ranks]
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS / 10)
    time.sleep(2 * LOOK_SECONDS)  # the last one to come reads it now


def lost_connection(error: BaseException) -> bool:
    """Whether this error only says that another rank is gone."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in CONNECTION_WORDS)


class Pulses:
    """Which ranks give no sign of life any more.

    Time is counted in looks of this process, not by the clock: if all of them were stopped and go on, as SLURM does
    with a job, none has looked for long, and none is taken for dead.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def silent(self, rank: int, count: int) -> bool:
        """Whether the counter of this rank has stood still for too long. One that is not there yet has 0."""
        before, looks = self._seen.get(rank, (0, 0))
        looks = looks + 1 if count and count == before else 0
        self._seen[rank] = count, looks
        return looks * LOOK_SECONDS >= SILENT_SECONDS


class Watch:
    """What a rank tells the others and hears of them. It ends this rank if another is lost and it cannot end itself."""

    def __init__(self, address: tuple[str, int], rank: int, size: int) -> None:
        self._store, self._rank, self._size = meeting_store(address), rank, size
        self._over = Event()
        self._heard = ""
        self._looks = 0
        self._pulses = Pulses()
        self._looking = Thread(target=self._look, name="penstock-watch", daemon=True)
        self._guarding = Thread(target=self._guard, name="penstock-guard", daemon=True)
        self._looking.start()
        self._guarding.start()

    def _look(self) -> None:
        while not self._ask():
            self._looks += 1
            if self._over.wait(LOOK_SECONDS):
                return

    def _ask(self, *, give_sign: bool = True) -> str:
        try:
            if not self._heard and self._store.check([KEY]):
                self._heard = self._store.get(KEY).decode()
            if not self._heard and give_sign:
                self._give_sign()
        except RuntimeError:  # the store is in the process of the first rank
            self._heard = self._heard or GONE
        return self._heard

    def _give_sign(self) -> None:
        """Count on, and look at the counters: the first rank at all others, these at its own if it keeps no store."""
        self._store.add(event_key("alive", self._rank), 1)
        those = range(1, self._size) if self._rank == 0 else range(int(launcher_keeps_store()))
        for rank in those:
            if self._pulses.silent(rank, self._count(rank)):
                announce(self._store, f"rank {rank} {silence()}")

    def _count(self, rank: int) -> int:
        return self._store.add(event_key("alive", rank), 0)

    def _guard(self) -> None:
        """End this rank. A thread of its own: the other one waits for ever if the store is on a machine that froze."""
        seen = unanswered = 0
        while not self._over.wait(LOOK_SECONDS):
            unanswered = unanswered + 1 if self._looks == seen else 0
            seen = self._looks
            if unanswered * LOOK_SECONDS >= SILENT_SECONDS:
                self._heard = self._heard or f"rank 0 {silence()}"
            if self._heard and not self._over.wait(GRACE_SECONDS):
                leave(self.loss(self._heard), self._rank)

    def loss(self, heard: str) -> RankLost:
        """Why this rank cannot go on. What was heard first stays: others follow from it."""
        self._heard = self._heard or heard
        remedy = f"Its machine shows why. {GOING_ON}"
        return RankLost(self._heard, where="the run has lost a rank", remedy=remedy)

    def tell(self, event: str, text: str = "") -> None:
        """Have the others know that this rank has come to `event`."""
        try:
            self._store.set(event_key(event, self._rank), text)
        except RuntimeError as error:
            raise self.loss(GONE) from error

    def check_numbers(self) -> None:
        """Refuse ranks that are not of one run: they would wait for each other until they are told to stop."""
        try:
            size = int(self._store.compare_set(f"{KEYS}/ranks", "", str(self._size)))
            number = self._store.add(event_key("number", self._rank), 1)
        except RuntimeError as error:
            raise self.loss(GONE) from error
        what = f"rank {self._rank} is there already"
        if size != self._size:
            what = f"this machine counts {counted(self._size, 'rank')}, and the first to come counts {size}"
        if size != self._size or number > 1:
            remedy = "Start every machine with the same --gpus and --nodes, and each with its own --node-rank."
            raise RecipeError(what, where="the ranks have not met", remedy=remedy)

    def absent(self, event: str) -> list[int]:
        """Ranks that have not come to `event` yet. Refused once a rank is lost, which may be one of them."""
        keys = [event_key(event, rank) for rank in range(self._size)]
        try:
            if self._heard:
                raise self.loss(self._heard)
            if self._store.check(keys):
                return []
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError as error:
            raise self.loss(GONE) from error

    def told(self, event: str) -> list[str]:
        """What each rank said when it came to `event`, which all have."""
        keys = [event_key(event, rank) for rank in range(self._size)]
        return [bytes(text).decode() for text in self._store.multi_get(keys)]

    def end(self, error: BaseException | None) -> None:
        """This rank ends now. Others are told of an error of its own; one that is another's becomes that one's."""
        self._over.set()
        self._looking.join(LOOK_SECONDS)
        answers = not self._looking.is_alive()  # a store whose machine is frozen gives none, for as long as it is asked
        if error is None:
            return
        try:
            if answers and lost_connection(error):
                self._wait_for_word()
            elif answers:
                announce(self._store, f"rank {self._rank} {what_happened(error)}")
        except RuntimeError:  # nobody is left to be told
            self._heard = self._heard or GONE
        if self._heard and self._rank == 0 and not launcher_keeps_store():
            time.sleep(2 * LOOK_SECONDS)  # or the store goes with this rank, and the others read there whom they lost
        if lost_connection(error):
            raise self.loss("a connection was closed") from error

    def _wait_for_word(self) -> None:
        """Hear which rank is gone, or see it: it neither ends as this one does, nor counts on.

        One that is alone in this is it, for somebody closed a connection. Of several some may only be compiling, and a
        launcher of ours knows more than a counter: both get the whole time.
        """
        began = time.monotonic()
        sure = began + (WORD_SECONDS if ERRORS in os.environ else SIGN_LOOKS * LOOK_SECONDS)
        self.tell("ending")
        ending = [event_key("ending", rank) for rank in range(self._size)]
        silent = {rank: self._count(rank) for rank in range(self._size) if rank != self._rank}
        while not self._ask(give_sign=False):
            silent = {rank: count for rank, count in silent.items() if not self._lives(rank, count)}
            settled = len(silent) == 1 or self._store.check(ending)
            if time.monotonic() > (sure if settled else began + WORD_SECONDS):
                has = "has" if len(silent) == 1 else "have"
                seen = f"{named(silent)} {has} given no sign of life since a connection was closed" if silent else ""
                self._heard = announce(self._store, seen or "a connection was closed")
            time.sleep(LOOK_SECONDS / 10)

    def _lives(self, rank: int, count: int) -> bool:
        """Whether this rank has shown since it had this count."""
        return self._count(rank) != count or self._store.check([event_key("ending", rank)])


def silence() -> str:
    """What is said of a rank that gives no sign of life."""
    return (
        f"has given no sign of life for {SILENT_SECONDS:.0f} s; its machine may be frozen, or without power or network"
    )


def what_happened(error: BaseException) -> str:
    """To a rank that leaves by this error, after its number."""
    if isinstance(error, KeyboardInterrupt):
        return f"was stopped by {signal.Signals(error.args[0] if error.args else signal.SIGINT).name}"
    return f"failed: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Of its message, or its name."""
    return (str(error) or repr(error)).splitlines()[0]


def leave(error: RankLost, rank: int) -> NoReturn:
    """End this process although it is waiting for a rank that is gone."""
    try:
        if not leave_error(str(error)):
            tell(f"rank {rank}: {error}", error.exit_code, sys.argv)
            sys.stdout.flush()
    finally:
        os._exit(error.exit_code)
