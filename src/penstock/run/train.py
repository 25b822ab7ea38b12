"""One run, top to bottom: claim the directory, read the data, load the model, go on or begin, train, save, export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.checkpoint.export import export, mend_generation
from penstock.checkpoint.export_ranks import export_from_ranks
from penstock.checkpoint.lock import claim
from penstock.checkpoint.resume import (
    Identity,
    Saved,
    as_begun,
    check_same_model,
    check_same_run,
    find_start,
    goes_on_in,
    model_fingerprint,
    restore,
    save_run,
    saved_metrics,
    verify_saved,
)
from penstock.checkpoint.run_dir import check_run_dir, make_run_dir, note_ranks
from penstock.data.loader import Dataset, Position
from penstock.engine import Engine
from penstock.engine.deepspeed import DeepSpeedEngine
from penstock.engine.deepspeed_start import load_device
from penstock.engine.fsdp import load_for_ranks
from penstock.engine.native import NativeEngine
from penstock.engine.ranks import ALONE, World, bind, joined
from penstock.machine.hardware import describe, pick_device
from penstock.machine.launch import check_batch
from penstock.model.flops import flops_per_token
from penstock.model.load import load_model
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.report.facts import Recorder
from penstock.report.metrics import Answer, EvalRow, Metrics, StepFacts, StepRow, Summary
from penstock.report.panel import sources_of
from penstock.report.trackers import Trackers
from penstock.run.ending import Stop, disk_advice, interrupted, memory_advice, signals
from penstock.run.generate import answer
from penstock.run.preparation import Run, check_disk, foresee_disk, planned, prepare_run
from penstock.run.progress import Progress


def train(
    recipe: Recipe,
    console: Console,
    *,
    overwrite: bool = False,
    resume: str = "",
    resume_anyway: bool = False,
    world: World = ALONE,
) -> Summary:
    """Run the recipe and return what `penstock train` prints. `resume`: nothing, `newest`, or a path.

    Of several ranks all run this; the first one alone reads and writes the directory of the run.
    """
    run_dir = recipe.run_dir
    check_batch(recipe.batch_size, world.size)
    device = world.pick(pick_device(recipe.device))
    trackers = Trackers(recipe if world.first else replace(recipe, track=""), console.say)
    with joined(world, device), claimed(run_dir, resume, world, overwrite=overwrite) as own, trackers:
        if recipe.bind_cores:
            bind(world, device)
        saved = world.share(lambda: find_start(run_dir, resume, overwrite=overwrite))
        run = prepare_run(as_begun(recipe, saved), console, world, resume=bool(resume))
        recipe = run.recipe
        if saved:
            check_same_run(saved, recipe, run.total_steps, run.data.fingerprint, anyway=resume_anyway)
            with console.phase(f"Checking {saved.checkpoint.path}"):
                world.share(lambda: verify_saved(saved, console.say))
        elif resume:
            console.say(f"There is no checkpoint in {run_dir} yet: beginning with step 1")
        first_step = saved.step + 1 if saved else 1
        world.share(lambda: foresee_disk(run, first_step))
        run, plan = planned(run, console, world)
        recipe = run.recipe
        with console.phase(f"Loading {recipe.model}") as loading, memory_advice(recipe, world.size):
            model, remainders = load(run, console, world)
            loading.num_bytes = sum(p.nbytes for p in model.parameters())
            stop_at(model, end_tokens(run))
            mend_generation(model, console.say)
            fingerprint = model_fingerprint(model, values=recipe.init == "pretrained", remainders=remainders)
            if saved:
                check_same_model(saved, fingerprint, anyway=resume_anyway)
            num_params = sum(p.numel() for p in model.parameters())
            console.say(f"  {num_params / 1e6:,.1f} M parameters on {world.times}{describe(run.device)}")
            per_token = flops_per_token(model, run.data.train.mean_length)
        with console.phase(f"Making ready to train in mode {recipe.mode}"), memory_advice(recipe, world.size):
            engine, before = start_engine(model, remainders, run, saved, console, world)
        check_disk_of(engine, run, first_step, world)

        if world.first:
            make_run_dir(recipe, world, keep_checkpoints=saved is not None and own)
            note_ranks(run_dir, world, describe(run.device))
        progress = Progress(recipe, run.total_steps, console, plan)

        def seen(row: StepRow) -> None:
            trackers.row(row)
            progress.row(row)

        def evaluated(row: EvalRow) -> None:
            trackers.evaluated(row)
            console.evaluated(row)

        metrics = Metrics(run_dir, on_row=seen, on_eval=evaluated, write=world.first)
        if saved:
            with console.phase(f"Taking up the run after step {saved.step:,}"):
                metrics.restore(world.share(lambda: saved_metrics(saved)))
                progress.catch_up(metrics.rows)
                restore(saved, engine, console.say, world)
        trackers.start(metrics.rows, metrics.evals)
        recorder = Recorder(run_dir, engine, first_step, run.total_steps, write=world.first)
        recorder.start(run.data, run.tokenizer, run.device)
        if plan:
            recorder.planned(plan.seconds.step, plan.peak_bytes("gpu"), plan.peak_bytes("host"))
        identity = Identity.of(recipe, run.total_steps, run.data.fingerprint, fingerprint, before, model)

        def save(step: int, position: Position) -> None:
            with console.phase(f"Saving step {step:,}"):
                save_run(run_dir, identity, step, position, engine, metrics.saved(), console.say, world)

        model_dir = run_dir / "model"
        with signals() as stop:
            sources = sources_of(recorder, run.device, per_token)
            watched = console.training(recipe.name, run.total_steps, sources, metrics.rows)
            with watched, memory_advice(recipe, world.size), disk_advice(run_dir):
                run_steps(run, engine, metrics, recorder, stop, save, first_step, place_in(run.data, saved), world)
            recorder.close()
            engine.release()
            cut_off = metrics.rows[-1].step < run.total_steps
            if not cut_off or not recipe.keep:
                with console.phase(f"Exporting to {model_dir}"):
                    if engine.rows_on_ranks:
                        export_from_ranks(model, run.tokenizer, model_dir, recipe, world, console.say)
                    elif world.first:
                        export(model, run.tokenizer, model_dir, trust_remote_code=recipe.trust_remote_code)
        if cut_off:
            world.largest(0)  # or a rank that ends would end the one that still writes the model
            raise interrupted(recipe, stop, metrics.rows[-1].step, run.total_steps)
        has_model = engine.rows_on_ranks or world.first
        after = answer(model, run.tokenizer, recipe, recipe.prompt) if recipe.prompt and has_model else ""
        dialogue = Answer(recipe.prompt, before, after) if recipe.prompt else None
        summary = summarize(metrics, model_dir, run_dir, dialogue)
        recorder.end(summary)
        return summary


@contextmanager
def claimed(run_dir: Path, resume: str, world: World, *, overwrite: bool) -> Iterator[bool]:
    """Hold the directory of the run, on the first rank. Gives whether the run goes on in it.

    Ranks have met by now: if the directory is refused, all end with that, and none waits for the first.
    """

    def check() -> bool:
        own = goes_on_in(run_dir, resume)
        check_run_dir(run_dir, overwrite=overwrite, own=own)
        return own

    own = world.share(check)
    with claim(run_dir) if world.first else nullcontext():
        yield own


def load(run: Run, console: Console, world: World) -> tuple[PreTrainedModel, dict[nn.Parameter, Tensor]]:
    """The model, or this rank's rows of it, and what its weights lost in rounding if that is known already."""
    if not world.many or run.recipe.engine == "deepspeed":
        return load_model(run.recipe, run.config, load_device(run.recipe, run.device, world), console.say), {}
    own = load_for_ranks(run.recipe, run.config, run.device, world.size, console.say)
    return own.model, own.remainders


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


