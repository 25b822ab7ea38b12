"""Files that are there whole or not at all, and the limit on their size, which is not a full disk.

With `ulimit -f` the kernel refuses what is beyond a size, on a disk with room: what helps against a full disk does not
help then. Python ignores the signal that would come with it (SIGXFSZ), so a write fails as it does on a full disk.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import DISK_IS_FULL, DoesNotFit, OutputError

FILE_LIMIT = (
    "The disk is not full: a file may not be larger here. `ulimit -f` shows the limit, `ulimit -f unlimited` lifts it. "
    "If there is none, the file system has one of its own (FAT32: 4 GiB)."
)
PROBE = ".penstock-"
"""How names begin of what is only there for a moment."""


def hits_file_limit(error: BaseException | None) -> bool:
    """Whether this error, or what it comes from, is the limit on file size. Libraries in Rust leave it in the text."""
    if error is None:
        return False
    code = getattr(error, "errno", None)
    told = f"(os error {errno.EFBIG})" in str(error)
    return code == errno.EFBIG or told or hits_file_limit(error.__cause__)


def file_limit() -> int | None:
    """Bytes that a file may have, if there is a limit."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and rename it: what was there before stays until all of the new one is written."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a pipe or a device, which a rename would replace
        path.write_bytes(data)
        return
    path = path.resolve()  # a link stays a link
    beside = path.with_name(f"{PROBE}{os.getpid()}-{path.name}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave the new name with nothing behind it
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str) -> None:
    """Add a whole line to a file, or nothing."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            data = f"{line}\n".encode()
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(end)
            raise


@contextmanager
def writing(path: Path, kind: str) -> Iterator[None]:
    """What cannot be written, in words, where --to names it, a file or a directory: a full disk has an exit code."""
    try:
        yield
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", f"Name a {kind} that can be written with --to."
        if error.errno in DISK_IS_FULL:
            full = f"Free space there, or name a {kind} on another disk with --to."
            remedy = FILE_LIMIT if hits_file_limit(error) else full
            raise DoesNotFit(what, where=str(path), remedy=remedy) from None
        raise OutputError(what, where=str(path), remedy=remedy) from None
