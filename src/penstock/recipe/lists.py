"""Fields of a recipe that hold more than a word in one text: renamed columns, data of several parts, shares, sizes."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path


def parse_columns(text: str) -> tuple[tuple[str, str], ...] | None:
    """(column of the file, name that it gets) of `question=prompt,answer=completion`; None if it is not such a list.

    An empty name leaves a column out.
    """
    pairs: list[tuple[str, str]] = []
    for part in text.split(",") if text else []:
        column, mark, name = (word.strip() for word in part.partition("="))
        if not column or not mark or "=" in name:
            return None
        pairs.append((column, name))
    columns, names = [column for column, _ in pairs], [name for _, name in pairs if name]
    return tuple(pairs) if len({*columns}) == len(columns) and len({*names}) == len(names) else None


def path_of(name: str) -> Path:
    """A name as a path. pathlib's own raises where `~` is followed by nobody's name."""
    return Path(os.path.expanduser(name))


def is_here(name: str) -> bool:
    """Whether something is called so. Several names in one may be longer than the name of a file can be."""
    return os.path.exists(path_of(name))


@dataclass(frozen=True)
class Part:
    """One of the names in `--data`, and its share of the examples if shares are given."""

    name: str
    weight: float | None = None


def parse_parts(text: str) -> tuple[Part, ...] | None:
    """The parts of `a.jsonl:0.7,b.parquet:0.3` or `a.jsonl,b.jsonl`; None if some have a share and others none.

    A file whose own name has a comma or ends like a share is that file. A number behind one name alone is a share only
    if that name is here: a data set on the Hub may have a configuration that is called so.
    """
    if is_here(text):
        return (Part(text),) if text else None
    if "," not in text:
        part = _part(text)
        here = part.name == "demo" or is_here(part.name)
        return (part if here else Part(text),)
    parts = tuple(_part(word.strip()) for word in text.split(","))
    weighted = [part for part in parts if part.weight is not None]
    whole = all(part.name and (part.weight is None or 0 < part.weight < math.inf) for part in parts)
    return parts if whole and len(weighted) in (0, len(parts)) else None


def _part(word: str) -> Part:
    name, mark, number = word.rpartition(":")
    if not mark or is_here(word):
        return Part(word)
    try:
        return Part(name, float(number))
    except ValueError:
        return Part(word)  # the configuration of a Hub data set


HOMES = ("gpu", "stream", "host")


def parse_homes(text: str) -> str | dict[str, float] | None:
    """`auto` or one home as it is, shares as a dictionary, None for anything else."""
    if text in ("auto", *HOMES):
        return text
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            shares[name.strip()] = float(number)
        except ValueError:
            return None
    known = set(shares) <= set(HOMES) and len(shares) == text.count(",") + 1
    whole = all(share > 0 for share in shares.values()) and math.isclose(sum(shares.values()), 1, abs_tol=0.005)
    return shares if known and whole else None


_UNITS = {"": 1, "k": 10**3, "ki": 2**10, "m": 10**6, "mi": 2**20, "g": 10**9, "gi": 2**30, "t": 10**12, "ti": 2**40}


def parse_size(text: str) -> int | None:
    """Bytes of 480GiB, 128GB, 1.5TiB or plain bytes; None of anything else, and of under a MB: the unit is missing."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", text.lower())
    found = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    return int(found) if found >= 10**6 else None
