"""What a run needs to go on as if it had never stopped, and whether a checkpoint is of this run at all.

A checkpoint holds weights and state (`store.py` streams them) and three documents: `run` (step, place in the data,
recipe, fingerprints of data and model), `rng` (the generators of every library in use), and `metrics` (every row so
far, so that the files of the run are rebuilt and no step is there twice or not at all). The learning rate is a function
of the step, and the order of the data one of seed and epoch, so neither has more to save.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock.checkpoint.places import CHECKPOINTS, NEWEST, as_noted
from penstock.checkpoint.store import (
    FORMAT,
    Checkpoint,
    check_links,
    find,
    open_checkpoint,
    order_of_load,
    order_of_save,
    prune,
    read_document,
    read_tensors,
    save,
    verify,
)
from penstock.checkpoint.tensors import receive_tensors, send_tensors
from penstock.checkpoint.together import save_together
from penstock.data.loader import Position
from penstock.engine import Engine
from penstock.engine.ranks import ALONE, World
from penstock.errors import CheckpointError, counted
from penstock.recipe.positions import AS_IS
from penstock.recipe.recipe import FIELDS, Recipe, to_dict

FREE = {
    "name", "output_dir", "device", "recompute", "skip_limit", "eval_every", "log_every", "save_every", "keep",
    "keep_best", "patience", "prompt", "trust_remote_code", "mode", "homes", "update", "cpu_adam_cores",
    "weights", "order", "inputs", "tile", "gpu_memory", "track", "project", "tags",
    "offload_ratio", "bucket_size", "param_offload", "nvme_path", "leaf_module", "bind_cores",
}  # fmt: skip
"""Fields that may change when a run goes on."""
BY_CONTENT = {"model", "revision", "tokenizer", "data", "data_split", "eval_data", "eval_split"}
"""Fields that only say where something is: what is there is compared instead."""
FIXED = {"dtype", "init", "shape", "states", "engine"}
"""Fields that decide what tensors there are; no flag makes these fit."""
AS_BEGUN: dict[str, object] = {
    "dtype": "auto", "recompute": "auto", "weights": "auto", "order": "auto", "inputs": "auto", "tile": "auto",
    "max_length": 0, "micro_batch_size": 0,
}  # fmt: skip
"""Fields that are not chosen anew where nobody says anything, and how that is written: compiled layers may round in
another order with another recompute, and another machine may have room for other rows."""
LAYER_BY_LAYER = {"weights", "order", "inputs", "tile"}
"""Fields that several ranks choose otherwise than one: they do not compute their layers one by one."""

Say = Callable[[str], None]
TakesCheckpoint = Callable[[Path], str]
"""The command line that makes something of a checkpoint, for advice."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """What makes a run this run."""

    recipe: Recipe
    total_steps: int
    data: str
    model: str
    before: str
    """What the untrained model answered: after a resume it cannot be asked any more."""
    generation: Mapping[str, Any]
    """The model's generation config, for an export from a checkpoint."""

    @classmethod
    def of(
        cls, recipe: Recipe, total_steps: int, data: str, model_print: str, before: str, model: PreTrainedModel
    ) -> Identity:
        """Of a run that is about to begin or go on."""
        config = model.generation_config
        generation = json.loads(config.to_json_string()) if config is not None else {}
        return cls(recipe, total_steps, data, model_print, before, generation)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that was found and not read yet, apart from what it says of its run."""

    checkpoint: Checkpoint
    position: Position
    recipe: Mapping[str, Any]
    total_steps: int
    data: str
    model: str
    before: str
    generation: Mapping[str, Any]
    ranks: int = 1

    @property
    def step(self) -> int:
        """Steps that were made."""
        return self.checkpoint.step


# --- saving -----------------------------------------------------------------------------------------------------------


def save_run(
    run_dir: Path,
    identity: Identity,
    step: int,
    position: Position,
    engine: Engine,
    metrics: Mapping[str, Any],
    say: Say,
    world: World = ALONE,
) -> None:
    """Save the run as it is after `step`, then remove checkpoints beyond those that are kept. All ranks take part."""
    directory, tensors = run_dir / CHECKPOINTS, engine.saved_tensors()
    documents = _documents(identity, position, metrics, world.size)
    if world.many and not engine.rows_on_ranks:
        checkpoint = save_together(world, directory, step, tensors, documents, say)
    elif world.first:
        checkpoint = save(directory, step, tensors, documents, say)
    else:
        send_tensors(order_of_save(tensors))
    if world.first:
        best = (
            best_step((row["step"], row["eval_loss"]) for row in metrics["evals"]) if identity.recipe.keep_best else 0
        )
        for path in prune(directory, identity.recipe.keep, checkpoint, best):
            say(f"  {path} is still read by another process: what is left of it is removed after a later save")
    world.largest(0)  # or a rank that goes on and ends would end the one that still writes


def best_step(evaluations: Iterable[tuple[int, float | None]]) -> int:
    """The step of the lowest evaluation loss, the first of equals; 0 without one.

    It follows from the rows, which every checkpoint has: so a resumed run keeps, and ends, as one that never stopped.
    """
    finite = [(loss, step) for step, loss in evaluations if loss is not None and math.isfinite(loss)]
    return min(finite)[1] if finite else 0


def _documents(identity: Identity, position: Position, metrics: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    run = {
        **{field.name: getattr(identity, field.name) for field in dataclasses.fields(identity)},
        "recipe": as_noted(identity.recipe),
        "position": dataclasses.asdict(position),
        "ranks": ranks,
    }
    return {"run": run, "rng": rng_state(), "metrics": metrics}


# --- finding ----------------------------------------------------------------------------------------------------------


def find_saved(run_dir: Path, wanted: str, command: TakesCheckpoint | None = None) -> Saved | None:
    """The checkpoint to go on from: the newest of the run, of another run, or the one that is named.

    `command`, of what takes a checkpoint and does not go on from it, stands in the advice if this one is damaged.
    """
    path = run_dir if wanted == NEWEST else Path(wanted)
    check_links(path / CHECKPOINTS)
    if wanted == NEWEST or (path / CHECKPOINTS).is_dir():
        complete = find(path / CHECKPOINTS)
        if not complete and wanted == NEWEST:
            return None
        if not complete:
            raise CheckpointError("has no complete checkpoint", where=str(path), remedy="Leave --resume out.")
        path = complete[0]
    with damage_advice(path, command):
        checkpoint = open_checkpoint(path)
        run = read_document(checkpoint, "run")
        try:
            position = Position(**run.pop("position"))
            return Saved(checkpoint, position, **run)
        except (KeyError, TypeError, AttributeError) as error:
            what, remedy = f"does not describe a run: {error!r}", "It was written by another version of penstock."
            raise CheckpointError(what, where=str(path / "run.json"), remedy=remedy) from None


def goes_on_in(run_dir: Path, resume: str) -> bool:
    """Whether the checkpoint that is asked for is one of this directory's own."""
    wanted, own = _real(resume), _real(run_dir)
    if resume and resume != NEWEST and not wanted.exists():
        open_checkpoint(Path(resume))  # says what is wrong, before anything else is
    parents = (wanted.parent, _real(Path(resume).parent))  # a checkpoint may be a link to another disk
    return resume == NEWEST or wanted == own or _real(run_dir / CHECKPOINTS) in parents


