"""Where rows come from: a file, a directory of files, a data set on the Hub, the embedded demo, or several of them.

A source knows a fingerprint of its content before a row is read, so that tokenized rows can be found in the cache
without reading them again. Modification times were rejected as a fingerprint: they change with every copy and checkout,
and do not change when it matters (a file restored with its old date).
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from penstock.data.files import KINDS, file_kind, file_pieces
from penstock.data.folders import is_folder, open_folder
from penstock.data.hub import open_hub
from penstock.data.names import LOCAL, looks_like_hub, near
from penstock.data.rows import Piece, Row, Source
from penstock.errors import DataError
from penstock.recipe.lists import Part, is_here, parse_parts, path_of

_LARGE_BYTES = 2 << 30


@dataclass(frozen=True)
class Reading:
    """How a source is read, as far as the recipe says so."""

    split_documents: str = "none"
    stream: bool = False


def open_source(name: str, split: str, say: Callable[[str], None], reading: Reading | None = None) -> Source:
    """The source that `name` stands for. `demo` is always the embedded one; a directory of that name is `./demo`."""
    reading = reading or Reading()
    parts = parse_parts(name) or (Part(name),)
    opened = tuple(_open_one(part.name, split, say, reading) for part in parts)
    if len(opened) == 1:
        return replace(opened[0], name=name)
    files = tuple(file for part in opened for file in part.files)
    if twice := sorted({file for file in files if files.count(file) > 1}):
        raise DataError(f"{twice[0]} is named twice", where=name, remedy="Name it once; shares make it more or less.")

    def read() -> Iterator[Row]:
        for part in opened:
            yield from part.read()

    digest = hashlib.sha256(" ".join(part.fingerprint for part in opened).encode()).hexdigest()
    return Source(name, files, digest, read, num_bytes=sum(part.num_bytes for part in opened), parts=opened)


def _open_one(name: str, split: str, say: Callable[[str], None], reading: Reading) -> Source:
    files = local_files(name, split)
    if files:
        return _open_files(name, files, say, reading.split_documents)
    if is_here(name):
        what, remedy = "is not a file on a disk, and is read more than once", "Write its content to a file first."
        raise DataError(what, where=name, remedy=remedy)
    if looks_like_hub(name):
        return open_hub(name, split, say, reading.stream)
    remedy = f"{near(name)}--data takes {LOCAL}, or a Hub name."
    raise DataError("no such file or directory", where=name, remedy=remedy)


def refuse_without_text(opened: Sequence[Source], split: str) -> None:
    """Refuse to split text files at lines where there are none, in any of these."""
    if not any(file_kind(Path(file)) == ".txt" for source in opened for file in source.files):
        where = f"{opened[0].name}, split_documents = {split!r}"
        remedy = "Leave it out; --split-documents length is for rows of plain text in any file."
        raise DataError("there is no .txt file to split", where=where, remedy=remedy)


# --- files ------------------------------------------------------------------------------------------------------------


def local_files(name: str, split: str) -> Sequence[Path]:
    """The files that a name stands for, if they are here."""
    if name == "demo":
        return [Path(str(importlib.resources.files("penstock") / "demo" / "examples.jsonl"))]
    path = path_of(name)
    if is_folder(path):
        return open_folder(path).choose(split)
    return [path] if path.is_file() else []


def _open_files(name: str, paths: Sequence[Path], say: Callable[[str], None], split_documents: str) -> Source:
    digest, sizes = hashlib.sha256(), list[int]()
    for path in paths:
        if not file_kind(path):
            what = f"files {f'of type {path.suffix}' if path.suffix else 'without an extension'} are not read"
            raise DataError(what, where=str(path), remedy=f"Convert it to one of {', '.join(KINDS)}.")
        digest.update("".join(path.suffixes[-2:]).lower().encode() if path.suffix in (".gz", ".zst") else b"")
        digest.update(file_kind(path).encode() + _file_digest(path, say))
        if file_kind(path) == ".txt" and split_documents in ("lines", "blank-lines"):
            digest.update(split_documents.encode())
        sizes.append(path.stat().st_size)

    def pieces() -> Iterator[Piece]:
        before, total = 0, max(1, sum(sizes))
        for path, size in zip(paths, sizes, strict=True):
            for piece in file_pieces(path, split_documents):
                yield replace(piece, done=(before + size * piece.done) / total)  # type: ignore[type-var]
            before += size

    def read() -> Iterator[Row]:
        for piece in pieces():
            yield from piece.rows()

    return Source(name, tuple(map(str, paths)), digest.hexdigest(), read, pieces, sum(sizes))


def _file_digest(path: Path, say: Callable[[str], None]) -> bytes:
    try:
        if (num_bytes := path.stat().st_size) > _LARGE_BYTES:
            say(f"Checking whether {path} ({num_bytes / 2**30:.1f} GiB) has changed")
        with path.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).digest()
    except OSError as error:
        remedy = "See that the file is there, and that you may read it."
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error
