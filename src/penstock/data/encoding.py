"""From rows to token ids and mask, in batches, written to flat files as they come.

Each batch is one call of the fast tokenizer, whose Rust threads then share it out; a pool of processes was rejected (it
copies the tokenizer and the rows, and competes with those threads). Memory is bounded by a batch, whatever the file: a
batch ends at a number of rows or of characters, so that long documents do not add up.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.data.files import Row
from penstock.data.source import Source
from penstock.data.template import Example, Template
from penstock.data.turns import Dropped, Format, detect_format
from penstock.errors import DataError, ModelError
from penstock.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_ROWS = 1000
_BATCH_CHARACTERS = 2_000_000
_SAY_EVERY_S = 2.0
_PLACES_KEPT = 5

DTYPES: dict[str, type[np.generic]] = {
    "ids": np.uint32,  # token ids of all examples, one after another
    "mask": np.uint8,  # 1 where the token is trained on; never the first of an example, which nothing predicts
    "offsets": np.int64,  # example i is ids[offsets[i]:offsets[i + 1]]
    "places": np.int64,  # two for each example: number of the file in the source, line
}


class Unwritable(Exception):
    """The tokenized rows cannot be written where they should go (read-only, full); the data is not at fault."""


@dataclass(frozen=True)
class Noted:
    """How often something happened, and the first places of it as (number of the file, line)."""

    count: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Counts:
    """What became of the rows of a source."""

    rows: int
    kept: int
    tokens: int
    trained_tokens: int
    longest: int
    """Tokens of the longest example, before truncation."""
    max_token_id: int
    truncated: Noted
    unended: Noted
    """Kept examples whose last response lost its end token to truncation."""
    spelled: Noted
    """Kept examples in which text that someone wrote became a special token."""
    dropped: dict[str, Noted]
    """By reason."""


@dataclass(frozen=True)
class Written:
    """What a build leaves behind beside its files."""

    data_format: Format
    counts: Counts
    checksums: dict[str, str]


class _Column:
    """One flat file that grows, and its checksum."""

    def __init__(self, directory: Path, name: str) -> None:
        self._dtype, self._digest = DTYPES[name], hashlib.sha256()
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


@dataclass
class _Noting:
    count: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)

    def add(self, place: tuple[int, int]) -> None:
        self.count += 1
        if len(self.places) < _PLACES_KEPT:
            self.places.append(place)

    def noted(self) -> Noted:
        return Noted(self.count, tuple(self.places))


@dataclass
class _Tally:
    """The counts while they grow."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    max_token_id: int = 0
    truncated: _Noting = field(default_factory=_Noting)
    unended: _Noting = field(default_factory=_Noting)
    spelled: _Noting = field(default_factory=_Noting)
    dropped: defaultdict[str, _Noting] = field(default_factory=lambda: defaultdict(_Noting))

    def counts(self) -> Counts:
        return Counts(
            rows=self.rows,
            kept=self.kept,
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            longest=self.longest,
            max_token_id=self.max_token_id,
            truncated=self.truncated.noted(),
            unended=self.unended.noted(),
            spelled=self.spelled.noted(),
            dropped={reason: noting.noted() for reason, noting in self.dropped.items()},
        )


def write_examples(
    directory: Path, source: Source, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, say: Callable[[str], None]
) -> Written:
    """Tokenize every row of the source into flat files in `directory`."""
    if not tokenizer.is_fast:
        what = "the tokenizer is not a fast one (it has no tokenizer.json), so where responses lie cannot be told"
        remedy = "Name one that has, with --tokenizer; most models on the Hub do."
        raise ModelError(what, where=recipe.tokenizer or recipe.model, remedy=remedy)
    rows = source.read()
    first = next(rows)  # a source raises rather than being empty
    form: Format = detect_format(first) if recipe.data_format == "auto" else recipe.data_format
    with ExitStack() as cleanup:
        columns: dict[str, _Column] = {}
        for name in DTYPES:
            columns[name] = _Column(directory, name)
            cleanup.callback(columns[name].abandon)
        encoder = _Encoder(columns, source, tokenizer, recipe, form)
        started = said = time.monotonic()
        for batch in _batches(encoder.rendered(itertools.chain([first], rows))):
            encoder.encode(batch)
            if (now := time.monotonic()) - said >= _SAY_EVERY_S:
                tally, said = encoder.tally, now
                rate = tally.rows / (now - started)
                say(f"Tokenizing {source.name}: {tally.rows:,} rows, {tally.tokens:,} tokens ({rate:,.0f} rows/s)")
        checksums = {name: column.close() for name, column in columns.items()}
    return Written(form, encoder.tally.counts(), checksums)


