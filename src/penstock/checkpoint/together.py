"""A checkpoint that several ranks write: each its own files, then one manifest for all of them.

Ranks write into one directory, which all of them must see. Rank 0 names it and, when every rank has said that its files
are synced, seals and renames it, so that the rules of `store.py` hold: it is there whole or not at all. A rank that
fails says so before the others wait for it, and all of them give up together.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoint.store import Checkpoint, begin_save, end_save, write_all
from penstock.checkpoint.tensors import Digest
from penstock.engine.ranks import World
from penstock.errors import RankLost
from penstock.offload.saved_tensors import SavedTensor


def save_together(
    world: World,
    directory: Path,
    step: int,
    tensors: Mapping[str, Sequence[SavedTensor]],
    documents: Mapping[str, Any],
    say: Any,
) -> Checkpoint:
    """Called by every rank with its own tensors, under names of groups that no other rank has."""
    places = _told(world, lambda: begin_save(directory, step) if world.first else None)
    path, building = places[0]
    try:
        written = _told(world, lambda: write_all(building, tensors, documents if world.first else {}, say))
        files: dict[str, Digest] = {name: digest for own in written for name, digest in own.items()}
        _told(world, lambda: end_save(building, path, step, files) if world.first else None)
    except BaseException:
        if world.first:
            shutil.rmtree(building, ignore_errors=True)
        raise
    return Checkpoint(path, step, files)


def _told(world: World, act: Any) -> list[Any]:
    """What `act` gives on every rank. If it fails on one, that one raises its error and the others raise one too."""
    result: Any = None
    failure: BaseException | None = None
    try:
        result = act()
    except BaseException as error:
        failure = error
    everyone = world.gather((repr(failure) if failure else "", result))
    if failure is not None:
        raise failure
    for rank, (message, _) in enumerate(everyone):
        if message:
            raise RankLost(f"could not save: {message}", where=f"rank {rank}", remedy="Its machine shows why.")
    return [value for _, value in everyone]
