"""Where rows come from: a file, a directory of files, a data set on the Hub, or the embedded demo.

A source knows a fingerprint of its content before a row is read, so that tokenized rows can be found in the cache
without reading them again. Modification times were rejected as a fingerprint: they change with every copy and checkout,
and do not change when it matters (a file restored with its old date).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.resources
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.files import KINDS, Row, file_kind, read_file
from penstock.data.rows import Piece
from penstock.errors import DataError

_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(?::[\w.-]+)?")
_HUB_ROWS = 1024
_LARGE_BYTES = 2 << 30
_LOCAL = "a JSON, JSONL, CSV or Parquet file, a directory of them, or `demo`"


@dataclass(frozen=True)
class Source:
    """Rows that can be read any number of times, and the fingerprint of what they will be."""

    name: str
    files: tuple[str, ...]
    fingerprint: str
    read: Callable[[], Iterator[Row]]
    pieces: Callable[[], Iterator[Piece]] | None = None
    """The same rows in pieces that another process can be given, if they come from files."""
    num_bytes: int = 0
    """How much there is to read, about."""
    parts: tuple[Source, ...] = ()
    """What it is made of, if it was named as several."""
    weight: float | None = None
    """Of a part: its share of the examples, before all shares are brought to 1."""


def open_source(name: str, split: str, say: Callable[[str], None]) -> Source:
    """The source that `name` stands for. `demo` is always the embedded one; a directory of that name is `./demo`."""
    if name == "demo":
        return _open_files(name, [Path(str(importlib.resources.files("penstock") / "demo" / "examples.jsonl"))], say)
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_files(name, _files_in(path), say)
    if path.exists():
        if not path.is_file():
            what, remedy = "is not a file on a disk, and is read more than once", "Write its content to a file first."
            raise DataError(what, where=name, remedy=remedy)
        return _open_files(name, [path], say)
    if _looks_like_hub(name):
        return _open_hub(name, split, say)
    raise DataError(
        "no such file or directory", where=name, remedy=f"{_near(path)}--data takes {_LOCAL}, or a Hub name."
    )


# --- files ------------------------------------------------------------------------------------------------------------


def _files_in(directory: Path) -> list[Path]:
    """The data files of a directory in the order of their names; anything else in it (a README) is passed over."""
    paths = sorted(p for p in directory.iterdir() if file_kind(p) and not p.name.startswith("."))
    if not paths:
        raise DataError("no data file in the directory", where=str(directory), remedy=f"Put {_kinds()} files into it.")
    return paths


def _open_files(name: str, paths: list[Path], say: Callable[[str], None]) -> Source:
    digest = hashlib.sha256()
    for path in paths:
        if not file_kind(path):
            what = f"files {f'of type {path.suffix}' if path.suffix else 'without an extension'} are not read"
            raise DataError(what, where=str(path), remedy=f"Convert it to one of {_kinds()}.")
        digest.update(path.suffix.lower().encode() + _file_digest(path, say))

    def read() -> Iterator[Row]:
        for path in paths:
            yield from read_file(path)

    return Source(name, tuple(map(str, paths)), digest.hexdigest(), read)


def _file_digest(path: Path, say: Callable[[str], None]) -> bytes:
    try:
        if (num_bytes := path.stat().st_size) > _LARGE_BYTES:
            say(f"Checking whether {path} ({num_bytes / 2**30:.1f} GiB) has changed")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        remedy = "See that the file is there, and that you may read it."
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error


def _kinds() -> str:
    return ", ".join(KINDS)


def _near(path: Path) -> str:
    """A suggestion of files beside `path` whose names are like it, or nothing."""
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return ""
    near = [str(path.parent / n) for n in difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)]
    return f"Did you mean {' or '.join(near)}? " if near else ""


# --- the Hub ----------------------------------------------------------------------------------------------------------


def _looks_like_hub(name: str) -> bool:
    """`owner/name` or `name`, with an optional `:configuration`. A word with a dot and no owner is a file name."""
    last = name.rpartition("/")[2]
    is_file_name = file_kind(Path(name)) != "" or ("/" not in name and "." in last)
    return _HUB_NAME.fullmatch(name) is not None and not is_file_name


def _open_hub(name: str, split: str, say: Callable[[str], None]) -> Source:
    say(f"Looking for {name} ({split}) on the Hugging Face Hub")
    import datasets

    repository, _, configuration = name.partition(":")
    near = _near(Path(name))
    try:
        table = datasets.load_dataset(repository, configuration or None, split=split)
    except ConnectionError as error:
        remedy = f"{near}Without a network, --data takes {_LOCAL}."
        raise DataError(f"no such file, and the Hub cannot be reached: {error}", where=name, remedy=remedy) from error
    except FileNotFoundError as error:
        remedy = f"{near}--data takes {_LOCAL}, or a Hub name; a private set needs HF_TOKEN in the environment."
        raise DataError("neither a file here nor a data set on the Hub", where=name, remedy=remedy) from error
    except Exception as error:  # whatever else a third-party loader meets (split, configuration, damaged files)
        remedy = "--data-split names a split; --data OWNER/NAME:CONFIGURATION names a configuration."
        raise DataError(f"cannot be loaded from the Hub: {error}", where=name, remedy=remedy) from error
    return Source(name, (name,), f"{table._fingerprint}", lambda: _hub_rows(table, name))


def _hub_rows(table: Any, name: str) -> Iterator[Row]:
    number = 0
    for batch in table.iter(batch_size=_HUB_ROWS):
        columns = list(batch)
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield Row(dict(zip(columns, values, strict=True)), name, number)
    if not number:
        raise DataError("no rows in the data set", where=name, remedy="Name another split with --data-split.")
