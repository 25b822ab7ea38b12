"""How long the whole run is: steps and tokens, from the data if they can be read here, else from a stated assumption.

Tokens are estimated from characters. Tokenizing was rejected: it needs the tokenizer and takes minutes for large data,
and a plan should take less than a second; `penstock data` and `penstock train --dry-run` count exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.data.files import file_kind, read_file
from penstock.data.source import local_files
from penstock.plan.report import RunLength
from penstock.recipe.lists import parse_parts
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
    counted = _count(_files(recipe), recipe.max_length)
    if counted is not None:
        examples, tokens = counted
        how = f"estimated from {recipe.data}: {examples:,} examples, 4 characters a token"
    elif recipe.data in ASSUMED:
        examples, each = ASSUMED[recipe.data]
        tokens, how = float(examples * each), f"assumed of {recipe.data}: {examples:,} examples of {each} tokens"
    else:
        return _fixed(recipe)
    share = recipe.data_percent / 100 * (1 - recipe.validation)
    rows = share * (tokens / (recipe.max_length * PACKED) if recipe.packing else examples)
    steps = max(1, math.ceil(recipe.epochs * math.ceil(rows / recipe.batch_size)))  # the last of an epoch is smaller
    if recipe.max_steps and recipe.max_steps < steps:
        return _fixed(recipe)
    return RunLength(steps, int(tokens * share * recipe.epochs), how)


def _fixed(recipe: Recipe) -> RunLength | None:
    if not recipe.max_steps:
        return None
    tokens = recipe.max_steps * recipe.batch_size * recipe.max_length
    return RunLength(recipe.max_steps, tokens, "max_steps, full rows")


def _files(recipe: Recipe) -> list[Path]:
    """The files of the data, if all of it is here. Shares of a mixture are not looked at: this is an estimate."""
    found = [local_files(part.name, recipe.data_split) for part in parse_parts(recipe.data) or ()]
    files = [path for paths in found for path in paths]
    return files if all(found) and all(file_kind(path) for path in files) else []


def _count(files: Iterable[Path], max_length: int) -> tuple[int, float] | None:
    """Examples and tokens. A large text file is sampled at its beginning and scaled by its size."""
    examples = tokens = 0.0
    for path in files:
        here, there, seen = 0, 0.0, 0
        rows = read_file(path)
        sampled = (
            path.suffix.lower() not in (".gz", ".zst")
            and file_kind(path) not in (".parquet", ".arrow")
            and path.stat().st_size > 8 * 2**20
        )
        for row in islice(rows, SAMPLE) if sampled else rows:
            here += 1
            there += min(max_length, _characters(row.fields) / CHARACTERS_A_TOKEN + TEMPLATE_TOKENS)
            if sampled:
                seen += len(json.dumps(row.fields, ensure_ascii=False).encode()) + 2
        scale = path.stat().st_size / seen if sampled and here == SAMPLE else 1.0
        examples, tokens = examples + here * scale, tokens + there * scale
    return (round(examples), tokens) if examples else None


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