def _real(path: str | Path) -> Path:
    """The path without links. Unlike `resolve`, it leaves those that lead in a circle to whoever opens it."""
    return Path(os.path.realpath(path))


def find_start(run_dir: Path, resume: str, *, overwrite: bool) -> Saved | None:
    """The checkpoint to go on from, if one is asked for. A run that was cut off before its first begins anew."""
    if resume and overwrite and not goes_on_in(run_dir, resume):
        _refuse_to_remove(run_dir, Path(resume))
    saved = find_saved(run_dir, resume) if resume else None
    if resume and not saved and not overwrite and (run_dir / "model").exists():
        remedy = "--overwrite without --resume trains it again."
        raise CheckpointError("the run has ended and left no checkpoint", where=str(run_dir), remedy=remedy)
    return saved


def _refuse_to_remove(run_dir: Path, wanted: Path) -> None:
    """Refuse to go on from what --overwrite would remove before it is read."""
    places = (wanted.resolve(), wanted.parent.resolve())
    if any(place.is_relative_to(run_dir.resolve()) for place in places):
        remedy = f"Move it out of {run_dir}, or use another --output-dir."
        raise CheckpointError("lies in the directory that --overwrite clears", where=str(wanted), remedy=remedy)


def verify_saved(saved: Saved, say: Say, command: TakesCheckpoint | None = None) -> None:
    """Every byte, before anything is taken from the checkpoint."""
    with damage_advice(saved.checkpoint.path, command):
        verify(saved.checkpoint, say)


