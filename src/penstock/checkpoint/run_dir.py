"""The directory of a run: checked before anything slow, made only when the run is sure to start."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import yaml

from penstock.errors import CheckpointError, OutputError
from penstock.recipe import Recipe, to_dict, with_values

RECIPE_FILE = "recipe.yaml"
RUN_FILES = {RECIPE_FILE, "metrics.jsonl", "eval.jsonl", "model", "model.unchecked"}
"""All that a run writes. Nothing else is ever removed, and a directory with anything else is not ours."""


def check_run_dir(directory: Path, *, overwrite: bool) -> None:
    """Refuse a directory that cannot be written, or that holds something we must not write over."""
    if directory.exists() and not directory.is_dir():
        raise OutputError("is a file, not a directory", where=str(directory), remedy="Use another --output-dir.")
    if directory.is_dir() and any(directory.iterdir()):
        if any(path.name not in RUN_FILES for path in directory.iterdir()):
            raise OutputError("holds files of something else", where=str(directory), remedy="Use another --output-dir.")
        if not overwrite:
            remedy = f"Use --output-dir {directory}-2, or --overwrite to replace it."
            raise OutputError("holds a run already", where=str(directory), remedy=remedy)
    existing = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    try:
        # Only a real attempt tells: permission bits say nothing of read-only mounts, or to root.
        os.rmdir(tempfile.mkdtemp(prefix=".penstock-", dir=existing))
    except OSError as error:
        remedy = "Use an --output-dir that you can write to."
        raise OutputError(f"cannot be written ({error.strerror})", where=str(directory), remedy=remedy) from None


def make_run_dir(recipe: Recipe) -> Path:
    """The checked directory, holding the recipe and nothing else."""
    directory = recipe.run_dir
    directory.mkdir(parents=True, exist_ok=True)
    for old in (directory / name for name in RUN_FILES):  # the directory itself stays: it may be a link or a mount
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)
    text = yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True)
    (directory / RECIPE_FILE).write_text(text, encoding="utf-8")
    return directory


def find_model(run: Path) -> Path:
    """The exported model of a run."""
    if not (run / RECIPE_FILE).exists():
        remedy = "Name the directory that `penstock train` printed as run, such as runs/demo."
        raise CheckpointError("is not the directory of a run", where=str(run), remedy=remedy)
    if not (run / "model" / "config.json").exists():
        raise CheckpointError("the run has no exported model: it did not end", where=str(run), remedy="Train it again.")
    return run / "model"


def run_recipe(run: Path) -> Recipe:
    """The recipe that a run was made with."""
    path = run / RECIPE_FILE
    return with_values(Recipe(), yaml.safe_load(path.read_text(encoding="utf-8")), where=str(path))
