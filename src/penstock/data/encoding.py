"""From a source to flat files of token ids and masks, written as they come.

Memory is bounded by a few pieces, whatever the file. Small sources are tokenized here; for large ones it is worth
starting processes (`workers.py`). Both give the same bytes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.data.coding import Encoded
from penstock.data.counts import Counts, Tally
from penstock.data.facts import facts_of
from penstock.data.forms import Format, check_targets, detect_format, rename
from penstock.data.rows import Parsed, Piece, Source
from penstock.data.workers import Job, Task, encode_here, encode_in
from penstock.errors import ModelError
from penstock.recipe.lists import parse_columns
from penstock.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE_ROWS = 1000
_SAY_EVERY_S = 2.0
_WORTH_BYTES = 8 << 20
"""A source of this size takes longer to tokenize than processes take to start."""

DTYPES: dict[str, type[np.generic]] = {
    "ids": np.uint32,  # token ids of all examples, one after another
    "mask": np.uint8,  # 1 where the token is trained on; never the first of an example, which nothing predicts
    "offsets": np.int64,  # example i is ids[offsets[i]:offsets[i + 1]]
    "trained": np.int32,  # trained tokens of each example
    "places": np.int64,  # two for each example: number of the file in the source, line
}


class Unwritable(Exception):
    """The tokenized rows cannot be written where they should go (read-only, full); the data is not at fault."""


@dataclass(frozen=True)
class Written:
    """What a build leaves behind beside its files."""

    data_format: Format | None
    """None if the parts of the source have different forms."""
    counts: Counts
    checksums: dict[str, str]
    parts: tuple[int, ...]
    """Examples of each part of the source."""


class _Column:
    """One flat file that grows, and its checksum."""

    def __init__(self, directory: Path, name: str) -> None:
        self._dtype, self._digest = DTYPES[name], xxhash.xxh3_128()
        with writing():
            self._file = (directory / name).open("wb")

    def append(self, values: npt.NDArray[Any] | list[int]) -> None:
        raw = np.asarray(values, dtype=self._dtype).tobytes()
        self._digest.update(raw)
        with writing():
            self._file.write(raw)

    def close(self) -> str:
        with writing():  # the disk may turn out to be full only now, when the last bytes are flushed
            self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close after a failure, whose own error is the one to report."""
        with suppress(OSError):
            self._file.close()


@contextmanager
def writing() -> Iterator[None]:
    """A failure to write is Unwritable, so that it cannot be taken for a failure to read the data."""
    try:
        yield
    except OSError as error:
        raise Unwritable(error.strerror) from error


def write_examples(
    directory: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    say: Callable[[str], None],
    processes: int | None = None,
) -> Written:
    """Tokenize every row of the source into flat files in `directory`. Without `processes`, as many as are worth it."""
    if not tokenizer.is_fast:
        what = "the tokenizer is not a fast one (it has no tokenizer.json), so where responses lie cannot be told"
        remedy = "Name one that has, with --tokenizer; most models on the Hub do."
        raise ModelError(what, where=recipe.tokenizer or recipe.model, remedy=remedy)
    check_targets(parse_columns(recipe.columns) or ())
    job = Job(facts_of(tokenizer), recipe, source.files)
    forms: dict[Format, None] = {}
    tasks = _tasks(source, recipe, forms)
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if source.num_bytes >= _WORTH_BYTES else 1
    several = processes > 1 and job.facts.method is None
    with ExitStack() as cleanup:
        columns: dict[str, _Column] = {}
        for name in DTYPES:
            columns[name] = _Column(directory, name)
            cleanup.callback(columns[name].abandon)
        columns["offsets"].append([0])
        # Closed at once when something fails here, a full disk for example: or processes would live on meanwhile.
        encoded = cleanup.enter_context(
            closing(encode_in(job, tasks, processes) if several else encode_here(job, tasks))
        )
        tally, progress = Tally(), _Progress(source, say)
        parts = [0] * max(1, len(source.parts))
        for task, part in encoded:
            _append(columns, part, tally.tokens)
            tally.merge(part.tally)
            parts[task.part] += part.tally.kept
            progress.say(tally, task.piece.done)
        checksums = {name: column.close() for name, column in columns.items()}
    return Written(next(iter(forms)) if len(forms) == 1 else None, tally.counts(), checksums, tuple(parts))


def _append(columns: dict[str, _Column], part: Encoded, tokens_before: int) -> None:
    columns["ids"].append(part.ids)
    columns["mask"].append(part.mask)
    columns["offsets"].append(tokens_before + np.cumsum(part.lengths))
    columns["trained"].append(part.trained)
    columns["places"].append(part.places)


def _tasks(source: Source, recipe: Recipe, forms: dict[Format, None]) -> Iterator[Task]:
    """Every piece of every part, with the form that the first row of the part has."""
    for number, part in enumerate(source.parts or (source,)):
        pieces = part.pieces() if part.pieces else _pieces(part)
        form: Format | None = None if recipe.data_format == "auto" else recipe.data_format
        for piece in pieces:
            if form is None:
                row = next(piece.rows(), None)
                if row is None:  # blank lines
                    continue
                form = detect_format(rename(row, parse_columns(recipe.columns) or ()))
            forms[form] = None
            yield Task(piece, form, number)


def _pieces(source: Source) -> Iterator[Piece]:
    rows = source.read()
    while batch := tuple(itertools.islice(rows, _PIECE_ROWS)):
        yield Parsed(batch)


class _Progress:
    """Says now and then how far it is, and how long the rest will take at this rate."""

    def __init__(self, source: Source, say: Callable[[str], None]) -> None:
        self._source, self._say = source, say
        self._started = self._said = time.monotonic()

    def say(self, tally: Tally, done: float) -> None:
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S:
            return
        self._said, seconds = now, now - self._started
        left = f", {timedelta(seconds=round(seconds / done - seconds))} left" if done else ""
        rate = f"{tally.rows / seconds:,.0f} rows/s{left}"
        self._say(f"Tokenizing {self._source.name}: {tally.rows:,} rows, {tally.tokens:,} tokens ({rate})")
