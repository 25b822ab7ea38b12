"""What is known of a run before its weights are loaded: settings, data, number of steps, and what the plan chooses.

Everything that can be wrong without a weight is found here, so that `--dry-run` makes the checks of a run and not a
copy of them, and a mistake costs seconds instead of the time of a load.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, replace

import numpy as np
import torch
import yaml
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from penstock.bench.this_machine import this_machine, unmeasured_machine
from penstock.checkpoint.resume import (
    Saved,
    as_begun,
    check_same_run,
    find_start,
    goes_on_in,
    verify_saved,
    was_compiled,
)
from penstock.checkpoint.run_dir import check_room, check_run_dir
from penstock.data.loader import Dataset, Position, prepare
from penstock.engine.deepspeed_config import settled
from penstock.engine.deepspeed_start import can_save, check_deepspeed
from penstock.engine.ranks import ALONE, World
from penstock.engine.weights import num_streamed
from penstock.errors import DataError, RecipeError, UserError, counted
from penstock.machine.gpu_memory import limit_gpu
from penstock.machine.hardware import COMPILED_FROM, describe, make_repeatable, pick_compile, pick_device, pick_dtype
from penstock.machine.known import Machine
from penstock.machine.launch import check_batch
from penstock.machine.launched import say_here
from penstock.model.attention import check_package
from penstock.model.flops import token_flops
from penstock.model.load import load_config, load_tokenizer
from penstock.model.load_rows import build_on_meta
from penstock.model.matmul import check_matmul
from penstock.model.rope import check_positions
from penstock.plan.layout import FORMATS
from penstock.plan.predict import Plan
from penstock.plan.report import check_one_gpu, make_plan, short, with_recompute
from penstock.recipe.recipe import Recipe, check_inputs, recompute_by_layer, to_dict
from penstock.report.console import Console
from penstock.report.trackers import check_installed
from penstock.run.row_length import with_length
from penstock.run.unused import unused


@dataclass(frozen=True)
class Run:
    """What is known before the weights are loaded."""

    recipe: Recipe
    device: torch.device
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: Dataset
    total_steps: int
    num_params: int


@dataclass(frozen=True)
class Start:
    """A run with what the plan chose for it, and the checkpoint that it goes on from, if any."""

    run: Run
    plan: Plan | None
    saved: Saved | None

    @property
    def first_step(self) -> int:
        """The next step; they count from 1."""
        return self.saved.step + 1 if self.saved else 1

    @property
    def position(self) -> Position:
        """Where the next step begins. If the data was changed by force, its place may be beyond their end."""
        position = self.saved.position if self.saved else Position()
        in_data = position.row < self.run.data.train.num_rows
        return position if in_data else Position(position.epoch + 1, 0)


def recipe_of_all(recipe: Recipe, world: World) -> Recipe:
    """The first machine's, which all ranks follow. What another one was told besides is said there."""
    first = world.share(lambda: recipe)
    of_first = to_dict(first)
    others = [
        f"{name} = {value} (there {of_first[name]})"
        for name, value in to_dict(recipe).items()
        if value != of_first[name]
    ]
    if others and world.local_rank == 0:
        say_here(f"WARNING: the first machine's settings hold, not what was set here: {', '.join(others)}")
    return first


