"""What a directory is that someone names: a run, a checkpoint of one, or a model as Hugging Face has it.

Told by the files that each has, without torch, so that a misspelt name is refused at once.
"""

from __future__ import annotations

import difflib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.checkpoint.lock import is_claimed
from penstock.errors import OutputError, RecipeError
from penstock.recipe.recipe import Recipe, to_dict

RECIPE_FILE, CHECKPOINTS, MANIFEST = "recipe.yaml", "checkpoints", "manifest.json"
NEWEST = "newest"
"""What `--resume` without a path asks for."""
KINDS = "a run such as runs/demo, a checkpoint such as runs/demo/checkpoints/step-00000088, or a Hugging Face directory"


@dataclass(frozen=True)
class Place:
    """A directory that holds a model, in one way or another."""

    path: Path
    kind: Literal["run", "checkpoint", "model"]


def find_place(path: Path) -> Place:
    """What `path` is. What is none of them is refused."""
    check_is_there(path)
    if (path / RECIPE_FILE).exists():
        return Place(path, "run")
    if (path / MANIFEST).exists():
        return Place(path, "checkpoint")
    if (path / "config.json").exists():
        return Place(path, "model")
    what = "is neither a run, nor a checkpoint, nor a model"
    raise RecipeError(what, where=str(path), remedy=f"Name {KINDS}.")


def check_is_run(run: Path) -> None:
    """Refuse what is not the directory of a run."""
    check_is_there(run)
    if not (run / RECIPE_FILE).exists():
        remedy = "Name the directory that `penstock train` printed as run, such as runs/demo."
        raise RecipeError("is not the directory of a run", where=str(run), remedy=remedy)


def resume_advice(run: Path, resumed: str = "") -> str:
    """How a run that died goes on, or that it begins again: whether it has saved anything is seen on the disk.

    `resumed`: what it went on from, which may be another run's.
    """
    named, saved = resumed not in ("", NEWEST), any((run / CHECKPOINTS).glob(f"step-*/{MANIFEST}"))
    if saved and named:
        return f"The same command goes on with --resume alone; {resumed} would take it back there."
    if saved:
        return "The same command with --resume goes on from the newest checkpoint."
    if named:
        return f"There is no checkpoint in {run} yet: the same command with --overwrite goes on from {resumed} again."
    return f"There is no checkpoint in {run} yet: the same command with --resume begins again."


def check_is_there(path: Path) -> None:
    """Refuse what does not exist, with what is near it in name, and what is a file."""
    if path.is_dir():
        return
    if path.exists():
        raise RecipeError("is a file, not a directory", where=str(path), remedy=f"Name {KINDS}.")
    beside = sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    remedy = f"Did you mean {path.parent / near[0]}?" if near else f"Name {KINDS}."
    raise RecipeError("there is no such directory", where=str(path), remedy=remedy)


def deepspeed_form(path: Path) -> str:
    """Which of DeepSpeed's three forms of a checkpoint a directory has: zero, universal, consolidated; or none."""
    step = deepspeed_step(path)
    if any(step.glob("*_optim_states.pt")):
        return "zero"
    if any(step.glob("zero/*/fp32.pt")):
        return "universal"
    files = [*path.glob("pytorch_model*.bin"), *path.glob("model*.safetensors")]
    return "consolidated" if files and not (path / "config.json").exists() else ""


def deepspeed_step(path: Path) -> Path:
    """The directory of one step of DeepSpeed's: what the file `latest` names, or the path itself."""
    latest = path / "latest"
    if not latest.is_file():
        return path
    tag = path / latest.read_text(encoding="utf-8").strip()
    return tag if tag.resolve().is_relative_to(path.resolve()) else path  # a name may not lead elsewhere


def as_noted(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a run keeps it: a model on a disk is found from another directory too."""
    named = {"model": recipe.model, "tokenizer": recipe.tokenizer}
    paths = {field: Path(name).expanduser() for field, name in named.items() if name and name != "demo"}
    return {**to_dict(recipe), **{field: str(path.absolute()) for field, path in paths.items() if path.exists()}}


def check_path(directory: Path, flag: str) -> None:
    """Refuse a place for output, named by `flag`, behind a link that leads nowhere, or with too long a name."""
    for path in (*reversed(directory.parents), directory):
        try:
            path.stat()
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                what, remedy = f"can be no directory ({error.strerror})", f"Name another place with {flag}."
                raise OutputError(what, where=str(path), remedy=remedy) from None
            if path.is_symlink():
                what = f"is a link to {os.readlink(path)}, which is not there"
                remedy = f"See that its disk is mounted, or name another place with {flag}."
                raise OutputError(what, where=str(path), remedy=remedy) from None


def check_free(directory: Path) -> None:
    """Refuse a place for a model where something is, or where nothing can be."""
    check_path(directory, "--to")
    if directory.exists():
        remedy = "Name a directory that does not exist yet, or remove this one."
        raise OutputError("there is something already", where=str(directory), remedy=remedy)


def check_target(directory: Path) -> None:
    """Refuse what `export --to` names where a model cannot be, or where a run that is going on will write its own."""
    check_free(directory)
    if directory.name in ("model", "model.unchecked") and is_claimed(directory.parent):
        what, remedy = "a run that is going on will write its model there", "Name another place with --to."
        raise OutputError(what, where=str(directory), remedy=remedy)
