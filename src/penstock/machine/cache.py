"""Where things are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(name: str) -> Path:
    """A directory by name under $PENSTOCK_CACHE, else under ~/.cache/penstock. It may not exist yet.

    Absolute: the compiler looks for it from directories of its own.
    """
    chosen = os.environ.get("PENSTOCK_CACHE")
    return (Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "penstock") / name
