"""One run per directory.

The lock is the kernel's (`flock`), held as long as the process lives: a process that was killed holds nothing, so a
stale lock needs no recovery. A file that only exists was rejected, since somebody has to judge when it is out of date.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote

from penstock.errors import OutputError

LOCK_FILE = "lock"


@contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Make the directory and hold it. If nothing was put into it, it is gone again afterwards."""
    made = [path for path in (directory, *directory.absolute().parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = _lock(directory)
        try:
            yield
        finally:
            with suppress(OSError):  # of a disk that went away; closing the file ends the lock
                (directory / LOCK_FILE).unlink(missing_ok=True)
            os.close(descriptor)
    finally:
        with suppress(OSError):  # it holds a run, or another process was faster
            for path in made:
                path.rmdir()


def refuse_if_claimed(directory: Path) -> None:
    """Say at once that another process is at work in the directory; nothing is made or held."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(directory, descriptor) from None
    except OSError:  # a file system without locks: nobody holds one there, and `claim` refuses it
        return
    finally:
        os.close(descriptor)


def is_claimed(directory: Path) -> bool:
    """Whether another process is at work in the directory."""
    try:
        refuse_if_claimed(directory)
    except OutputError:
        return True
    return False


def _lock(directory: Path) -> int:
    path = directory / LOCK_FILE
    while True:
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            busy = isinstance(error, BlockingIOError)
            refusal = _taken(directory, descriptor) if busy else _no_locks(directory, error)
            if new and not busy:
                path.unlink(missing_ok=True)
            os.close(descriptor)
            raise refusal from None
        # The holder before us removes the file when it ends; what we have locked may be that one and no longer there.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):  # on a full disk nobody is told who holds it; it is held all the same
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode())
    return descriptor


def _no_locks(directory: Path, error: OSError) -> OutputError:
    remedy = "Use an --output-dir on a file system that knows locks: without, two runs could destroy each other."
    return OutputError(f"cannot be locked ({error.strerror})", where=str(directory), remedy=remedy)


def _taken(directory: Path, descriptor: int) -> OutputError:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # it has only just locked the file
        who = "another process"
    remedy = f"Wait for it, stop it, or use --output-dir {quote(str(directory))}-2."
    return OutputError(f"a run is going on there: {who}", where=str(directory), remedy=remedy)
