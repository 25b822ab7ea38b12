"""Checksums of an exported model, in a file beside its others, so that what happens to them later on is seen.

A Hugging Face directory has none of its own, and a bit that flips in a weight is a weight like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from penstock.checkpoint.store import differs
from penstock.checkpoint.tensors import Digest, Transfer, digest_file
from penstock.errors import CheckpointError
from penstock.machine.hardware import usable_cores

SUMS = "checksums.json"
CHANGED = f"If you changed it yourself, remove {SUMS} there."


def write_sums(directory: Path) -> None:
    """Of every file that is there."""
    with _pool() as pool:
        paths = sorted(path for path in directory.iterdir() if path.is_file())
        files = {path.name: asdict(found) for path, found in zip(paths, pool.map(digest_file, paths), strict=True)}
    (directory / SUMS).write_text(json.dumps({"files": files}, indent=2) + "\n")


def check_sums(directory: Path, say: Callable[[str], None], remedy: str) -> bool:
    """Compare every byte with what was written, and refuse what differs. False where nobody has written it down."""
    if not (directory / SUMS).exists():
        return False
    try:
        values = json.loads((directory / SUMS).read_bytes())["files"]
        files = {Path(name).name: Digest(int(d["num_bytes"]), str(d["xxh3_128"])) for name, d in values.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the checksums are damaged: {error}"
        raise CheckpointError(what, where=str(directory / SUMS), remedy=f"{remedy} {CHANGED}") from None
    transfer = Transfer("checking", sum(digest.num_bytes for digest in files.values()), say)
    with _pool() as pool:
        found = pool.map(lambda name: differs(directory / name, files[name], transfer), files)
        damages = {name: damage for name, damage in zip(files, found, strict=True) if damage}
    for name, damage in damages.items():
        raise CheckpointError(damage, where=str(directory / name), remedy=f"{remedy} {CHANGED}")
    return True


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(8, len(usable_cores()))), "penstock-sums")
