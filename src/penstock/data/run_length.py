"""How long the whole run is: steps and tokens, from the data if they can be read here, else from a stated assumption.

Tokens are estimated from characters. Tokenizing was rejected: it needs the tokenizer and takes minutes for large data,
and a plan should take less than a second; `penstock data` and `penstock train --dry-run` count exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.data.files import file_kind, read_file
from penstock.data.names import looks_like_hub, near
from penstock.data.source import local_files
from penstock.plan.report import RunLength
from penstock.recipe.lists import is_here, parse_parts
from penstock.recipe.recipe import Recipe

CHARACTERS_A_TOKEN = 4.0
TEMPLATE_TOKENS = 12
"""Around the turns of one example."""
PACKED = 0.97
"""Share of a packed row that examples fill."""
SAMPLE = 2000
"""Rows that are read of a large file."""
ASSUMED = {"tatsu-lab/alpaca": (52_002, 100)}
"""Hub data sets of the presets: examples, and tokens in one. Not measured here: the Hub is not asked."""


def run_length(recipe: Recipe) -> RunLength | None:
    """Steps and tokens, or None if the data is not here."""
    counted = _count(_files(recipe), recipe)
    if counted is not None:
        how = f"estimated from {recipe.data}: {round(counted.examples):,} examples, 4 characters a token"
        if counted.longer:
            how += f"; {round(counted.longer):,} longer than a row {_LONGER[recipe.too_long]}"
    elif recipe.data in ASSUMED:
        examples, each = ASSUMED[recipe.data]
        how = f"assumed of {recipe.data}: {examples:,} examples of {each} tokens"
        counted = _Counted(recipe.max_length)
        counted.add(each, "truncate", examples)
    else:
        return _fixed(recipe)
    share = recipe.data_percent / 100 * (1 - recipe.validation)
    rows = share * (counted.rows if recipe.packing else counted.pieces)
    steps = max(1, math.ceil(recipe.epochs * math.ceil(rows / recipe.batch_size)))  # the last of an epoch is smaller
    if recipe.max_steps and recipe.max_steps < steps:
        return _fixed(recipe, counted.attended)
    return RunLength(steps, int(counted.tokens * share * recipe.epochs), how, counted.attended)


def why_unknown(recipe: Recipe) -> str:
    """Why there is no length. A file that is not here may be on the machine that is planned, or its name is wrong."""
    for part in parse_parts(recipe.data) or ():
        if not looks_like_hub(part.name) and not is_here(part.name):
            suggestion = near(part.name).strip()
            return f"{part.name} is not here{f' ({suggestion})' if suggestion else ''}"
    return "the data is not here"


def _fixed(recipe: Recipe, attended: float = 0.0) -> RunLength | None:
    if not recipe.max_steps:
        return None
    tokens = recipe.max_steps * recipe.batch_size * recipe.max_length
    return RunLength(recipe.max_steps, tokens, "max_steps, full rows", attended)


_LONGER = {"truncate": "are cut", "split": "are split", "drop": "are left out", "refuse": "are refused"}


@dataclass
class _Counted:
    """Sums over examples, as they are trained on in rows of some length. Those of a sample count more than once."""

    length: int
    examples: float = 0.0
    pieces: float = 0.0
    """What they become: rows, where none shares one."""
    longer: float = 0.0
    """Of them, those that no row holds."""
    full: float = 0.0
    """Rows that an example fills."""
    rest: float = 0.0
    """Tokens of what shares rows."""
    large: float = 0.0
    """Of that, examples of which no row holds two."""
    squares: float = 0.0

    def add(self, tokens: float, too_long: str, times: float = 1.0) -> None:
        """An example of so many tokens."""
        self.examples += times
        full, rest = 0.0, tokens
        if tokens > self.length:
            self.longer += times
            full, rest = divmod(tokens, self.length) if too_long == "split" else (float(too_long != "drop"), 0.0)
        self.pieces += times * (full + (rest > 0))
        self.full += times * full
        self.rest += times * rest
        self.large += times * (rest > self.length / 2)
        self.squares += times * (full * self.length**2 + rest**2)

    @property
    def tokens(self) -> float:
        return self.full * self.length + self.rest

    @property
    def rows(self) -> float:
        """As they are packed."""
        return self.full + max(self.large, self.rest / (self.length * PACKED))

    @property
    def attended(self) -> float:
        """Tokens that one of them attends to, on average; 0 if every example fills its row."""
        return self.squares / 2 / max(1.0, self.tokens) if self.rest else 0.0


def _files(recipe: Recipe) -> list[Path]:
    """The files of the data, if all of it is here. Shares of a mixture are not looked at: this is an estimate."""
    found = [local_files(part.name, recipe.data_split) for part in parse_parts(recipe.data) or ()]
    files = [path for paths in found for path in paths]
    return files if all(found) and all(file_kind(path) for path in files) else []


def _count(files: Iterable[Path], recipe: Recipe) -> _Counted | None:
    """A large text file is sampled at its beginning and scaled by its size."""
    found = _Counted(recipe.max_length)
    for path in files:
        size = path.stat().st_size
        compressed = path.suffix.lower() in (".gz", ".zst")
        sampled = size > 8 * 2**20 and not compressed and file_kind(path) not in (".parquet", ".arrow")
        read = read_file(path, recipe.split_documents)
        rows = list(islice(read, SAMPLE)) if sampled else read
        scale = 1.0
        if isinstance(rows, list) and len(rows) == SAMPLE:
            scale = size / sum(_num_bytes(row.fields, path) for row in rows)
        for row in rows:
            splits = recipe.split_documents == "length" and set(row.fields) == {"text"}
            tokens = _characters(row.fields) / CHARACTERS_A_TOKEN + TEMPLATE_TOKENS
            found.add(tokens, "split" if splits else recipe.too_long, scale)
    return found if found.examples else None


def _num_bytes(fields: dict[str, Any], path: Path) -> int:
    """What a row takes in its file, about."""
    if file_kind(path) == ".txt":
        return len(fields["text"].encode()) + 1
    return len(json.dumps(fields, ensure_ascii=False).encode()) + 2


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
