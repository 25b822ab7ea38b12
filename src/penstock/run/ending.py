"""What ends a run before its last step: a signal, too little memory, a disk that is full or broken. Each in words.

A signal only leaves its number, and the loop looks at it between steps: raised from the handler, it could come in the
middle of an update or of a save, and no state would be whole.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import torch

from penstock.checkpoint.places import CHECKPOINTS, NEWEST
from penstock.checkpoint.store import find
from penstock.errors import DISK_IS_FULL, DoesNotFit, Interrupted, OutputError
from penstock.machine.disk import FILE_LIMIT, hits_file_limit
from penstock.machine.launched import ERRORS
from penstock.machine.signals import handling, leave_terminal
from penstock.recipe.recipe import Recipe

DYING_SECONDS = 1.0
"""From the first to the last of a launcher's threads to end, when it is killed."""


class Stop:
    """The signal that asked the run to end, or 0."""

    number = 0


@contextmanager
def signals(say: Callable[[str], None] | None = None) -> Iterator[Stop]:
    """SIGTERM, Ctrl-C and a lost terminal (SIGHUP) end the run after the current step; a second one ends it at once.

    Launchers other than ours answer a Ctrl-C, which the terminal gives to their ranks too, with a SIGTERM to each: that
    is the same request once more. So are those that the kernel sends when ours dies, one for each of its threads.

    `say` tells at once that the signal was heard, from a thread of its own: a step may take minutes, and the handler
    may have come in the middle of a line.
    """
    stop, heard = Stop(), SimpleQueue[None]()  # whose `put` may come in the middle of another
    by_ours, by_other = ERRORS in os.environ, "RANK" in os.environ and ERRORS not in os.environ
    first = 0.0

    def handle(number: int, _: object) -> None:
        nonlocal first
        again = by_other and (stop.number, number) == (signal.SIGINT, signal.SIGTERM)
        if by_ours and stop.number == number == signal.SIGTERM and time.monotonic() - first < DYING_SECONDS:
            again = True
        if stop.number and not again:
            if say is not None:
                name = signal.Signals(number).name
                told = f"penstock: ended at once by {name}; nothing was saved since the newest checkpoint\n"
                os.write(2, told.encode())
            os._exit(128 + number)
        stop.number, first = stop.number or number, first or time.monotonic()
        if number == signal.SIGHUP:
            leave_terminal()
        heard.put(None)

    def tell() -> None:
        heard.get()
        if stop.number and say is not None:
            name = signal.Signals(stop.number).name
            say(f"  {name}: the run stops after this step and is saved; a second signal ends it at once, unsaved")

    teller = threading.Thread(target=tell, name="penstock-signals", daemon=True)
    with handling(handle, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        teller.start()
        try:
            yield stop
        finally:
            heard.put(None)
            teller.join()


def interrupted(recipe: Recipe, stop: Stop, step: int, total_steps: int, resumed: str = "") -> Interrupted:
    """The run ended early, and where its state is now. `resumed`: the checkpoint that the command names, if it does."""
    name, run_dir = signal.Signals(stop.number).name, recipe.run_dir
    if recipe.keep:
        kept, remedy = f"saved in {run_dir / CHECKPOINTS}", "The same command with --resume goes on."
        if resumed not in ("", NEWEST):
            remedy = f"The same command goes on with --resume alone; {resumed} would take it back there."
    else:
        kept, remedy = f"the model as it was then is in {run_dir / 'model'}", "With --keep 0 it cannot go on."
    where = f"step {step} of {total_steps}"
    return Interrupted(f"stopped by {name}; {kept}", signal_number=stop.number, where=where, remedy=remedy)


@contextmanager
def memory_advice(recipe: Recipe, ranks: int) -> Iterator[None]:
    """Out of memory, in words."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows = recipe.rows_on(ranks)
        raise DoesNotFit(
            f"the GPU is out of memory with {rows} rows of {recipe.max_length} tokens at once: {error}",
            where=recipe.name,
            remedy=f"Try --recompute full, --micro-batch-size {max(1, rows // 2)}, or a shorter --max-length.",
        ) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):  # torch has no type for it
            raise
        raise DoesNotFit(
            f"the host is out of memory: {error}",
            where=recipe.name,
            remedy="Try --states bf16, or a machine with more memory; penstock plan says how much a run takes.",
        ) from error


@contextmanager
def disk_advice(run_dir: Path) -> Iterator[None]:
    """A disk that is full or broken, or a directory that is gone, while a run goes on, in words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and not run_dir.is_dir():
            what = "the directory of the run is gone: it was moved or removed while the run went on"
            remedy = "If it was moved, the same command with --resume and the new place as --output-dir goes on there."
            raise OutputError(what, where=str(run_dir), remedy=remedy) from error
        whole = find(run_dir / CHECKPOINTS)
        left = f"{whole[0]} is whole: --resume goes on from it." if whole else "No checkpoint was saved before."
        what = f"the run can no longer be written ({error.strerror})"
        if error.errno in DISK_IS_FULL:
            remedy = f"{FILE_LIMIT} {left}" if hits_file_limit(error) else f"Free space on the disk. {left}"
            raise DoesNotFit(what, where=str(run_dir), remedy=remedy) from error
        if error.errno in (errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE):
            remedy = f"See that the disk is there and can be written. {left}"
            raise OutputError(what, where=str(run_dir), remedy=remedy) from error
        raise
