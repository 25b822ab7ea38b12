"""What `--data` may name: files here, the embedded set, a set of the Hub; and names that are like a wrong one."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from penstock.data.files import file_kind
from penstock.recipe.lists import path_of

_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(?::[\w.-]+)?")
LOCAL = "a JSON, JSONL, CSV or Parquet file (or TSV, text, .gz, .zst), a directory of them, or `demo`"


def near(name: str) -> str:
    """A suggestion of files beside a path whose names are like it, or nothing."""
    path = path_of(name)
    try:
        names = [p.name for p in path.parent.iterdir() if p.name != path.name]  # a link to nothing has that name too
    except OSError:
        return ""
    found = [str(path.parent / n) for n in difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)]
    return f"Did you mean {' or '.join(found)}? " if found else ""


def looks_like_hub(name: str) -> bool:
    """`owner/name` or `name`, with an optional `:configuration`. A word with a dot and no owner is a file name."""
    before = name.partition(":")[0]
    is_file_name = bool(file_kind(Path(before))) or ("/" not in before and "." in before)
    return _HUB_NAME.fullmatch(name) is not None and not is_file_name