def _batches(examples: Iterator[tuple[Row, Example]]) -> Iterator[list[tuple[Row, Example]]]:
    batch: list[tuple[Row, Example]] = []
    characters = 0
    for row, example in examples:
        batch.append((row, example))
        characters += len(example.text)
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Encoder:
    """Renders, tokenizes, cuts, counts and writes."""

    def __init__(
        self,
        columns: dict[str, _Column],
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Recipe,
        form: Format,
    ) -> None:
        self.tally = _Tally()
        self._tokenizer, self._recipe = tokenizer, recipe
        self._template = Template(tokenizer, recipe, form)
        self._file_numbers = {file: i for i, file in enumerate(source.files)}
        self._columns = columns
        self._columns["offsets"].append([0])

    def rendered(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Example]]:
        for row in rows:
            self.tally.rows += 1
            example = self._template.render(row)
            if isinstance(example, Dropped):
                self.tally.dropped[example.reason].add(self._place(row))
            else:
                yield row, example

    def encode(self, batch: list[tuple[Row, Example]]) -> None:
        """Tokenize a batch and append what is kept of it to the files."""
        texts = [example.text for _, example in batch]
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids: list[list[int]] = []
        masks: list[bytes] = []
        places: list[int] = []
        for (row, example), tokens, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            mask = self._cut(row, tokens, *self._trained(example, tokens, offsets))
            if mask is not None:
                ids.append(tokens[: len(mask)])
                masks.append(bytes(mask))
                places.extend(self._place(row))
                if example.spells_token:
                    self.tally.spelled.add(self._place(row))
        self._append(ids, masks, places)

    def _trained(self, example: Example, tokens: list[int], offsets: list[tuple[int, int]]) -> tuple[bytearray, int]:
        """The mask of an example, and the index of the token that ends its last response.

        A token is trained if any of its characters is in a span. So the first word of a response is learned also where
        the prompt ends in a blank that its token takes in (" Paris"); a rule by where tokens start would leave it out,
        or not, depending on how the tokenizer counts that blank. Likewise an end token that swallows the line break
        after it (Phi-3's). Only a special token that swallows the blanks before a response is still the prompt's.
        """
        mask = bytearray(len(offsets))
        last = 0
        for start, end in example.spans:
            first, after = bisect_left(offsets, (start,)), bisect_left(offsets, (end,))
            while first and offsets[first - 1][1] > start and tokens[first - 1] not in self._template.special_ids:
                first -= 1
            mask[first:after] = b"\x01" * (after - first)
            last = after - 1
        return mask, last

    def _cut(self, row: Row, tokens: list[int], mask: bytearray, last: int) -> bytearray | None:
        """The mask of what is kept of an example, or None. `last` is where its last response ends."""
        limit, policy = self._recipe.max_length, self._recipe.too_long
        self.tally.longest = max(self.tally.longest, len(tokens))
        too_long = len(tokens) > limit
        if too_long and policy == "refuse":
            remedy = "Raise --max-length, or let --too-long truncate or drop it."
            raise DataError(f"{len(tokens)} tokens, over max_length {limit}", where=row.where, remedy=remedy)
        if too_long and policy == "drop":
            self.tally.dropped["longer than max_length"].add(self._place(row))
            return None
        if self._recipe.train_on_prompt:
            mask[:] = b"\x01" * len(mask)
        mask[:1] = b"\x00"
        del mask[limit:]
        if not any(mask):
            reason = "response begins beyond max_length" if too_long else "no token to train on"
            self.tally.dropped[reason].add(self._place(row))
            return None
        if too_long:
            self.tally.truncated.add(self._place(row))
        if last >= limit or tokens[last] not in self._template.special_ids:
            self.tally.unended.add(self._place(row))
        return mask

    def _append(self, ids: list[list[int]], masks: list[bytes], places: list[int]) -> None:
        if not ids:
            return
        flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.uint32)
        mask = np.frombuffer(b"".join(masks), dtype=np.uint8)
        self._columns["ids"].append(flat)
        self._columns["mask"].append(mask)
        self._columns["offsets"].append(self.tally.tokens + np.cumsum([len(tokens) for tokens in ids]))
        self._columns["places"].append(places)
        self.tally.kept += len(ids)
        self.tally.tokens += len(flat)
        self.tally.trained_tokens += int(mask.sum())
        self.tally.max_token_id = max(self.tally.max_token_id, int(flat.max()))

    def _place(self, row: Row) -> tuple[int, int]:
        return self._file_numbers[row.file], row.line
