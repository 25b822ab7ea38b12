"""Handlers of signals for a while, and the rule for one that came ignored.

A signal that this process inherited as ignored stays ignored: whoever started it has asked for that, as `nohup` does
with SIGHUP, and a script with SIGINT of what it runs in the background. SIGTERM is always heard.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handling(handler: Callable[[int, object], None], *numbers: signal.Signals) -> Iterator[None]:
    """Signals call `handler` inside, and what they called before afterwards. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in numbers if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def leave_terminal() -> None:
    """Lines for a terminal that is gone go nowhere: writing there fails, and would end a run before it is saved.

    What is no terminal is left alone. `isatty` cannot tell them apart any more, once it is gone.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        if is_device(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def is_device(descriptor: int) -> bool:
    """Whether this is a terminal, or was one; no file, no pipe."""
    try:
        return stat.S_ISCHR(os.fstat(descriptor).st_mode)
    except OSError:  # closed
        return False
