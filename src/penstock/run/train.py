"""One run, top to bottom: claim the directory, read the data, load the model, go on or begin, train, save, export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.checkpoint.export import export
from penstock.checkpoint.export_ranks import export_from_ranks
from penstock.checkpoint.lock import claim
from penstock.checkpoint.places import CHECKPOINTS
from penstock.checkpoint.resume import (
    as_begun,
    check_same_run,
    find_start,
    goes_on_in,
    restore,
    save_run,
    saved_metrics,
    verify_saved,
    was_compiled,
)
from penstock.checkpoint.run_dir import check_run_dir, make_run_dir, note_ranks
from penstock.checkpoint.store import of_step
from penstock.data.loader import Dataset
from penstock.engine import Engine, MemoryUse
from penstock.engine.meeting import joined
from penstock.engine.ranks import ALONE, World, bind
from penstock.machine.gpu_memory import limit_gpu
from penstock.machine.hardware import describe, pick_device
from penstock.machine.launch import check_batch
from penstock.model.attention import check_package
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.report.facts import Recorder
from penstock.report.metrics import Answer, EvalRow, Metrics, StepFacts, StepRow, Summary, mean_rate, speeds_of
from penstock.report.panel import sources_of
from penstock.report.trackers import Trackers, check_installed
from penstock.run.ending import Stop, disk_advice, interrupted, memory_advice, signals
from penstock.run.generate import answer
from penstock.run.loading import Loaded, load_engine
from penstock.run.preparation import Run, Start, foresee_disk, planned, prepare_run, recipe_of_all
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
    check_batch(recipe.batch_size, world.size)
    check_installed(recipe)
    check_package(recipe.attention)
    device = world.pick(pick_device(recipe.device))
    limit_gpu(device, recipe.gpu_memory)
    trackers = Trackers(recipe if world.first else replace(recipe, track=""), console.say)
    with joined(world, device), claimed(recipe.run_dir, resume, world, overwrite=overwrite) as own, trackers:
        asked, recipe = recipe, recipe_of_all(recipe, world)
        if recipe.gpu_memory != asked.gpu_memory:
            limit_gpu(device, recipe.gpu_memory)
        if recipe.bind_cores:
            bind(world, device)
        start = find_beginning(recipe, console, world, overwrite=overwrite, resume=resume, resume_anyway=resume_anyway)
        run, recipe = start.run, start.run.recipe
        loaded = load_engine(start, console, world, resume_anyway=resume_anyway)
        with disk_advice(recipe.run_dir):
            if world.first:
                make_run_dir(recipe, world, keep_checkpoints=start.saved is not None and own)
                note_ranks(recipe.run_dir, world, describe(run.device))
            records = begin_or_go_on(start, loaded, trackers, console, world)
        with signals(console.say if world.first else None) as stop:
            sources = sources_of(records.recorder, run.device, run.recipe)
            watched = console.training(recipe.name, run.total_steps, sources, records.metrics.rows)
            with watched, memory_advice(recipe, world.size), disk_advice(recipe.run_dir):
                run_steps(start, loaded, records, stop, console, world)
            # The model is not written yet, and is worth more. Ranks meet outside of what may fail on one of them.
            memory: list[MemoryUse] = []
            record(lambda: memory.extend(records.recorder.memory()), console)
            everyones = world.gather(memory)
            record(lambda: records.recorder.close(everyones), console)
            loaded.engine.release()
            last_step = records.metrics.rows[-1].step
            early = last_step < run.total_steps and records.metrics.out_of_patience(recipe.patience)
            cut_off = last_step < run.total_steps and not early
            if not cut_off or not recipe.keep:
                export_model(loaded.engine, run, console, world)
        if cut_off:
            world.largest(0)  # or a rank that ends would end the one that still writes the model
            raise interrupted(recipe, stop, last_step, run.total_steps, resume)
        summary = summarize(records.metrics, recipe.run_dir, ask_again(run, loaded, world), run.data)
        summary = replace(summary, stopped_early=early)
        record(lambda: records.recorder.end(summary), console)
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


def find_beginning(
    recipe: Recipe, console: Console, world: World, *, overwrite: bool, resume: str, resume_anyway: bool
) -> Start:
    """What the run will do and from which step on, with every check that needs no weights."""
    saved = world.share(lambda: find_start(recipe.run_dir, resume, overwrite=overwrite))
    begun = as_begun(recipe, saved, world.size)
    run = prepare_run(begun, console, world, resume=bool(resume), begun_compiled=was_compiled(saved))
    if saved:
        check_same_run(saved, run.recipe, run.total_steps, run.data.fingerprint, anyway=resume_anyway)
        with console.phase(f"Checking {saved.checkpoint.path}"):
            world.share(lambda: verify_saved(saved, console.say))
    elif resume:
        console.say(f"There is no checkpoint in {recipe.run_dir} yet: beginning with step 1")
    world.share(lambda: foresee_disk(run, saved.step + 1 if saved else 1))
    chosen, plan = planned(run, console, world)
    return Start(chosen, plan, saved)


@dataclass(frozen=True)
class Records:
    """What is written down while a run goes on."""

    metrics: Metrics
    """A row a step and a row an evaluation."""
    recorder: Recorder
    """Facts for the report."""


def begin_or_go_on(start: Start, loaded: Loaded, trackers: Trackers, console: Console, world: World) -> Records:
    """Open the records; of a run that goes on, with its rows so far, and the engine as it was saved."""
    run, plan, run_dir, engine = start.run, start.plan, start.run.recipe.run_dir, loaded.engine
    costs = run.data.train.costs_from(start.position, run.total_steps - start.first_step + 1, world.size)
    progress = Progress(run.recipe, run.total_steps, costs, console, plan)

    def seen(row: StepRow) -> None:
        trackers.row(row)
        progress.row(row)

    def evaluated(row: EvalRow) -> None:
        trackers.evaluated(row)
        console.evaluated(row, run.total_steps, metrics.best)

    metrics = Metrics(
        run_dir, on_row=seen, on_eval=evaluated, device=run.device, flops=loaded.flops, write=world.first,
        ranks=world.size,
    )  # fmt: skip
    if saved := start.saved:
        with console.phase(f"Resuming after step {saved.step:,}"):
            metrics.restore(world.share(lambda: saved_metrics(saved)))
            progress.catch_up(metrics.rows)
            restore(saved, engine, console.say, world)
    trackers.start(metrics.rows, metrics.evals)
    recorder = Recorder(run_dir, engine, start.first_step, run.total_steps, write=world.first)
    recorder.start(run.data, run.tokenizer, run.device)
    if plan:
        seconds = plan.seconds.step if plan.machine.predicts_time else 0.0
        recorder.planned(seconds, plan.peak_bytes("gpu"), plan.peak_bytes("host"))
    return Records(metrics, recorder)


def run_steps(start: Start, loaded: Loaded, records: Records, stop: Stop, console: Console, world: World) -> None:
    """The loop. It ends after the last step, without patience, or after a signal to any rank, and saves then."""
    run, recipe, position = start.run, start.run.recipe, start.position
    engine, metrics = loaded.engine, records.metrics
    metrics.start_clock()
    early = metrics.out_of_patience(recipe.patience)  # a run that ended so, and is resumed, has nothing left to do
    for step in range(start.first_step, run.total_steps + 1) if not early else ():
        tokens, trained, example = run.data.train.counts_at(position)
        batches, position = run.data.train.step_at(position, world.rank, world.size)
        lr = lr_at(recipe, step, run.total_steps)
        records.recorder.step_begins(step)
        engine.begin(lr)
        for number, batch in enumerate(batches, start=1):
            engine.accumulate(batch, trained, last=number == len(batches))
        metrics.add(StepFacts(step, lr, tokens, trained), engine.step(), example)
        # Ranks agree, or one would stop and the others wait for it. A signal that comes meanwhile is in `stop` and is
        # seen next time: writing here what they agreed on would lose it.
        asked = world.largest(stop.number)
        last = step == run.total_steps
        due = asked != 0 or (recipe.save_every and step % recipe.save_every == 0)
        if run.data.evaluation and (last or (recipe.eval_every and step % recipe.eval_every == 0)):
            metrics.settle()
            metrics.add_eval(step, engine.evaluate(run.data.evaluation.of_rank(world.rank, world.size)))
            metrics.start_clock()
            last = last or metrics.out_of_patience(recipe.patience)
            due = due or (recipe.keep_best and metrics.best == metrics.evals[-1])
        due = due or last
        if due and recipe.keep:
            metrics.settle()
            with console.phase(f"Saving step {step:,}"):
                rows = metrics.saved()
                save_run(recipe.run_dir, loaded.identity, step, position, engine, rows, console.say, world)
            metrics.start_clock()
        if due and (asked := asked or world.largest(stop.number)):  # it may have come during the save
            stop.number = asked
            break
        if last:
            break
    metrics.settle()


def record(write: Callable[[], None], console: Console) -> None:
    """Write facts for the report. Whatever goes wrong, the run goes on without them."""
    try:
        write()
    except Exception as error:
        console.say(f"WARNING: the report will lack some facts ({type(error).__name__}: {error})")


def lr_at(recipe: Recipe, step: int, total_steps: int) -> float:
    """Learning rate of a step, counted from 1: rises over the warm-up, then follows the schedule down."""
    warmup_steps = round(recipe.warmup * total_steps)
    if step <= warmup_steps:
        return recipe.lr * step / warmup_steps
    if recipe.schedule == "constant":
        return recipe.lr
    progress = (step - 1 - warmup_steps) / (total_steps - warmup_steps)
    return recipe.lr * ((1 + math.cos(math.pi * progress)) / 2 if recipe.schedule == "cosine" else 1 - progress)


def export_model(engine: Engine, run: Run, console: Console, world: World) -> None:
    """Write the model for other programs. All ranks take part."""
    recipe, model_dir = run.recipe, run.recipe.run_dir / "model"
    with console.phase(f"Exporting to {model_dir}"):
        if engine.rows_on_ranks:
            export_from_ranks(engine.model, run.tokenizer, model_dir, recipe, world, console.say)
        elif world.first:
            export(engine.model, run.tokenizer, model_dir, trust_remote_code=recipe.trust_remote_code)


def ask_again(run: Run, loaded: Loaded, world: World) -> Answer | None:
    """What the trained model says to the recipe's prompt, beside what it said before."""
    prompt, engine = run.recipe.prompt, loaded.engine
    if not prompt:
        return None
    has_model = engine.rows_on_ranks or world.first
    after = answer(engine.model, run.tokenizer, run.recipe, prompt) if has_model else ""
    return Answer(prompt, loaded.identity.before, after)


def summarize(metrics: Metrics, run_dir: Path, dialogue: Answer | None, data: Dataset) -> Summary:
    """The run in one object."""
    rows, best = metrics.rows, metrics.best
    kept = of_step(run_dir / CHECKPOINTS, best.step) if best else None
    tokens, seconds = sum(row.tokens for row in rows), sum(row.step_seconds for row in rows)
    return Summary(
        steps=len(rows),
        loss_first=rows[0].loss,
        loss_last=rows[-1].loss,
        eval_loss=metrics.evals[-1].eval_loss if metrics.evals else None,
        tokens=tokens,
        trained_tokens=sum(row.trained_tokens for row in rows),
        tokens_per_s=tokens / seconds,
        model_tflops=mean_rate(rows, "model_tflops"),
        reference_tflops=mean_rate(rows, "reference_tflops"),
        seconds=seconds,
        skipped_steps=sum(row.skipped for row in rows),
        model_dir=str(run_dir / "model"),
        run_dir=str(run_dir),
        answer=dialogue,
        unused=tuple(data.train.store.counts.unused),
        best_eval_loss=best.eval_loss if best else None,
        best_step=best.step if best else None,
        best_checkpoint=str(kept) if kept else None,
        speeds=speeds_of(rows),
    )