def prepare_run(
    recipe: Recipe,
    console: Console,
    world: World = ALONE,
    *,
    resume: bool = False,
    begun_compiled: bool = False,
    num_ranks: int = 0,
    ranks_here: int = 0,
) -> Run:
    """Everything that can be wrong without loading a weight is found here.

    `num_ranks`: if they are not there yet, and `ranks_here` of them on each machine.
    """
    num_ranks = num_ranks or world.size
    if not recipe.data:
        remedy = "Name a file, a directory, or a data set of the Hub, such as --data my.jsonl."
        raise RecipeError("no data is named", where="--data", remedy=remedy)
    device = world.pick(pick_device(recipe.device))
    check_one_gpu(recipe, num_ranks)
    recipe = settle(recipe, console)
    for line in unused(recipe):
        console.say(f"WARNING: {line}")
    if warning := check_deepspeed(recipe, device, world, resume=resume):
        console.say(f"WARNING: {warning}")
    recipe = replace(recipe, keep=recipe.keep if can_save(recipe) else 0)
    recipe = replace(recipe, dtype=pick_dtype(recipe.dtype, device))
    make_repeatable(recipe)
    with world.in_turn():  # a model's own code is copied into a cache, which another rank must not read meanwhile
        config, tokenizer = load_config(recipe), load_tokenizer(recipe)
        check_matmul(recipe, config, device)
        model = build_on_meta(recipe, config, torch.bfloat16, lambda model: model.tie_weights())
    num_params = sum(p.numel() for p in model.parameters())
    # A run that was begun compiled goes on so, whatever its size.
    recipe = replace(recipe, compile=pick_compile(recipe, device, COMPILED_FROM if begun_compiled else num_params))
    if layers := getattr(config.get_text_config(), "num_hidden_layers", 0):
        recompute_by_layer(recipe.recompute, layers)  # says so if there are not so many, and so does the next
        num_streamed(recipe, layers)
        check_inputs(recipe, layers)
    machine = with_least(unmeasured_machine(device), device, world)
    machine = replace(machine, gpus_per_host=world.local_size if world.many else ranks_here or num_ranks)
    recipe = world.share(lambda: with_length(recipe, config, tokenizer, machine, num_ranks, console.say))
    with console.phase(f"Reading {recipe.data}"), world.in_turn():
        data = prepare(recipe, tokenizer, config.get_text_config().vocab_size, console.say, token_flops(model))
    parts = [data.train, *([data.evaluation] if data.evaluation else [])]
    check_positions(recipe, config, max(int(part.store.lengths.max()) for part in parts))
    steps = math.ceil(recipe.epochs * data.train.steps_per_epoch())
    total_steps = min(steps, recipe.max_steps) if recipe.max_steps else steps
    if total_steps < recipe.max_steps:
        epochs = f"{recipe.epochs:g} {'epoch has' if recipe.epochs == 1 else 'epochs have'}"
        console.say(
            f"  {epochs} {counted(steps, 'step')}, fewer than --max-steps {recipe.max_steps}; --epochs adds more"
        )
    check_same_data(recipe, data.fingerprint, total_steps, world)
    recipe = replace(recipe, data_format=data.data_format or "auto")  # so that `generate` asks as the rows did
    return Run(recipe, device, config, tokenizer, data, total_steps, num_params)


def with_least(machine: Machine, device: torch.device, world: World) -> Machine:
    """The machine with the memory of the smallest GPU and the fullest host: what is chosen for all must fit all."""
    if not world.many:
        return machine
    own = unmeasured_machine(device)
    gpus, hosts = zip(*world.gather((own.gpu_bytes, own.host_bytes)), strict=True)
    return replace(machine, gpu_bytes=min(gpus), host_bytes=min(machine.host_bytes, *hosts))


def check_same_data(recipe: Recipe, fingerprint: str, total_steps: int, world: World) -> None:
    """Refuse, on all ranks, a machine that has read something else: every machine reads its own copy of the data."""
    first, *of_first = world.share(lambda: (platform.node(), fingerprint, total_steps))
    differing = world.largest(world.rank if of_first != [fingerprint, total_steps] else -1)
    if differing >= 0:
        raise DataError(
            f"rank {differing} has read other data than rank 0 on {first}",
            where=recipe.data,
            remedy="Every machine reads its own copy: give them the same files, under the same path.",
        )


def settle(recipe: Recipe, console: Console) -> Recipe:
    """The recipe with what a JSON of one's own decides for DeepSpeed, and a line that says so."""
    decided, before = settled(recipe), to_dict(recipe)
    changes = [f"{name} = {value}" for name, value in to_dict(decided).items() if value != before[name]]
    if changes:
        console.say(f"{recipe.deepspeed_config} decides: {', '.join(changes)}")
    return decided


