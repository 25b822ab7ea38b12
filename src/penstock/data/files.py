"""Rows of one file, streamed: JSON, JSONL, CSV, Parquet.

A file is never held as Python objects as a whole; the largest thing in memory is one row, a batch of Parquet rows, or a
megabyte of text. Every fault is a DataError that names file and line, because "row 48,113 is odd" is no help in a file
that one must open in an editor.

`json.load` and pandas were rejected: both hold the whole file, keep the last of duplicate keys, accept NaN, and lose
the line numbers.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from penstock.errors import DataError

_CHUNK_BYTES = 1 << 20
_PARQUET_ROWS = 1024
_BLANK = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it came from.

    `line` counts from 1. For Parquet and Hub rows it is the number of the row, and in an array that goes on on the same
    line the negative of that.
    """

    fields: dict[str, Any]
    file: str
    line: int

    @property
    def where(self) -> str:
        """file:line."""
        return place_name(self.file, self.line)


def place_name(file: str, line: int) -> str:
    """file:line, for messages."""
    return f"{file}:{line}" if line > 0 else f"{file}, row {-line:,}"


_ONE_ROW = "It needs at least one row; was it written to the end?"


def read_file(path: Path) -> Iterator[Row]:
    """Every row of a file, by its extension."""
    if path.stat().st_size == 0:
        raise DataError("the file is empty", where=str(path), remedy=_ONE_ROW)
    found = False
    try:
        for row in READERS[path.suffix.lower()](path):
            found = True
            yield row
    except OSError as error:
        remedy = "See that the file is there, and that you may read it."
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error
    if not found:
        raise DataError("no rows in the file", where=str(path), remedy=_ONE_ROW)


# --- text -------------------------------------------------------------------------------------------------------------


def _skip_bom(file: BinaryIO, name: str) -> int:
    """Step over a UTF-8 byte order mark; its length. UTF-16 is named, since its bytes look like garbage otherwise."""
    head = file.read(3)
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        remedy = f"Convert it: iconv -f UTF-16 -t UTF-8 {name} > utf8{Path(name).suffix}"
        raise DataError("the file is UTF-16 (by its byte order mark); only UTF-8 is read", where=name, remedy=remedy)
    length = len(head) if head == codecs.BOM_UTF8 else 0
    file.seek(length)
    return length


