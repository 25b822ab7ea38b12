"""Optimizers that were dropped without `close`, as when a cell of a notebook runs again: a thread gives all back.

Python drops objects at any instant, in the midst of whatever a thread is doing, so that a destructor must not wait:
what it waits for may be held by the very call that it has interrupted. It leaves a note in a queue that is made for it.

A `__del__` was rejected: by then threads and weak references of what is dropped may be gone. So `weakref.finalize`
keeps the homes alive, and nothing that leads back to the model, which may hold its optimizer.

At the end of the program the thread is waited for: Python ends threads wherever they are, which C++ answers by ending
the process with SIGABRT, whatever its exit code was.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.utils.hooks import RemovableHandle

from penstock.offload.dtensors import BeforeGather
from penstock.offload.giving import Giver
from penstock.offload.homes import Home


@dataclass
class _Note:
    """What was dropped; nothing, from somebody who wants to know that all before it has been given back."""

    homes: Sequence[Home | Giver] = ()
    hooks: Sequence[RemovableHandle | BeforeGather] = ()
    done: threading.Event = field(default_factory=threading.Event)


MOST_SECONDS = 60.0
"""That a new optimizer or the end of the program waits for: where the device has failed, what was dropped never comes
to an end."""
_NOTES: queue.SimpleQueue[_Note] = queue.SimpleQueue()
_HOOKS: list[RemovableHandle | BeforeGather] = []
_THREADS: list[threading.Thread] = []


def _give_back() -> None:
    while True:
        note = _NOTES.get()
        for home in note.homes:
            with contextlib.suppress(Exception):  # nobody would see it
                home.close()
        _HOOKS.extend(note.hooks)
        note.done.set()
        del note


def when_dropped(
    optimizer: object, homes: Sequence[Home | Giver], hooks: Sequence[RemovableHandle | BeforeGather]
) -> Callable[[], object]:
    """Have these given back once nobody has the optimizer any more. What is returned calls it off.

    Until then the hooks wait for updates that are still under way.
    """
    finalizer = weakref.finalize(optimizer, lambda: _NOTES.put(_Note(homes, hooks)))
    finalizer.atexit = False
    return finalizer.detach


def wait_for_dropped() -> None:
    """Before a new optimizer is made: the memory of those that were dropped is free, and their hooks are removed.

    Not by the thread: the model might be running.
    """
    if not any(thread.is_alive() for thread in _THREADS):  # the first time, or in a child after a fork
        if not _THREADS:
            atexit.register(_wait)
        _THREADS.append(threading.Thread(target=_give_back, name="penstock-dropped", daemon=True))
        _THREADS[-1].start()
    _wait()
    while _HOOKS:
        _HOOKS.pop().remove()


def _wait() -> None:
    """Until all that was dropped before has been given back."""
    note = _Note()
    _NOTES.put(note)
    if any(thread.is_alive() for thread in _THREADS):  # or it is a child after a fork, which has none
        note.done.wait(MOST_SECONDS)