def start_engine(
    model: PreTrainedModel,
    remainders: dict[nn.Parameter, Tensor],
    run: Run,
    saved: Saved | None,
    console: Console,
    world: World,
) -> tuple[Engine, str]:
    """The engine, and what the model says before training. DeepSpeed cuts the weights, so that it is asked first."""

    def say(text: str) -> None:
        console.say(f"  {text}")

    if run.recipe.engine == "deepspeed":
        before = answer_before(model, run, saved) if world.first else ""
        return DeepSpeedEngine(model, run.recipe, say, world), before
    engine = NativeEngine(model, run.recipe, say, world, remainders)
    return engine, answer_before(model, run, saved)


def answer_before(model: PreTrainedModel, run: Run, saved: Saved | None) -> str:
    """What the model says before training; after a resume, what it said then."""
    prompt = run.recipe.prompt
    if saved:
        return saved.before if saved.recipe.get("prompt") == prompt else ""
    return answer(model, run.tokenizer, run.recipe, prompt) if prompt else ""


def check_disk_of(engine: Engine, run: Run, first_step: int, world: World = ALONE) -> None:
    """Before the first step, see that there is room for all that the run will write. All ranks take part."""
    sizes = {group: sum(t.num_bytes for t in tensors) for group, tensors in engine.saved_tensors().items()}
    checkpoint_bytes = sum(sizes.values())
    if not engine.rows_on_ranks:  # each rank has tensors of its own
        checkpoint_bytes = int(world.total(torch.tensor(checkpoint_bytes)))
    world.share(lambda: check_disk(run, first_step, checkpoint_bytes, sizes["weights"]))


def place_in(data: Dataset, saved: Saved | None) -> Position:
    """Where the next step begins. If the data was changed by force, its place may be beyond their end."""
    position = saved.position if saved else Position()
    return position if position.row < data.train.num_rows else Position(position.epoch + 1, 0)


def run_steps(
    run: Run,
    engine: Engine,
    metrics: Metrics,
    recorder: Recorder,
    stop: Stop,
    save: Callable[[int, Position], None],
    first_step: int,
    position: Position,
    world: World = ALONE,
) -> None:
    """The loop. It ends after the last step, or after the step in which a signal came to any rank, and saves then."""
    recipe = run.recipe
    metrics.start_clock()
    for step in range(first_step, run.total_steps + 1):
        tokens, trained = run.data.train.counts_at(position)
        batches, position = run.data.train.step_at(position, world.rank, world.size)
        lr = lr_at(recipe, step, run.total_steps)
        recorder.step_begins(step)
        engine.begin(lr)
        for number, batch in enumerate(batches, start=1):
            engine.accumulate(batch, trained, last=number == len(batches))
        metrics.add(StepFacts(step, lr, tokens, trained), engine.step())
        # Ranks agree, or one would stop and the others wait for it. A signal that comes meanwhile is in `stop` and is
        # seen next time: writing here what they agreed on would lose it.
        asked = world.largest(stop.number)
        last = step == run.total_steps
        if run.data.evaluation and (last or (recipe.eval_every and step % recipe.eval_every == 0)):
            metrics.settle()
            metrics.add_eval(step, engine.evaluate(run.data.evaluation.of_rank(world.rank, world.size)))
            metrics.start_clock()
        due = last or asked != 0 or (recipe.save_every and step % recipe.save_every == 0)
        if due and recipe.keep:
            metrics.settle()
            save(step, position)
            metrics.start_clock()
        if due and (asked := asked or world.largest(stop.number)):  # it may have come during the save
            stop.number = asked
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
