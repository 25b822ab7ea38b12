"""Rows of one file, streamed: JSON, JSONL, CSV, TSV, Parquet, Arrow, plain text; the text ones also compressed.

A file is never held as Python objects as a whole; the largest thing in memory is one row, a batch of Parquet rows, or a
megabyte of text. Every fault is a DataError that names file and line, because "row 48,113 is odd" is no help in a file
that one must open in an editor.

`json.load` and pandas were rejected: both hold the whole file, keep the last of duplicate keys, accept NaN, and lose
the line numbers.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from penstock.data.rows import IS_ARRAY, MEND, Lines, Parsed, Piece, Row, Table, bad_json, not_utf8, place_name, row_of
from penstock.data.strict_json import STRICT
from penstock.errors import DataError

__all__ = ["IS_ARRAY", "KINDS", "Row", "file_kind", "file_pieces", "place_name", "read_file"]

_CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 1 << 19
_PIECE_ROWS = 1000
_BLANK = re.compile(r"[ \t\n\r]*")
_ONE_ROW = "It needs at least one row; was it written to the end?"
_MEND_ARRAY = "Mend the array there (a comma too many?); if it just stops, see that the file was written to its end."
_COMPRESSED = (".gz", ".zst")


def file_kind(path: Path) -> str:
    """By which reader a file is read: its extension, without that of a compression; nothing if there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        kind = suffixes[-2] if len(suffixes) > 1 else ""
        return kind if kind in KINDS and kind not in (".parquet", ".arrow") else ""
    return suffixes[-1] if suffixes and suffixes[-1] in KINDS else ""


def read_file(path: Path, split: str = "none") -> Iterator[Row]:
    """Every row of a file, by its extension."""
    for piece in file_pieces(path, split):
        yield from piece.rows()


def file_pieces(path: Path, split: str = "none") -> Iterator[Piece]:
    """The same in pieces. `split` says how plain text becomes documents."""
    if path.stat().st_size == 0:
        raise DataError("the file is empty", where=str(path), remedy=_ONE_ROW)
    reader, found = KINDS[file_kind(path)], False
    with _reading(path) as opened:
        for piece in reader(opened, split):
            found = found or _has_rows(piece)
            yield piece
    if not found:
        raise DataError("no rows in the file", where=str(path), remedy=_ONE_ROW)


def _has_rows(piece: Piece) -> bool:
    if isinstance(piece, Lines):
        return bool(piece.raw.strip())
    return piece.batch.num_rows > 0 if isinstance(piece, Table) else True


@dataclass(frozen=True)
class _Opened:
    """A file that is being read: its name, its bytes as they are, and its bytes after decompression."""

    path: Path
    disk: BinaryIO
    file: io.BufferedReader
    num_bytes: int

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def done(self) -> float:
        return min(1.0, self.disk.tell() / self.num_bytes)