def _not_utf8(name: str, line: int, offset: int, byte: int) -> DataError:
    remedy = f"If the file is Latin-1, convert it: iconv -f LATIN1 -t UTF-8 {name} > utf8{Path(name).suffix}"
    return DataError(
        f"not UTF-8: byte 0x{byte:02x} at offset {offset} of the file", where=f"{name}:{line}", remedy=remedy
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded one at a time so that a bad byte is known by its offset in the file."""
    with path.open("rb") as file:
        offset = _skip_bom(file, str(path))
        for number, raw in enumerate(file, 1):
            try:
                yield number, raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(str(path), number, offset + error.start, raw[error.start]) from None
            offset += len(raw)


# --- JSON -------------------------------------------------------------------------------------------------------------


class _Refused(ValueError):
    """JSON that Python's parser lets through and that is almost certainly a mistake."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise _Refused(f"the key {duplicate!r} occurs twice in one object")
    return fields


def _no_constants(name: str) -> NoReturn:
    raise _Refused(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constants)


_IS_ARRAY = "If the file is one array of objects, give it the extension .json."
_MEND = "Mend or remove the line; if it is the last one, see that the file was written to its end."


def _row(value: object, source: str, name: str, line: int) -> Row:
    """`value`, parsed from `source`, as a row."""
    where = place_name(name, line)
    if not isinstance(value, dict):
        kind = {list: "an array", str: "text", type(None): "null", bool: "true or false"}.get(type(value), "a number")
        remedy = 'Each row is an object such as {"prompt": "...", "completion": "..."}.'
        if isinstance(value, list) and not name.lower().endswith(".json"):
            remedy = _IS_ARRAY
        raise DataError(f"the row is {kind}, not an object", where=where, remedy=remedy)
    if "\\ud" in source or "\\uD" in source:  # half of a surrogate pair parses, but no tokenizer takes it
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            remedy = "A character beyond U+FFFF is written as two escapes; one of them is missing."
            raise DataError("half of a surrogate pair (\\ud800 to \\udfff)", where=where, remedy=remedy) from None
    return Row(value, name, line)


def _bad_json(error: Exception, name: str, line: int, column: int | None = None, remedy: str = _MEND) -> DataError:
    if isinstance(error, RecursionError):
        return DataError("the row is nested too deeply", where=f"{name}:{line}", remedy="Flatten or remove it.")
    if isinstance(error, json.JSONDecodeError):
        at = f" at column {column}" if column else ""
        return DataError(f"malformed JSON: {error.msg.removesuffix(' at')}{at}", where=f"{name}:{line}", remedy=remedy)
    return DataError(str(error), where=f"{name}:{line}", remedy=remedy)


def _read_jsonl(path: Path, remedy: str = _MEND) -> Iterator[Row]:
    name = str(path)
    for number, text in _lines(path):
        if not text.strip():
            continue
        try:
            value = _DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            # Behind the line's own end the decoder is on a line of its own, and says column 1.
            column = min(error.pos, len(text.rstrip())) + 1 if isinstance(error, json.JSONDecodeError) else None
            if text.lstrip().startswith("["):
                remedy = _IS_ARRAY
            raise _bad_json(error, name, number, column, remedy) from None
        yield _row(value, text, name, number)


def _read_json(path: Path) -> Iterator[Row]:
    """An array of objects; or, under the same extension, one object a line."""
    with path.open("rb") as file:
        window = _Window(file, str(path))
        if window.peek() == "[":
            yield from _array(window)
            return
    yield from _read_jsonl(path, remedy="A .json file holds an array of objects, or one object on each line.")


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
                value, end = _DECODER.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if isinstance(error, json.JSONDecodeError):
                    # At the edge of what was read, a fault may only mean that the rest is still to come. Literals and
                    # escapes are reported at their first character, hence the margin; strings may be any length.
                    at_edge = error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated string")
                    if at_edge and self._grow():
                        continue
                    self.advance(error.pos)
                    raise _bad_json(error, self.name, self.line, self.column) from None
                raise _bad_json(error, self.name, self.line) from None
            source = self.text[self.at : end]
            self.advance(end)
            return value, source

    def fail(self, what: str) -> NoReturn:
        raise DataError(f"malformed JSON: {what}", where=f"{self.name}:{self.line}", remedy=_MEND)

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
            raise _not_utf8(self.name, line, offset, error.object[error.start]) from None
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
            yield _row(value, source, window.name, line)
            mark = window.peek()
            if mark == "]":
                break
            if mark != ",":
                window.fail("the array is not closed" if not mark else "Expecting ',' or ']' after a row")
            window.advance(window.at + 1)
    window.advance(window.at + 1)
    if window.peek():
        window.fail("Extra data after the array")


# --- CSV --------------------------------------------------------------------------------------------------------------


_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
"""Others than the comma, by which some programs separate cells."""


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default refuses a cell over 128 KiB, which a long document passes
    name, lines = str(path), _lines(path)
    reader = csv.reader((text for _, text in lines), strict=True)
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
                if len(cells) == 1 and separator:
                    what = f"the header is one column, with {separator} in it"
                    raise DataError(what, where=f"{name}:{line}", remedy="Separate cells by commas.")
            elif len(cells) != len(header):
                what = f"{len(cells)} cells, but the header has {len(header)} columns"
                remedy = "A cell with a comma or a line break in it must stand in double quotes."
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


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    name, number = str(path), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(list(file.schema_arrow.names), name)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(fields, name, number)
    except (pyarrow.ArrowException, OSError) as error:
        remedy = "Copy or fetch it again. If it is not Parquet, give it the extension of what it is."
        raise DataError(f"not a readable Parquet file: {error}", where=name, remedy=remedy) from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