def check_disk(run: Run, first_step: int, checkpoint_bytes: int, weight_bytes: int) -> None:
    """Refuse a run that will write more than the disk has room for."""
    recipe, steps = run.recipe, max(0, run.total_steps - first_step + 1)
    saves = steps // recipe.save_every if recipe.save_every else 0
    saves += steps // recipe.eval_every if recipe.keep_best else 0
    check_room(
        recipe.run_dir,
        checkpoint_bytes=checkpoint_bytes,
        num_saves=saves + 1 if steps else 0,
        keep=recipe.keep,
        save_every=recipe.save_every,
        keep_best=recipe.keep_best,
        export_bytes=weight_bytes,
        keep_checkpoints=first_step > 1,  # of a run that begins, those that are there will be replaced
    )


def foresee_disk(run: Run, first_step: int) -> None:
    """The same before a weight is loaded, which may take long. What DeepSpeed writes is known only once it is there."""
    if run.recipe.engine == "deepspeed":
        return
    dtype = torch.bfloat16 if run.recipe.dtype == "bf16" else torch.float32
    model = build_on_meta(run.recipe, run.config, dtype, lambda model: model.tie_weights())
    weights = sum(p.nbytes for p in model.parameters())
    state = sum(FORMATS[run.recipe.states].num_bytes(p.numel(), dtype.itemsize) for p in model.parameters())
    check_disk(run, first_step, weights + state, weights)


def planned(run: Run, console: Console, world: World) -> tuple[Run, Plan | None]:
    """The run with what the plan chooses for it, said in advance. No plan of a model whose numbers it does not know.

    If layers are computed one by one, its recipe has a word for weights, order and inputs too.

    Of a CPU, and of a model that is small beside any GPU, the memory is planned and nothing is measured: there is
    nothing to place, and no time is predicted.
    """
    if run.recipe.engine == "deepspeed":  # as the reference does it
        word = "full" if run.recipe.recompute == "auto" else run.recipe.recompute
        return replace(run, recipe=replace(run.recipe, recompute=word)), None
    measured = run.device.type == "cuda" and run.num_params >= COMPILED_FROM
    machine = world.share(
        lambda: this_machine(remeasure=False, say=console.say) if measured else unmeasured_machine(run.device)
    )
    machine = replace(with_least(machine, run.device, world), gpus_per_host=world.local_size)
    run = replace(run, recipe=with_recompute(run.recipe, machine, world.size))
    if world.many:  # the exchange between ranks is not measured
        return run, None
    try:
        recipe = as_long_as_its_rows(run)
        plan = make_plan(recipe, machine, attended=attended_by(run, recipe.max_length))
    except UserError:
        return run, None
    console.say(short(plan) if plan.fits else "planned: does not fit; `penstock plan` says what would. Trying anyway.")
    return run, plan