@contextmanager
def _reading(path: Path) -> Iterator[_Opened]:
    import pyarrow

    try:
        with path.open("rb") as disk:
            file: Any = disk
            if path.suffix.lower() == ".gz":
                file = io.BufferedReader(gzip.GzipFile(fileobj=disk))
            elif path.suffix.lower() == ".zst":
                file = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(disk, mode="r"), "zstd"))
            yield _Opened(path, disk, file, path.stat().st_size)
    except (EOFError, zlib.error, OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's; those of a decompressor have none
            remedy = "See that the file is there and whole, and that you may read it."
            raise DataError(f"cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error
        remedy = "Copy or fetch it again. If it is something else, give it the extension of what it is."
        kind = "".join(path.suffixes[-2:]) if path.suffix.lower() in _COMPRESSED else path.suffix
        raise DataError(f"not a readable {kind} file: {error}", where=str(path), remedy=remedy) from error


# --- text -------------------------------------------------------------------------------------------------------------


def _skip_bom(file: Any, name: str) -> int:
    """Step over a UTF-8 byte order mark; its length. UTF-16 is named, since its bytes look like garbage otherwise."""
    head = file.peek(3)[:3]
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        remedy = f"Convert it: iconv -f UTF-16 -t UTF-8 {name} > utf8{Path(name).suffix}"
        raise DataError("the file is UTF-16 (by its byte order mark); only UTF-8 is read", where=name, remedy=remedy)
    return len(file.read(3)) if head == codecs.BOM_UTF8 else 0


def _lines(opened: _Opened) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded one at a time so that a bad byte is known by its offset in the file."""
    offset = _skip_bom(opened.file, opened.name)
    for number, raw in enumerate(opened.file, 1):
        try:
            yield number, raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(opened.name, number, offset + error.start, raw[error.start]) from None
        offset += len(raw)


def _parsed(rows: Iterator[Row], opened: _Opened) -> Iterator[Piece]:
    batch: list[Row] = []
    try:
        for row in rows:
            batch.append(row)
            if len(batch) == _PIECE_ROWS:
                yield Parsed(tuple(batch), opened.done)
                batch = []
    except DataError:
        if batch:  # a fault in one of these comes first
            yield Parsed(tuple(batch), opened.done)
        raise
    if batch:
        yield Parsed(tuple(batch), opened.done)


def _read_text(opened: _Opened, split: str) -> Iterator[Piece]:
    """A document a file, a line, or a paragraph between blank lines."""
    yield from _parsed(_documents(opened, split), opened)


def _documents(opened: _Opened, split: str) -> Iterator[Row]:
    if split == "lines":
        for number, text in _lines(opened):
            if text.strip():
                yield Row({"text": text.rstrip("\r\n")}, opened.name, number)
        return
    document: list[str] = []
    first = 1
    for number, text in _lines(opened):
        if split == "blank-lines" and not text.strip():
            if document:
                yield Row({"text": "".join(document).rstrip("\r\n")}, opened.name, first)
            document = []
            continue
        first = first if document else number
        document.append(text)
    if "".join(document).strip():
        yield Row({"text": "".join(document).rstrip("\r\n")}, opened.name, first)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_jsonl(opened: _Opened, split: str = "none", remedy: str = MEND) -> Iterator[Piece]:
    offset = _skip_bom(opened.file, opened.name)
    number, rest = 1, list[bytes]()
    while raw := opened.file.read(_PIECE_BYTES):
        end = raw.rfind(b"\n") + 1
        if not end:  # within a line that is longer than a piece
            rest.append(raw)
            continue
        whole, rest = b"".join([*rest, raw[:end]]), [raw[end:]]
        yield Lines(whole, opened.name, number, offset, remedy, opened.done)
        offset += len(whole)
        number += whole.count(b"\n")
    if last := b"".join(rest):
        yield Lines(last, opened.name, number, offset, remedy, 1.0)


def _read_json(opened: _Opened, split: str) -> Iterator[Piece]:
    """An array of objects; or, under the same extension, one object a line."""
    window = _Window(opened.file, opened.name)
    if window.peek() == "[":
        yield from _parsed(_array(window), opened)
        return
    with _reading(opened.path) as again:
        yield from _read_jsonl(again, remedy="A .json file holds an array of objects, or one object on each line.")


class _Window:
    """The text of a file from the current place on, as far as it has been needed, with its line and column."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name, self.text, self.at = name, "", 0
        self.line, self.column = 1, 1
        self._file, self._offset = file, _skip_bom(file, name)
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def advance(self, end: int) -> None:
        """Move to a later place."""
        lines = self.text.count("\n", self.at, end)
        self.line += lines
        self.column = end - self.text.rfind("\n", self.at, end) if lines else self.column + end - self.at
        self.at = end

    def peek(self) -> str:
        """The next character that is not blank, or nothing at the end of the file."""
        while True:
            blank = _BLANK.match(self.text, self.at)
            assert blank is not None, "the pattern matches the empty string"
            self.advance(blank.end())
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._grow():
                return ""

    def value(self) -> tuple[object, str]:
        """The JSON value at the current place, and the text it was parsed from."""
        while True:
            try:
                value, end = STRICT.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if isinstance(error, json.JSONDecodeError):
                    # At the edge of what was read, a fault may only mean that the rest is still to come. Literals and
                    # escapes are reported at their first character, hence the margin; strings may be any length.
                    at_edge = error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated string")
                    if at_edge and self._grow():
                        continue
                    self.advance(error.pos)
                    raise bad_json(error, self.name, self.line, self.column, _MEND_ARRAY) from None
                raise bad_json(error, self.name, self.line, remedy=_MEND_ARRAY) from None
            source = self.text[self.at : end]
            self.advance(end)
            return value, source

    def fail(self, what: str) -> NoReturn:
        raise DataError(f"malformed JSON: {what}", where=f"{self.name}:{self.line}", remedy=_MEND_ARRAY)

    def _grow(self) -> bool:
        """Read as much again as is waiting, so that a row of any length is parsed a logarithmic number of times.

        False at the end of the file, and then nothing has changed.
        """
        raw = self._file.read(max(_CHUNK_BYTES, len(self.text) - self.at))
        waiting = len(self._decoder.getstate()[0])
        try:
            more = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.at) + error.object[: error.start].count(b"\n")
            offset = self._offset - waiting + error.start
            raise not_utf8(self.name, line, offset, error.object[error.start]) from None
        if raw:
            self._offset += len(raw)
            self.text, self.at = self.text[self.at :] + more, 0
        return bool(raw)


def _array(window: _Window) -> Iterator[Row]:
    window.advance(window.at + 1)
    if window.peek() != "]":
        last = 0
        for number in itertools.count(1):
            window.peek()
            line, last = -number if window.line == last else window.line, window.line
            value, source = window.value()
            yield row_of(value, source, window.name, line)
            mark = window.peek()
            if mark == "]":
                break
            if mark != ",":
                window.fail("the array is not closed" if not mark else "Expecting ',' or ']' after a row")
            window.advance(window.at + 1)
    window.advance(window.at + 1)
    if window.peek():
        window.fail("Extra data after the array")


# --- tables -----------------------------------------------------------------------------------------------------------


_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
"""Others than the comma, by which some programs separate cells."""


def _read_csv(opened: _Opened, split: str) -> Iterator[Piece]:
    yield from _parsed(_csv_rows(opened, "\t" if file_kind(opened.path) == ".tsv" else ","), opened)


def _csv_rows(opened: _Opened, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default refuses a cell over 128 KiB, which a long document passes
    name, lines = opened.name, _lines(opened)
    reader = csv.reader((text for _, text in lines), strict=True, delimiter=delimiter)
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            if not cells:
                pass  # a blank line
            elif header is None:
                header = cells
                _check_columns(header, f"{name}:{line}")
                separator = next((word for mark, word in _SEPARATORS.items() if mark in cells[0]), "")
                if len(cells) == 1 and separator and delimiter == ",":
                    what = f"the header is one column, with {separator} in it"
                    remedy = "Separate cells by commas, or in a .tsv file by tabs."
                    raise DataError(what, where=f"{name}:{line}", remedy=remedy)
            elif len(cells) != len(header):
                what = f"{len(cells)} cells, but the header has {len(header)} columns"
                remedy = "A cell with a comma (or, in .tsv, a tab) or a line break in it must stand in double quotes."
                raise DataError(what, where=f"{name}:{line}", remedy=remedy)
            else:
                yield Row(dict(zip(header, cells, strict=True)), name, line)
            line = reader.line_num + 1
    except csv.Error as error:
        remedy = "Mend the line: a double quote within a quoted cell is written twice."
        raise DataError(f"malformed CSV: {error}", where=f"{name}:{line}", remedy=remedy) from None


def _check_columns(columns: list[str], where: str) -> None:
    duplicates = sorted({c for c in columns if columns.count(c) > 1})
    if duplicates:
        raise DataError(f"the column {duplicates[0]!r} occurs twice", where=where, remedy="Rename one of them.")


def _read_parquet(opened: _Opened, split: str) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    name, number = opened.name, 0
    try:
        with pyarrow.parquet.ParquetFile(opened.path) as file:
            _check_columns(list(file.schema_arrow.names), name)
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=_PIECE_ROWS):
                yield Table(batch, name, number + 1, (number + batch.num_rows) / total)
                number += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        remedy = "Copy or fetch it again. If it is not Parquet, give it the extension of what it is."
        raise DataError(f"not a readable Parquet file: {error}", where=name, remedy=remedy) from error


def _read_arrow(opened: _Opened, split: str) -> Iterator[Piece]:
    """A stream of Arrow, as `datasets` writes it, or a file with its batches listed at the end, as Polars does."""
    import pyarrow.ipc

    name, number = opened.name, 0
    is_listed = opened.file.peek(6)[:6] == b"ARROW1"
    with pyarrow.ipc.open_file(opened.disk) if is_listed else pyarrow.ipc.open_stream(opened.disk) as reader:
        _check_columns(list(reader.schema.names), name)
        for batch in (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_listed else reader:
            for start in range(0, batch.num_rows, _PIECE_ROWS):
                part = batch.slice(start, _PIECE_ROWS)
                yield Table(part, name, number + 1, opened.done)
                number += part.num_rows


KINDS: dict[str, Callable[[_Opened, str], Iterator[Piece]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
}
