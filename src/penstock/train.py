"""One run, top to bottom: claim the directory, read the data, load the model, go on or begin, train, save, export."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from penstock.checkpoint.export import export
from penstock.checkpoint.lock import claim
from penstock.checkpoint.resume import (
    Identity,
    Saved,
    check_same_model,
    check_same_run,
    disk_advice,
    find_start,
    goes_on_in,
    model_fingerprint,
    restore,
    save_run,
    saved_metrics,
    verify_saved,
)
from penstock.checkpoint.run_dir import CHECKPOINTS, check_room, check_run_dir, make_run_dir
from penstock.data.loader import Dataset, Position, prepare
from penstock.engine import Engine
from penstock.engine.deepspeed import DeepSpeedEngine
from penstock.engine.deepspeed_start import can_save, check_deepspeed, load_device
from penstock.engine.native import NativeEngine
from penstock.engine.ranks import find_world
from penstock.errors import Diverged, DoesNotFit, Interrupted
from penstock.generate import answer
from penstock.hardware import describe, pick_device, pick_dtype
from penstock.model.load import load_config, load_model, load_tokenizer
from penstock.recipe import Recipe, to_dict
from penstock.report.console import Console
from penstock.report.metrics import Answer, Metrics, StepFacts, StepRow, Summary


def train(
    recipe: Recipe, console: Console, *, overwrite: bool = False, resume: str = "", resume_anyway: bool = False
) -> Summary:
    """Run the recipe and return what `penstock train` prints. `resume`: nothing, `newest`, or a path."""
    run_dir, own = recipe.run_dir, goes_on_in(recipe.run_dir, resume)
    first = find_world().first
    if first:
        check_run_dir(run_dir, overwrite=overwrite or own)
    with claim(run_dir) if first else nullcontext():
        saved = find_start(run_dir, resume, overwrite=overwrite)
        run = prepare_run(recipe, console, resume=bool(resume))
        recipe = run.recipe
        if saved:
            check_same_run(saved, recipe, run.total_steps, run.data.fingerprint, anyway=resume_anyway)
            with console.phase(f"Checking {saved.checkpoint.path}"):
                verify_saved(saved, console.say)
        elif resume:
            console.say(f"There is no checkpoint in {run_dir} yet: beginning with step 1")
        with console.phase(f"Loading {recipe.model}"), memory_advice(recipe):
            model = load_model(recipe, run.config, load_device(recipe, run.device), console.say)
            stop_at(model, end_tokens(run))
            fingerprint = model_fingerprint(model, values=recipe.init == "pretrained")
            if saved:
                check_same_model(saved, fingerprint, anyway=resume_anyway)
            num_params = sum(p.numel() for p in model.parameters())
            console.say(f"  {num_params / 1e6:,.1f} M parameters on {describe(run.device)}")
            before = answer_before(model, run, saved) if first else ""  # the engine may cut the weights among ranks
            kind = DeepSpeedEngine if recipe.engine == "deepspeed" else NativeEngine
            engine: Engine = kind(model, recipe, lambda text: console.say(f"  {text}"))
        first_step = saved.step + 1 if saved else 1
        check_disk(run, engine, first_step)

        if first:
            make_run_dir(recipe, keep_checkpoints=saved is not None and own)
        progress = Progress(recipe, run.total_steps, console)
        metrics = Metrics(run_dir, on_row=progress.row, write=first)
        if saved:
            with console.phase(f"Taking up the run after step {saved.step:,}"):
                metrics.restore(saved_metrics(saved))
                progress.catch_up(metrics.rows)
                restore(saved, engine, console.say)
        identity = Identity.of(recipe, run.total_steps, run.data.fingerprint, fingerprint, before, model)

        def save(step: int, position: Position) -> None:
            with console.phase(f"Saving step {step:,}"):
                save_run(run_dir, identity, step, position, engine, metrics.saved(), console.say)

        model_dir = run_dir / "model"
        with signals() as stop:
            with console.phase(f"Training {run.total_steps:,} steps"), memory_advice(recipe), disk_advice(run_dir):
                run_steps(run, engine, metrics, stop, save, first_step, place_in(run.data, saved))
            engine.release()
            cut_off = metrics.rows[-1].step < run.total_steps
            if first and (not cut_off or not recipe.keep):
                with console.phase(f"Exporting to {model_dir}"):
                    export(model, run.tokenizer, model_dir, trust_remote_code=recipe.trust_remote_code)
        if cut_off:
            raise interrupted(recipe, stop, metrics.rows[-1].step, run.total_steps)
        after = answer(model, run.tokenizer, recipe, recipe.prompt) if recipe.prompt and first else ""
        dialogue = Answer(recipe.prompt, before, after) if recipe.prompt else None
        return summarize(metrics, model_dir, run_dir, dialogue)


def check_disk(run: Run, engine: Engine, first_step: int) -> None:
    """Before the first step, see that there is room for all that the run will write."""
    sizes = {group: sum(t.num_bytes for t in tensors) for group, tensors in engine.saved_tensors().items()}
    world = find_world()
    checkpoint_bytes = int(world.total(torch.tensor(sum(sizes.values()))))
    if not world.first:
        return
    steps, every = max(0, run.total_steps - first_step + 1), run.recipe.save_every
    check_room(
        run.recipe.run_dir,
        checkpoint_bytes=checkpoint_bytes,
        num_saves=(steps // every if every else 0) + 1 if steps else 0,
        keep=run.recipe.keep,
        export_bytes=sizes["weights"],
    )


def answer_before(model: PreTrainedModel, run: Run, saved: Saved | None) -> str:
    """What the model says before training; after a resume, what it said then."""
    prompt = run.recipe.prompt
    if saved:
        return saved.before if saved.recipe.get("prompt") == prompt else ""
    return answer(model, run.tokenizer, run.recipe, prompt) if prompt else ""


def place_in(data: Dataset, saved: Saved | None) -> Position:
    """Where the next step begins. If the data was changed by force, its place may be beyond their end."""
    position = saved.position if saved else Position()
    return position if position.row < data.train.num_rows else Position(position.epoch + 1, 0)


def interrupted(recipe: Recipe, stop: Stop, step: int, total_steps: int) -> Interrupted:
    """The run ended early, and where its state is now."""
    name, run_dir = signal.Signals(stop.number).name, recipe.run_dir
    if recipe.keep:
        kept, remedy = f"saved in {run_dir / CHECKPOINTS}", "The same command with --resume goes on."
    else:
        kept, remedy = f"the model as it was then is in {run_dir / 'model'}", "With --keep 0 it cannot go on."
    what = f"stopped by {name} after step {step} of {total_steps}; {kept}"
    return Interrupted(what, signal_number=stop.number, remedy=remedy)


@dataclass(frozen=True)
class Run:
    """What is known before the weights are loaded."""

    recipe: Recipe
    device: torch.device
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: Dataset
    total_steps: int


def prepare_run(recipe: Recipe, console: Console, *, resume: bool = False) -> Run:
    """Everything that can be wrong without loading a weight is found here."""
    device = pick_device(recipe.device)
    if warning := check_deepspeed(recipe, device, resume=resume):
        console.say(f"WARNING: {warning}")
    recipe = replace(recipe, keep=recipe.keep if can_save(recipe) else 0)
    recipe = replace(recipe, dtype=pick_dtype(recipe.dtype, device))
    make_repeatable(recipe)
    config, tokenizer = load_config(recipe), load_tokenizer(recipe)
    with console.phase(f"Reading {recipe.data}"):
        data = prepare(recipe, tokenizer, config.get_text_config().vocab_size, console.say)
    steps = math.ceil(recipe.epochs * data.train.steps_per_epoch())
    total_steps = min(steps, recipe.max_steps) if recipe.max_steps else steps
    recipe = replace(recipe, data_format=data.data_format)  # so that `generate` asks as the rows did
    return Run(recipe, device, config, tokenizer, data, total_steps)


@dataclass(frozen=True)
class Outlook:
    """What a run would do."""

    steps: int
    examples: int
    rows: int
    tokens: int
    trained_tokens: int
    device: str
    run_dir: str


def dry_run(
    recipe: Recipe, console: Console, *, overwrite: bool = False, resume: str = "", resume_anyway: bool = False
) -> Outlook:
    """The resolved recipe and what it would do; every check of `train` that needs no weights is made."""
    console.say(yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True).rstrip())
    check_run_dir(recipe.run_dir, overwrite=overwrite or goes_on_in(recipe.run_dir, resume))
    saved = find_start(recipe.run_dir, resume, overwrite=overwrite)
    run = prepare_run(recipe, console, resume=bool(resume))
    if saved:
        check_same_run(saved, run.recipe, run.total_steps, run.data.fingerprint, anyway=resume_anyway)
        verify_saved(saved, console.say)
        console.say(f"Would go on after step {saved.step:,}, from {saved.checkpoint.path}.")
    train_set = run.data.train
    outlook = Outlook(
        steps=run.total_steps,
        examples=train_set.num_examples,
        rows=train_set.num_rows,
        tokens=train_set.num_tokens,
        trained_tokens=train_set.num_trained,
        device=describe(run.device),
        run_dir=str(recipe.run_dir),
    )
    console.say(
        f"Would train {recipe.model} ({recipe.init} weights) on {outlook.device} for {outlook.steps:,} steps of "
        f"{recipe.batch_size} rows: {outlook.examples:,} examples in {outlook.rows:,} rows an epoch, "
        f"{outlook.tokens:,} tokens, {outlook.trained_tokens:,} of them trained on; "
        f"would write {outlook.run_dir}/ and the model to {outlook.run_dir}/model. Nothing was written."
    )
    return outlook


def end_tokens(run: Run) -> set[int]:
    """The tokens that end the responses of the data: special ones that are trained on last."""
    store, tokenizer = run.data.train.store, run.tokenizer
    special = set(tokenizer.all_special_ids)
    special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    examples = (store.example(i) for i in range(min(len(store), 256)))
    return {int(ids[mask.nonzero()[0][-1]]) for ids, mask in examples} & special


def stop_at(model: PreTrainedModel, ends: set[int]) -> None:
    """Let generation stop where the model is taught to: a chat template may end turns with another token than eos."""
    config = model.generation_config
    assert config is not None, "a causal model has a generation config"
    known = config.eos_token_id
    known = {known} if isinstance(known, int) else set(known or ())
    if not ends <= known:
        config.eos_token_id = sorted(known | ends)


def run_steps(
    run: Run,
    engine: Engine,
    metrics: Metrics,
    stop: Stop,
    save: Callable[[int, Position], None],
    first_step: int,
    position: Position,
) -> None:
    """The loop. It ends after the last step, or after the step in which a signal came, and saves then."""
    recipe, world = run.recipe, find_world()
    metrics.start_clock()
    for step in range(first_step, run.total_steps + 1):
        batches, position = run.data.train.step_at(position, world.rank, world.size)
        counted = torch.tensor([[batch.num_tokens, batch.num_trained] for batch in batches]).sum(0)
        tokens, trained = world.total(counted).tolist()
        lr = lr_at(recipe, step, run.total_steps)
        engine.begin(lr)
        for number, batch in enumerate(batches, start=1):
            engine.accumulate(batch, trained, last=number == len(batches))
        metrics.add(StepFacts(step, lr, tokens, trained), engine.step())
        stop.number = world.largest(
            stop.number
        )  # a signal reaches ranks at different times, and all must stop together
        last = step == run.total_steps
        if run.data.evaluation and (last or (recipe.eval_every and step % recipe.eval_every == 0)):
            metrics.settle()
            metrics.add_eval(step, engine.evaluate(run.data.evaluation))
            metrics.start_clock()
        due = last or stop.number != 0 or (recipe.save_every and step % recipe.save_every == 0)
        if due and recipe.keep:
            metrics.settle()
            save(step, position)
            metrics.start_clock()
        if due and stop.number:  # a signal that came too late for this step's save waits for the next
            break
    metrics.settle()


def lr_at(recipe: Recipe, step: int, total_steps: int) -> float:
    """Learning rate of a step, counted from 1: rises over the warm-up, then follows the schedule down."""
    warmup_steps = round(recipe.warmup * total_steps)
    if step <= warmup_steps:
        return recipe.lr * step / warmup_steps
    if recipe.schedule == "constant":
        return recipe.lr
    progress = (step - 1 - warmup_steps) / (total_steps - warmup_steps)
    return recipe.lr * ((1 + math.cos(math.pi * progress)) / 2 if recipe.schedule == "cosine" else 1 - progress)


class Progress:
    """Takes each finished step: a line on the console, and an end to the run when gradients stay non-finite."""

    def __init__(self, recipe: Recipe, total_steps: int, console: Console) -> None:
        self._recipe, self._total_steps, self._console = recipe, total_steps, console
        self._seconds, self._first_skip, self._skips_in_a_row = 0.0, 0, 0

    def catch_up(self, rows: Sequence[StepRow]) -> None:
        """Steps that were made before the run was resumed."""
        for row in rows:
            self._count(row)

    def row(self, row: StepRow) -> None:
        """One step has finished."""
        self._count(row)
        if row.skipped or row.step in (1, self._total_steps) or row.step % self._recipe.log_every == 0:
            left = self._seconds / row.step * (self._total_steps - row.step)
            self._console.step(row, self._total_steps, left)
        if self._skips_in_a_row >= self._recipe.skip_limit:
            raise Diverged(
                f"the gradient was not finite in {self._skips_in_a_row} steps in a row",
                where=f"step {self._first_skip}",
                remedy="Lower --lr, lengthen --warmup, or look at the data.",
            )

    def _count(self, row: StepRow) -> None:
        self._seconds += row.step_seconds
        self._skips_in_a_row = self._skips_in_a_row + 1 if row.skipped else 0
        if self._skips_in_a_row == 1:
            self._first_skip = row.step


def make_repeatable(recipe: Recipe) -> None:
    """Seed every generator in use; with `deterministic`, refuse operations that may differ between runs."""
    torch.manual_seed(recipe.seed)
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its handle is made
    torch.use_deterministic_algorithms(recipe.deterministic)


class Stop:
    """The signal that asked the run to end, or 0."""

    number = 0


@contextmanager
def signals() -> Iterator[Stop]:
    """SIGTERM and Ctrl-C end the run after the current step; a second one ends it at once."""
    stop = Stop()

    def handle(number: int, _: object) -> None:
        if stop.number:
            os._exit(128 + number)
        stop.number = number

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def memory_advice(recipe: Recipe) -> Iterator[None]:
    """Out of memory, in words."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = max(1, recipe.rows_at_once // 2)
        raise DoesNotFit(
            f"the GPU is out of memory with {recipe.rows_at_once} rows of {recipe.max_length} tokens at once: {error}",
            remedy=f"Try --recompute full, --micro-batch-size {smaller}, or a shorter --max-length.",
        ) from error


def summarize(metrics: Metrics, model_dir: Path, run_dir: Path, dialogue: Answer | None) -> Summary:
    """The run in one object."""
    rows = metrics.rows
    tokens, seconds = sum(row.tokens for row in rows), sum(row.step_seconds for row in rows)
    return Summary(
        steps=len(rows),
        loss_first=rows[0].loss,
        loss_last=rows[-1].loss,
        eval_loss=metrics.evals[-1].eval_loss if metrics.evals else None,
        tokens=tokens,
        trained_tokens=sum(row.trained_tokens for row in rows),
        tokens_per_s=tokens / seconds,
        seconds=seconds,
        skipped_steps=sum(row.skipped for row in rows),
        model_dir=str(model_dir),
        run_dir=str(run_dir),
        answer=dialogue,
    )