def as_long_as_its_rows(run: Run) -> Recipe:
    """For the plan: layers that are not compiled compute no padding, and few or short examples fill no whole step."""
    if run.recipe.compile:
        return run.recipe
    rows = run.data.train
    return replace(
        run.recipe,
        batch_size=min(run.recipe.batch_size, rows.num_rows),
        max_length=min(run.recipe.max_length, -(-rows.num_tokens // rows.num_rows)),
    )


def attended_by(run: Run, length: int) -> float:
    """For the plan, whose rows have so many tokens: those that one attends to on average.

    0 if every example fills its row. Of layers that are compiled the padding of a row attends to itself.
    """
    rows = run.data.train
    examples = rows.store.lengths[rows.packing.examples].astype(np.float64)
    if examples.min() == run.recipe.max_length:
        return 0.0
    pairs, tokens = np.square(examples).sum(), examples.sum()
    if run.recipe.compile:
        padding = length - rows.packing.row_lengths(rows.store.lengths)
        pairs, tokens = pairs + np.square(padding.astype(np.float64)).sum(), length * rows.num_rows
    return float(pairs / 2 / tokens)


@dataclass(frozen=True)
class Outlook:
    """What a run would do."""

    steps: int
    examples: int
    rows: int
    tokens: int
    trained_tokens: int
    unused: tuple[str, ...]
    """Columns and keys of messages that are not used."""
    device: str
    run_dir: str
    ranks: int = 1
    rows_of_rank: int = 0
    """Rows of a step that one rank takes, at most."""


ALWAYS_SAID = {"name", "model", "data", "mode", "max_length", "batch_size", "epochs", "lr"}


def say_settings(recipe: Recipe, console: Console) -> None:
    """What someone chose, and what everyone asks for first. All of it would hide the line that counts."""
    values, default = to_dict(recipe), to_dict(Recipe())
    said = {name: value for name, value in values.items() if name in ALWAYS_SAID or value != default[name]}
    text = yaml.safe_dump(said, sort_keys=False, allow_unicode=True).rstrip().replace("\n", "\n  ")
    console.say(f"Settings (all others are defaults; --json prints them too):\n  {text}")


def dry_run(
    recipe: Recipe,
    console: Console,
    *,
    overwrite: bool = False,
    resume: str = "",
    resume_anyway: bool = False,
    num_ranks: int = 1,
    ranks_here: int = 0,
) -> Outlook:
    """The resolved recipe and what it would do; every check of `train` that needs no weights is made."""
    check_batch(recipe.batch_size, num_ranks)
    check_installed(recipe)
    check_package(recipe.attention)
    ranks = World(size=num_ranks, local_size=ranks_here or num_ranks)  # as the first of them will find itself
    device = ranks.pick(pick_device(recipe.device))
    limit_gpu(device, recipe.gpu_memory)
    check_run_dir(recipe.run_dir, overwrite=overwrite, own=goes_on_in(recipe.run_dir, resume))
    saved = find_start(recipe.run_dir, resume, overwrite=overwrite)
    begun, compiled = as_begun(recipe, saved, num_ranks), was_compiled(saved)
    run = prepare_run(
        begun, console, resume=bool(resume), begun_compiled=compiled, num_ranks=num_ranks, ranks_here=ranks_here
    )
    if saved:
        check_same_run(saved, run.recipe, run.total_steps, run.data.fingerprint, anyway=resume_anyway)
        verify_saved(saved, console.say)
        console.say(f"Would go on after step {saved.step:,}, from {saved.checkpoint.path}.")
    foresee_disk(run, saved.step + 1 if saved else 1)
    if num_ranks == 1:  # with several the run says nothing of a plan either
        planned(run, console, ALONE)
    say_settings(replace(recipe, max_length=run.recipe.max_length), console)
    train_set = run.data.train
    outlook = Outlook(
        steps=run.total_steps,
        examples=train_set.num_examples,
        rows=train_set.num_rows,
        tokens=train_set.num_tokens,
        trained_tokens=train_set.num_trained,
        unused=tuple(train_set.store.counts.unused),
        device=f"{ranks.times}{describe(run.device)}",
        run_dir=str(recipe.run_dir),
        ranks=num_ranks,
        rows_of_rank=-(-recipe.batch_size // num_ranks),
    )
    console.say(
        f"Would train {recipe.model} ({recipe.init} weights) on {outlook.device} for "
        f"{counted(outlook.steps, 'step')} of {counted(recipe.batch_size, 'row')}: "
        f"{counted(outlook.examples, 'example')} in {counted(outlook.rows, 'row')} an epoch, "
        f"{outlook.tokens:,} tokens, {outlook.trained_tokens:,} of them trained on; "
        f"would write {outlook.run_dir}/ and the model to {outlook.run_dir}/model. Nothing was written."
    )
    if ranks.many:
        console.say(in_ranks(run.recipe, ranks))
    return outlook


def in_ranks(recipe: Recipe, ranks: World) -> str:
    """What each of several ranks would do."""
    share = -(-recipe.batch_size // ranks.size)
    most = "" if share * ranks.size == recipe.batch_size else "up to "
    machines = f", {ranks.local_size:,} on each machine" if ranks.local_size < ranks.size else ""
    return (
        f"{ranks.size:,} ranks{machines}: each takes {most}{share:,} of the {recipe.batch_size:,} rows of a step, "
        f"{recipe.rows_on(ranks.size):,} at once, and holds 1/{ranks.size} of weights and optimizer state."
    )