@contextmanager
def damage_advice(path: Path, command: TakesCheckpoint | None) -> Iterator[None]:
    """Damage in the checkpoint at `path`, with the newest one that is whole: to go on from, or for another command.

    A run goes on from an older one only. Going back by itself was rejected: whoever lost an hour of training should
    hear of it.
    """
    try:
        yield
    except CheckpointError as error:
        others = find(path.parent)
        if not command:
            others = others[others.index(path) + 1 :] if path in others else []
        whole = next((other for other in others if other != path and is_whole(other)), None)
        if command:
            remedy = f"Another one is whole: `{command(whole)}`" if whole else "No other checkpoint beside it is whole."
        else:
            remedy = (
                f"An older checkpoint is whole: --resume {shlex.quote(str(whole))}"
                if whole
                else "There is no older checkpoint to take."
            )
        raise CheckpointError(error.what, where=error.where, remedy=f"{error.remedy} {remedy}".strip()) from None


def is_whole(path: Path) -> bool:
    """Whether every byte of a checkpoint is as it was written."""
    try:
        verify(open_checkpoint(path), lambda _: None)
    except CheckpointError:
        return False
    return True


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that is not as it was when the checkpoint was saved."""

    field: str
    then: object
    now: object

    def __str__(self) -> str:
        return f"{self.field} was {self.then!r}, is {self.now!r}"


def as_begun(recipe: Recipe, saved: Saved | None, num_ranks: int = 1) -> Recipe:
    """A resumed run goes on with what `auto` was when it began, as another machine may choose otherwise.

    Where it goes layer by layer as it did not, or no longer does, because the command says so, what belongs to that is
    chosen anew; and where it had several ranks or has them now.
    """
    earlier = {"tile": "none"} if recipe.engine == "penstock" else {}  # of a version that had no tiles
    recipe_then = earlier | dict(saved.recipe) if saved else {}
    begun = {name: value for name, value in recipe_then.items() if name in AS_BEGUN}
    free = {name: value for name, value in begun.items() if getattr(recipe, name) == AS_BEGUN[name]}
    if recipe.mode == "zerooffload":
        free.pop("weights", None)  # which it keeps on the GPU
    weights, order = (free.get(name, getattr(recipe, name)) for name in ("weights", "order"))
    by_layer = weights not in ("auto", "resident") or order == "layers"
    if by_layer and free.get("recompute") != "full":
        free.pop("recompute", None)
    several = num_ranks > 1 or (saved is not None and saved.ranks > 1)
    left_out = LAYER_BY_LAYER if several else set() if by_layer else {"inputs", "tile"}
    return dataclasses.replace(recipe, **{name: value for name, value in free.items() if name not in left_out})


def was_compiled(saved: Saved | None) -> bool:
    """Whether a run that goes on had compiled layers: small models have none any more, unless they began so."""
    return bool(saved and saved.recipe.get("compile"))


def check_same_run(saved: Saved, recipe: Recipe, total_steps: int, data: str, *, anyway: bool) -> None:
    """Refuse a checkpoint whose run had another recipe or other data, as far as that changes what is trained."""
    now, default = to_dict(recipe), to_dict(Recipe())
    compared = [name for name in FIELDS if name not in FREE | BY_CONTENT]
    pairs = [(name, saved.recipe.get(name, default[name]), now[name]) for name in compared]
    pairs += [("number of steps", saved.total_steps, total_steps), ("content of the data", saved.data[:12], data[:12])]
    alike = ((None, AS_IS), (AS_IS, None))  # positions as they are, said or not
    differs = [Difference(*pair) for pair in pairs if pair[1] != pair[2] and pair[1:] not in alike]
    _refuse(saved, differs, anyway=anyway)
    if total_steps < saved.step:
        what = f"has made {counted(saved.step, 'step')}, more than the {total_steps:,} that the run would have"
        raise CheckpointError(what, where=str(saved.checkpoint.path), remedy="Raise --max-steps or --epochs.")


def check_same_model(saved: Saved, model: str, *, anyway: bool) -> None:
    """Refuse a checkpoint that was trained from another model."""
    differs = [Difference("content of the model", saved.model, model)] if saved.model != model else []
    _refuse(saved, differs, anyway=anyway)


def _refuse(saved: Saved, differences: list[Difference], *, anyway: bool) -> None:
    fixed = [difference.field for difference in differences if difference.field in FIXED]
    if not differences or (anyway and not fixed):
        return
    remedy = "Set it as it was, or add --resume-anyway to go on with what is new."
    if fixed:
        remedy = f"The saved tensors do not fit another {', '.join(fixed)}: set it as it was, or begin a new run."
    listed = "".join(f"\n    {difference}" for difference in differences)
    raise CheckpointError(f"is a checkpoint of another run:{listed}", where=str(saved.checkpoint.path), remedy=remedy)


# --- restoring --------------------------------------------------------------------------------------------------------


def restore(saved: Saved, engine: Engine, say: Say, world: World = ALONE) -> None:
    """Weights, state and generators as they were when the checkpoint was saved. All ranks take part."""
    if saved.checkpoint.format < FORMAT:
        say("this checkpoint is of an earlier version: from here on weight decay is rounded once, with the step")
    for group, tensors in engine.saved_tensors().items():
        if not engine.rows_on_ranks:
            if tensors:
                _check_group(saved, group)
            read_tensors(saved.checkpoint, group, tensors, say)
            continue
        order = world.share(partial(order_of_load, saved.checkpoint, group, tensors))
        if world.first:
            read_tensors(saved.checkpoint, group, tensors, say, world.size)
        else:
            named = {tensor.name: tensor for tensor in tensors}
            receive_tensors([named[name] for name in order])
    engine.restored()
    set_rng_state(world.share(lambda: read_document(saved.checkpoint, "rng")))


def _check_group(saved: Saved, group: str) -> None:
    """Refuse a checkpoint whose ranks were others, where each had tensors of its own."""
    if not any(file.startswith(f"{group}-") for file in saved.checkpoint.files):
        what = f"has no {group}: it was saved by another number of ranks"
        remedy = "Resume a run of --engine deepspeed with as many ranks as it had."
        raise CheckpointError(what, where=str(saved.checkpoint.path), remedy=remedy)


def saved_metrics(saved: Saved) -> Any:
    """The rows up to the checkpoint's step."""
    return read_document(saved.checkpoint, "metrics")


def rng_state() -> dict[str, Any]:
    """The generators of Python, numpy, torch and every GPU, as JSON."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # or none is in use
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in devices],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put every generator back. Those of GPUs that are not there any more are left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_bytes(state["torch"]))
    devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    for device, saved in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(_bytes(saved), device)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
