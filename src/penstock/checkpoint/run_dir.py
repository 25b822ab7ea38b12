"""The directory of a run: checked before anything slow, made only when the run is sure to start."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from penstock.checkpoint.lock import LOCK_FILE, is_claimed, refuse_if_claimed
from penstock.checkpoint.places import CHECKPOINTS, RECIPE_FILE, as_noted, check_is_run, check_path
from penstock.checkpoint.store import FILE_BYTES, IN_USE, check_links, find, remove, sweep, sync_directory
from penstock.engine.deepspeed_config import deepspeed_json
from penstock.engine.ranks import ALONE, World
from penstock.errors import DISK_IS_FULL, CheckpointError, DoesNotFit, OutputError, counted, size
from penstock.machine.disk import FILE_LIMIT, PROBE, file_limit, write_whole
from penstock.recipe.recipe import Recipe, with_values

RANKS_FILE = "ranks.json"
"""Where the run ran: ranks, machines, device. It is not in the recipe, since it changes nothing that is trained."""
DEEPSPEED_FILE = "deepspeed.json"
RUN_FILES = {
    RECIPE_FILE, RANKS_FILE, DEEPSPEED_FILE, "metrics.jsonl", "eval.jsonl", "facts", "model", "model.unchecked",
    CHECKPOINTS, LOCK_FILE, "report.html", "report-images", "tensorboard", "wandb", "trackio",
}  # fmt: skip
"""All that a run writes. Nothing else is ever removed, and no run begins in a directory with anything else."""


def check_run_dir(directory: Path, *, overwrite: bool, own: bool = False) -> None:
    """Refuse a directory that cannot be written, or that holds something we must not write over.

    A run that goes on in its `own` directory leaves what others have put there alone.
    """
    check_path(directory, "--output-dir")
    if directory.exists() and not directory.is_dir():
        raise OutputError("is a file, not a directory", where=str(directory), remedy="Use another --output-dir.")
    refuse_if_claimed(directory)
    held = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    for probe in (name for name in list(held) if name.startswith(PROBE)):  # left by a process that died right here
        _remove(directory / probe)
        held.remove(probe)
    foreign = sorted(held - RUN_FILES)
    if foreign and not (own and RECIPE_FILE in held):  # without a recipe it is no run's, whoever wants to go on there
        what = f"holds files of something else, such as {foreign[0]}"
        remedy = f"Move {directory / foreign[0]} elsewhere, or use another --output-dir."
        raise OutputError(what, where=str(directory), remedy=remedy)
    if held - {LOCK_FILE} and not (overwrite or own):
        remedy = f"Use --resume to go on with it, --output-dir {quote(str(directory))}-2, or --overwrite to replace it."
        raise OutputError("holds a run already", where=str(directory), remedy=remedy)
    existing = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    try:
        # Only a real attempt tells: permission bits say nothing of read-only mounts, or to root.
        os.rmdir(tempfile.mkdtemp(prefix=PROBE, dir=existing))
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", "Use an --output-dir that you can write to."
        if error.errno in DISK_IS_FULL:
            remedy = "Free space there, or use an --output-dir on another disk."
            raise DoesNotFit(what, where=str(directory), remedy=remedy) from None
        raise OutputError(what, where=str(directory), remedy=remedy) from None


def _remove(path: Path) -> None:
    """A file, a link or a directory; what cannot be removed stays."""
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def make_run_dir(recipe: Recipe, world: World = ALONE, *, keep_checkpoints: bool = False) -> Path:
    """The checked directory, holding the recipe and nothing else, except what the run goes on from and its facts."""
    directory = recipe.run_dir
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / CHECKPOINTS).is_dir():
        sweep(directory / CHECKPOINTS)
    if not keep_checkpoints:
        for checkpoint in find(directory / CHECKPOINTS):
            remove(checkpoint)  # one that is there in part would pass for a damaged one
    kept = {LOCK_FILE} | ({CHECKPOINTS, "facts", RECIPE_FILE} if keep_checkpoints else set())
    for old in (directory / name for name in RUN_FILES - kept):  # the directory itself may be a link or a mount
        try:
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in IN_USE:
                raise
            what = f"cannot be removed ({error.strerror})"
            remedy = "End what still reads it, or use another --output-dir."
            raise OutputError(what, where=str(old), remedy=remedy) from None
    text = yaml.safe_dump(as_noted(recipe), sort_keys=False, allow_unicode=True)
    write_whole(directory / RECIPE_FILE, text)  # checkpoints without a recipe, or with half of one, are no run
    if recipe.engine == "deepspeed":
        config = json.dumps(deepspeed_json(recipe, world), indent=2)
        write_whole(directory / DEEPSPEED_FILE, f"{config}\n")
    sync_directory(directory)
    return directory


def note_ranks(directory: Path, world: World, device: str) -> None:
    """Write down where the run runs."""
    facts = {"ranks": world.size, "ranks_per_machine": world.local_size, "device": device}
    write_whole(directory / RANKS_FILE, json.dumps(facts) + "\n")


def check_room(
    directory: Path,
    *,
    checkpoint_bytes: int,
    num_saves: int,
    keep: int,
    export_bytes: int,
    save_every: int = 0,
    keep_best: bool = False,
    keep_checkpoints: bool = True,
) -> None:
    """Refuse to begin what the disk cannot hold: the checkpoints that are kept, one being written, and the model.

    Checkpoints may be on a disk of their own, behind a link or a mount.
    """
    check_file_limit(directory, export_bytes)
    checkpoints = directory / CHECKPOINTS
    existing = len(find(checkpoints)) if keep_checkpoints else 0
    check = partial(
        _check_disk, checkpoint_bytes=checkpoint_bytes, keep=keep, save_every=save_every, keep_best=keep_best
    )
    there = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free + _num_bytes(directory / "model") + _num_bytes(directory / "model.unchecked")
    if not keep_checkpoints:  # they make room, but another model's may be smaller
        free += _num_bytes(checkpoints)
    elif checkpoints.is_dir() and _disk(checkpoints) != _disk(directory):
        check(directory, free, 0, num_saves=0, export_bytes=export_bytes)
        check(checkpoints, shutil.disk_usage(checkpoints).free, existing, num_saves=num_saves, export_bytes=0)
        return
    check(directory, free, existing, num_saves=num_saves, export_bytes=export_bytes)


def _disk(path: Path) -> int:
    return path.stat().st_dev


def _check_disk(
    where: Path,
    free: int,
    existing: int,
    *,
    checkpoint_bytes: int,
    num_saves: int,
    keep: int,
    export_bytes: int,
    save_every: int,
    keep_best: bool,
) -> None:
    """The same of one disk, with so many checkpoints."""

    def needed(keep: int, num_saves: int, keep_best: bool = keep_best) -> int:
        return num_more(existing, num_saves, keep + keep_best) * checkpoint_bytes + export_bytes

    if needed(keep, num_saves) <= free:
        return
    more, listed = num_more(existing, num_saves, keep + keep_best), f"the model, {size(export_bytes)}"
    if more:
        best = ", the best one" if keep_best else ""
        why = f" (keep = {keep}{best}, and one being written)" if more > 1 else ""
        model = f" and {listed}" if export_bytes else ""
        listed = f"{counted(more, 'more checkpoint')} of {size(checkpoint_bytes)}{why}{model}"
    # Only what is enough, and not what the run does anyway.
    seldom = " --save-every 0" * bool(save_every) + " --no-keep-best" * keep_best
    remedy = "Free space, or use an --output-dir on a larger disk."
    fewer = next((k for k in range(keep - 1, 0, -1) if needed(k, num_saves) <= free), 0)
    if fewer:
        remedy = f"Free space, use an --output-dir on a larger disk, or keep fewer checkpoints: --keep {fewer}"
    elif keep and seldom and needed(keep, min(num_saves, 1), False) <= free:
        remedy = f"Free space, use an --output-dir on a larger disk, or save at the end only:{seldom}"
    elif more and export_bytes <= free:
        remedy = f"Free space, use an --output-dir on a larger disk, or save no checkpoint: --keep 0{seldom}"
    what = f"needs {size(needed(keep, num_saves))} of disk, {size(free)} are free: {listed}"
    raise DoesNotFit(what, where=str(where), remedy=remedy)


def num_more(existing: int, num_saves: int, keep: int) -> int:
    """Checkpoints that there will be at once beyond those that there are.

    While the last one is written, all that will be kept are there; those that are there now are paid for. The first is
    written before any is removed.
    """
    return max(1, min(existing + num_saves - 1, keep) + 1 - existing) if num_saves and keep else 0


def check_file_limit(directory: Path, export_bytes: int) -> None:
    """Refuse a run whose model has a file that the system will not let it write, before hours of training."""
    limit, file_bytes = (
        file_limit(),
        min(export_bytes, FILE_BYTES),
    )  # an exported model's largest file has that at least
    if limit is not None and limit < file_bytes:
        allowed = size(limit) if limit >= 2**20 else f"{limit:,} bytes"
        what = f"the run writes files of {size(file_bytes)} and more, and a file may have {allowed} here"
        raise DoesNotFit(what, where=str(directory), remedy=FILE_LIMIT)


def _num_bytes(directory: Path) -> int:
    """What removing a directory frees. Behind links nothing is removed."""
    if directory.is_symlink():
        return 0
    return sum(os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(directory) for name in names)


def find_model(run: Path) -> Path:
    """The exported model of a run."""
    check_is_run(run)
    if not (run / "model" / "config.json").exists():
        if is_claimed(run):
            recipe = run_recipe(run)
            saves = recipe.keep and (recipe.save_every or recipe.keep_best)
            remedy = "Wait for its first checkpoint." if saves else "Wait for its end: before that it saves nothing."
            raise CheckpointError("the run is still going on and has saved nothing yet", where=str(run), remedy=remedy)
        remedy = (
            "Go on with `penstock train ... --resume`, or take a checkpoint: "
            f"`penstock export {quote(str(run))} --to DIR`."
        )
        check_links(run / CHECKPOINTS)
        if not find(run / CHECKPOINTS):
            remedy = "It left no checkpoint either: train it again, with --overwrite."
        raise CheckpointError("the run has no exported model: it did not end", where=str(run), remedy=remedy)
    return run / "model"


def run_recipe(run: Path) -> Recipe:
    """The recipe that a run was made with."""
    return with_values(Recipe(), recipe_values(run), where=str(run / RECIPE_FILE))


def recipe_values(run: Path) -> dict[str, Any]:
    """The recipe of a run as it was written, perhaps by another version. One that is damaged is refused."""
    path, newest = run / RECIPE_FILE, find(run / CHECKPOINTS)
    remedy = "No checkpoint has it either: train the run again, with --overwrite."
    if newest:
        remedy = (
            "The command that began the run writes it again, with --resume. "
            f"To export or ask the model, name {newest[0]}, which has its own."
        )
    elif (run / "model").exists():
        remedy = f"To export or ask the model, name {run / 'model'}."
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        what = f"the run's recipe cannot be read: {' '.join(str(error).split())}"
        raise CheckpointError(what, where=str(path), remedy=remedy) from None
    if not (isinstance(values, dict) and {"model", "data"} <= values.keys()):
        what = "the run's recipe is damaged: it does not name model and data"
        raise CheckpointError(what, where=str(path), remedy=remedy)
    return values
