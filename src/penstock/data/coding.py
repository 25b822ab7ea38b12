"""From a piece of rows to token ids and mask. Imports no torch: it runs in processes that should be small.

A batch is one call of the tokenizer. It ends at a number of rows or of characters, so that long documents do not add
up, and memory is bounded by it, whatever the file.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.counts import Tally
from penstock.data.facts import TokenizerFacts
from penstock.data.forms import Format, lacking, rename
from penstock.data.render import Example
from penstock.data.rows import Piece, Row
from penstock.data.template import Template
from penstock.data.turns import Dropped
from penstock.errors import DataError
from penstock.recipe.lists import parse_columns
from penstock.recipe.recipe import Recipe

_BATCH_ROWS = 1000
_BATCH_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Encoded:
    """What a piece became: examples one after another, and what happened to its rows."""

    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int32]
    places: npt.NDArray[np.int64]
    tally: Tally


UNANSWERED = "turns after the last response"


class Coder:
    """Renders, tokenizes, cuts and counts. One for each form of rows."""

    def __init__(self, facts: TokenizerFacts, recipe: Recipe, files: tuple[str, ...], form: Format) -> None:
        self._recipe, self._form = recipe, form
        self._template, self._tokenizer = Template(facts, recipe, form), facts.tokenizer
        self._file_numbers = {file: i for i, file in enumerate(files)}
        self._columns = parse_columns(recipe.columns) or ()
        self._splits = recipe.too_long == "split" or (form == "text" and recipe.split_documents == "length")

    def encode(self, piece: Piece) -> Encoded:
        """All of a piece."""
        part = _Part()
        for batch in _batches(self._rendered(piece.rows(), part.tally)):
            self._encode_batch(batch, part)
        return part.encoded()

    def _rendered(self, rows: Iterator[Row], tally: Tally) -> Iterator[tuple[Row, Example]]:
        for row in rows:
            tally.rows += 1
            for name in lacking(row, self._columns):
                tally.lacking[name].add(self._place(row))
            row = rename(row, self._columns) if self._columns else row
            for name in self._template.unused(row):
                tally.unused[name].add(self._place(row))
            example = self._template.render(row)
            if isinstance(example, Dropped):
                tally.dropped[example.reason].add(self._place(row))
            else:
                if example.unanswered:
                    tally.unused[UNANSWERED].add(self._place(row))
                yield row, example

    def _encode_batch(self, batch: list[tuple[Row, Example]], part: _Part) -> None:
        """Tokenize a batch and keep what is kept of it."""
        encodings = self._tokenizer.encode_batch([example.text for _, example in batch], add_special_tokens=False)
        for (row, example), encoding in zip(batch, encodings, strict=True):
            tokens = encoding.ids
            mask, last = self._trained(example, tokens, encoding.offsets)
            if self._splits and len(tokens) > self._recipe.max_length:
                kept = self._split(row, tokens, mask, part)
                if kept and tokens[last] not in self._template.special_ids:
                    part.tally.unended.add(self._place(row))
            else:
                cut = self._cut(row, tokens, mask, last, part.tally)
                kept = cut is not None
                if cut is not None:
                    part.add(tokens[: len(cut)], cut, self._place(row))
            if kept and example.spells_token:
                part.tally.spelled.add(self._place(row))
            if kept and example.unasked:
                part.tally.unasked.add(self._place(row))

    def _trained(self, example: Example, tokens: list[int], offsets: list[tuple[int, int]]) -> tuple[bytearray, int]:
        """The mask of an example, and the index of the token that ends its last response.

        A token is trained if any of its characters is in a span. So the first word of a response is learned also where
        the prompt ends in a blank that its token takes in (" Paris"); a rule by where tokens start would leave it out,
        or not, depending on how the tokenizer counts that blank. Likewise an end token that swallows the line break
        after it (Phi-3's). Only a special token that swallows the blanks before a response is still the prompt's.
        """
        whole = self._recipe.train_on_prompt
        mask = bytearray(b"\x01" * len(offsets) if whole else len(offsets))
        last = 0
        for start, end in example.spans:
            first, after = self._tokens_of(start, end, tokens, offsets)
            mask[first:after] = b"\x01" * (after - first)
            last = after - 1
        for start, end in example.untrained if whole else ():
            first, after = self._tokens_of(start, end, tokens, offsets)
            mask[first:after] = bytes(after - first)
        return mask, last

    def _tokens_of(self, start: int, end: int, tokens: list[int], offsets: list[tuple[int, int]]) -> tuple[int, int]:
        first, after = bisect_left(offsets, (start,)), bisect_left(offsets, (end,))
        while first and offsets[first - 1][1] > start and tokens[first - 1] not in self._template.special_ids:
            first -= 1
        return first, after

    def _cut(self, row: Row, tokens: list[int], mask: bytearray, last: int, tally: Tally) -> bytearray | None:
        """The mask of what is kept of an example, or None. `last` is where its last response ends."""
        limit, policy = self._recipe.max_length, self._recipe.too_long
        tally.longest = max(tally.longest, len(tokens))
        too_long = len(tokens) > limit
        if too_long and policy == "refuse":
            remedy = "Raise --max-length, or let --too-long split, truncate or drop it."
            raise DataError(f"{len(tokens)} tokens, over max_length {limit}", where=row.where, remedy=remedy)
        if too_long and policy == "drop":
            tally.dropped["longer than max_length"].add(self._place(row))
            tally.lost_tokens += len(tokens)
            return None
        mask[:1] = b"\x00"
        del mask[limit:]
        if 1 not in mask:
            reason = "response begins beyond max_length" if too_long else "no token to train on"
            tally.dropped[reason].add(self._place(row))
            tally.lost_tokens += len(tokens) if too_long else 0
            return None
        if too_long:
            tally.truncated.add(self._place(row))
            tally.lost_tokens += len(tokens) - limit
        if last >= limit or tokens[last] not in self._template.special_ids:
            tally.unended.add(self._place(row))
        return mask

    def _split(self, row: Row, tokens: list[int], mask: bytearray, part: _Part) -> bool:
        """A long document or conversation as several examples. Whether there are any.

        Each begins with the last token of the one before, which is trained on there: so every token is, once. A piece
        without a token to train on would teach nothing, and is left out.
        """
        kept = False
        limit = self._recipe.max_length
        part.tally.longest = max(part.tally.longest, len(tokens))
        part.tally.split.add(self._place(row))
        for start in range(0, len(tokens) - 1, limit - 1):
            cut = mask[start : start + limit]
            cut[:1] = b"\x00"
            if 1 not in cut:
                part.tally.lost_tokens += len(cut) - (start > 0)  # the first is the last of the piece before
                continue
            part.add(tokens[start : start + limit], cut, self._place(row))
            kept = True
        return kept

    def _place(self, row: Row) -> tuple[int, int]:
        return self._file_numbers[row.file], row.line


class _Part:
    """The examples of a piece, while they are made."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._ids: list[list[int]] = []
        self._masks: list[bytearray] = []
        self._places: list[tuple[int, int]] = []

    def add(self, tokens: list[int], mask: bytearray, place: tuple[int, int]) -> None:
        self._ids.append(tokens)
        self._masks.append(mask)
        self._places.append(place)

    def encoded(self) -> Encoded:
        lengths = np.array([len(tokens) for tokens in self._ids], dtype=np.int64)
        ids = np.fromiter(itertools.chain.from_iterable(self._ids), dtype=np.uint32, count=int(lengths.sum()))
        trained = np.array([mask.count(1) for mask in self._masks], dtype=np.int32)
        tally = self.tally
        tally.kept, tally.tokens, tally.trained_tokens = len(lengths), len(ids), int(trained.sum())
        tally.max_token_id = int(ids.max()) if len(ids) else 0
        mask = np.frombuffer(b"".join(self._masks), dtype=np.uint8)
        places: Any = np.array(self._places, dtype=np.int64).reshape(-1)
        return Encoded(ids, mask, lengths, trained, places, tally)


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
