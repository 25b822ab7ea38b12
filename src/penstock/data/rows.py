"""A row, the pieces in which rows come from a file, and a source of them.

A piece is what one process renders and tokenizes at a time, and what travels to it: raw lines and Arrow batches, which
are parsed there, rather than parsed rows, which take longer to send than to make.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.data.strict_json import STRICT
from penstock.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it came from.

    `line` counts from 1. For Parquet, Arrow and Hub rows it is the number of the row, and in an array that goes on on
    the same line the negative of that.
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


class Piece(Protocol):
    """Some rows of a file. `done` is the share of the file that has been read after it."""

    @property
    def done(self) -> float:
        """From 0 to 1."""

    def rows(self) -> Iterator[Row]:
        """The rows, in their order; raises where one is at fault."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Rows that are there already."""

    parsed: tuple[Row, ...]
    done: float = 0.0

    def rows(self) -> Iterator[Row]:
        """The rows."""
        return iter(self.parsed)


@dataclass(frozen=True, slots=True)
class Table:
    """A batch of Arrow, from Parquet or from `datasets`."""

    batch: Any
    file: str
    first: int
    """Number of the first row."""
    done: float = 0.0

    def rows(self) -> Iterator[Row]:
        """The rows, as Python objects."""
        try:
            rows = self.batch.to_pylist()
        except (OverflowError, ValueError):
            self._refuse_unreadable()
            raise
        for number, fields in enumerate(rows, self.first):
            yield Row(fields, self.file, number)

    def _refuse_unreadable(self) -> None:
        """Name the first value of which no Python object can be made."""
        for number in range(self.batch.num_rows):
            for name, values in zip(self.batch.schema.names, self.batch.columns, strict=True):
                try:
                    values[number].as_py()
                except (OverflowError, ValueError) as error:
                    what = f"the value of the column {name!r} cannot be read: {error}"
                    remedy = "Mend it (is it a date after the year 9999?), or write the file without the column."
                    raise DataError(what, where=place_name(self.file, self.first + number), remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines of a JSONL file."""

    raw: bytes
    file: str
    first: int
    """Number of the first line."""
    offset: int
    """Where in the file they begin."""
    remedy: str
    done: float = 0.0

    def rows(self) -> Iterator[Row]:
        """One object a line; blank lines are passed over."""
        for number, text in self._texts():
            if not text or text.isspace():
                continue
            try:
                value = STRICT.decode(text)
            except (ValueError, RecursionError) as error:
                # Behind the line's own end the decoder is on a line of its own, and says column 1.
                column = min(error.pos, len(text.rstrip())) + 1 if isinstance(error, json.JSONDecodeError) else None
                remedy = IS_ARRAY if text.lstrip().startswith("[") else self.remedy
                raise bad_json(error, self.file, number, column, remedy) from None
            yield row_of(value, text, self.file, number)

    def _texts(self) -> Iterator[tuple[int, str]]:
        try:
            yield from enumerate(self.raw.decode("utf-8").split("\n"), self.first)
            return
        except UnicodeDecodeError as error:
            bad = error.start
        start = self.raw.rfind(b"\n", 0, bad) + 1
        before = self.raw[:start].decode("utf-8").split("\n")
        yield from enumerate(before[:-1], self.first)
        raise not_utf8(self.file, self.first + len(before) - 1, self.offset + bad, self.raw[bad])


def not_utf8(name: str, line: int, offset: int, byte: int) -> DataError:
    """A byte that no UTF-8 text has there."""
    remedy = f"If the file is Latin-1, convert it: iconv -f LATIN1 -t UTF-8 {name} > utf8{Path(name).suffix}"
    return DataError(
        f"not UTF-8: byte 0x{byte:02x} at offset {offset} of the file", where=f"{name}:{line}", remedy=remedy
    )


# --- JSON -------------------------------------------------------------------------------------------------------------

IS_ARRAY = "If the file is one array of objects, give it the extension .json."
MEND = "Mend or remove the line; if it is the last one, see that the file was written to its end."


def row_of(value: object, source: str, name: str, line: int) -> Row:
    """`value`, parsed from `source`, as a row."""
    if not isinstance(value, dict):
        kind = {list: "an array", str: "text", type(None): "null", bool: "true or false"}.get(type(value), "a number")
        remedy = 'Each row is an object such as {"prompt": "...", "completion": "..."}.'
        if isinstance(value, list) and not name.lower().endswith(".json"):
            remedy = IS_ARRAY
        raise DataError(f"the row is {kind}, not an object", where=place_name(name, line), remedy=remedy)
    refuse_half_a_pair(value, source, place_name(name, line))
    return Row(value, name, line)


def refuse_half_a_pair(value: object, source: str, where: str) -> None:
    """Half of a surrogate pair parses, but no tokenizer takes it."""
    if "\\ud" in source or "\\uD" in source:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            what = "half of a surrogate pair (\\ud800 to \\udfff)"
            remedy = "A character beyond U+FFFF is written as two escapes; one of them is missing."
            raise DataError(what, where=where, remedy=remedy) from None


def bad_json(error: Exception, name: str, line: int, column: int | None = None, remedy: str = MEND) -> DataError:
    """What is wrong with a row of JSON."""
    if isinstance(error, RecursionError):
        return DataError("the row is nested too deeply", where=f"{name}:{line}", remedy="Flatten or remove it.")
    if isinstance(error, json.JSONDecodeError):
        at = f" at column {column}" if column else ""
        return DataError(f"malformed JSON: {error.msg.removesuffix(' at')}{at}", where=f"{name}:{line}", remedy=remedy)
    return DataError(str(error), where=f"{name}:{line}", remedy=remedy)


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
