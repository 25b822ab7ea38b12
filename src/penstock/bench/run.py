"""`penstock bench`: random weights, real shapes, real kernels; our step against its own floor.

The floor is forward and backward of the same micro-batches in the same process with nobody wanting the gradients. What
a step takes beyond it is what the optimizer exposes. Absolute figures of different machines or days were rejected as a
measure: only ratios inside one run mean anything.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version

import psutil
import torch

from penstock.data.loader import MicroBatch
from penstock.engine.native import NativeEngine, PackedModel, drop_gradient, full_batch
from penstock.errors import UserError
from penstock.hardware import describe, pick_device, pick_dtype
from penstock.model.load import load_config, load_model
from penstock.recipe import Recipe

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a result file."""

    date: str
    machine: str
    system: str
    model: str
    mode: str
    schedule: str
    states: str
    clip: bool
    batch: int
    seq: int
    micro_batch: int
    recompute: str
    compiled: bool
    step_s: float | None
    floor_s: float | None
    exposed_s: float | None
    tokens_per_s: float | None
    model_tflops: float | None
    matrix_tflops: float | None
    gpu_bytes: int
    host_bytes: int
    homes: str
    versions: str
    error: str


def bench(recipe: Recipe, *, steps: int, say: Say) -> list[Row]:
    """The floor, then our step clipped and not clipped."""
    device = pick_device(recipe.device)
    recipe = dataclasses.replace(recipe, init="random", dtype=pick_dtype(recipe.dtype, device))
    config = load_config(recipe)
    say(f"building {recipe.model} with random weights on {describe(device)}")
    model = load_model(recipe, config, device, say)
    vocab_size = config.get_text_config().vocab_size
    whole = full_batch(recipe.rows_at_once, recipe.max_length, vocab_size)
    batches = [whole] * -(-recipe.batch_size // recipe.rows_at_once)
    case = Case(recipe, device, _matrix_tflops(device), _flops_of_step(model, recipe))
    floor_s = _time_floor(PackedModel(model, recipe), batches, steps)
    rows = [case.row("floor", step_s=floor_s, floor_s=floor_s)]
    say(show(rows[-1]))
    for clip in (recipe.max_grad_norm or 1.0, 0.0):
        asked = dataclasses.replace(recipe, max_grad_norm=clip)
        rows.append(_measure(dataclasses.replace(case, recipe=asked), model, batches, steps, floor_s, say))
        say(show(rows[-1]))
    return rows


@dataclasses.dataclass(frozen=True)
class Case:
    """What all rows of one run share."""

    recipe: Recipe
    device: torch.device
    matrix_tflops: float
    flops: float

    def row(self, system: str, *, step_s: float | None, floor_s: float | None, homes: str = "", error: str = "") -> Row:
        """A result, or what went wrong."""
        recipe, gpu = self.recipe, self.device.type == "cuda"
        schedule = "after-norm" if recipe.max_grad_norm else "in-backward"
        known = step_s is not None and floor_s is not None
        return Row(
            date=datetime.now(UTC).date().isoformat(),
            machine=describe(self.device),
            system=system,
            model=recipe.name,
            mode="superoffload" if system == "penstock" else "",
            schedule=schedule if system == "penstock" else "",
            states="fp32" if system == "penstock" else "",
            clip=bool(recipe.max_grad_norm) if system == "penstock" else False,
            batch=recipe.batch_size,
            seq=recipe.max_length,
            micro_batch=recipe.rows_at_once,
            recompute=str(recipe.recompute),
            compiled=False,
            step_s=step_s,
            floor_s=floor_s,
            exposed_s=step_s - floor_s if known and step_s and floor_s else None,
            tokens_per_s=recipe.batch_size * recipe.max_length / step_s if step_s else None,
            model_tflops=self.flops / step_s / 1e12 if step_s else None,
            matrix_tflops=self.matrix_tflops,
            gpu_bytes=torch.cuda.max_memory_allocated(self.device) if gpu else 0,
            host_bytes=psutil.Process().memory_info().rss,
            homes=homes,
            versions=", ".join(f"{name} {version(name)}" for name in ("torch", "transformers")),
            error=error,
        )


def show(row: Row) -> str:
    """A row for people."""
    name = row.system + (f" {row.schedule}" + (" clipped" if row.clip else "") if row.schedule else "")
    if row.step_s is None or row.floor_s is None or row.tokens_per_s is None or row.model_tflops is None:
        return f"{row.model:<14} {name:<34} {row.error}"
    return (
        f"{row.model:<14} {name:<34} {row.step_s:7.3f} s  {row.step_s / row.floor_s:5.3f} of the floor  "
        f"{row.tokens_per_s:9,.0f} tokens/s  {row.model_tflops:6.1f} TFLOP/s of {row.matrix_tflops:.0f}  "
        f"GPU {row.gpu_bytes / 1e9:6.1f} GB  host {row.host_bytes / 1e9:6.1f} GB  {row.homes}"
    )


def _measure(
    case: Case, model: torch.nn.Module, batches: list[MicroBatch], steps: int, floor_s: float, say: Say
) -> Row:
    """Our step under one recipe, in the same process as the floor."""
    engine: NativeEngine | None = None
    try:
        engine = NativeEngine(model, case.recipe, say)  # type: ignore[arg-type]
        step_s = _time_steps(engine, batches, steps)
        homes = f"{engine.optimizer.describe()}; {_lanes(engine, batches)}"
        return case.row("penstock", step_s=step_s, floor_s=floor_s, homes=homes)
    except (UserError, torch.OutOfMemoryError) as error:
        return case.row("penstock", step_s=None, floor_s=floor_s, error=str(error).splitlines()[0])
    finally:
        if engine is not None:
            engine.release()
        del engine
        gc.collect()
        if case.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(case.device)


def _lanes(engine: NativeEngine, batches: list[MicroBatch]) -> str:
    """How long each lane was busy in a step, and how long the model waited for them."""
    trained = sum(batch.num_trained for batch in batches)
    tape = engine.optimizer.tape
    tape.start()
    for _ in range(2):
        engine.begin(1e-5)
        for number, batch in enumerate(batches, start=1):
            engine.accumulate(batch, trained, last=number == len(batches))
        engine.step()
    spans = tape.stop()
    names = sorted({span.lane for span in spans})
    return ", ".join(f"{name} {sum(s.end - s.start for s in spans if s.lane == name) / 2:.3f}" for name in names)


def _time_floor(packed: PackedModel, batches: list[MicroBatch], steps: int) -> float:
    hooks = [p.register_post_accumulate_grad_hook(drop_gradient) for p in packed.model.parameters()]
    trained = sum(batch.num_trained for batch in batches)

    def step() -> None:
        for batch in batches:
            (packed.loss_sum(batch) / trained).backward()

    seconds = _median_seconds(step, packed.device, steps)
    for hook in hooks:
        hook.remove()
    return seconds


def _time_steps(engine: NativeEngine, batches: list[MicroBatch], steps: int) -> float:
    trained = sum(batch.num_trained for batch in batches)

    def step() -> None:
        engine.begin(1e-5)
        for number, batch in enumerate(batches, start=1):
            engine.accumulate(batch, trained, last=number == len(batches))
        engine.step()

    return _median_seconds(step, engine.packed.device, steps)


def _median_seconds(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Median time of a step among steps that follow one another without a pause, after two to warm up."""
    times: list[float] = []
    if device.type != "cuda":
        for _ in range(steps + 1):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])
    marks = []
    for _ in range(steps + 3):
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        step()
    torch.cuda.synchronize(device)
    times = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return statistics.median(times[2:])


def _flops_of_step(model: torch.nn.Module, recipe: Recipe) -> float:
    """Model FLOPs of a step, recompute not counted: six a weight and token, and attention's products."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    weights = sum(p.numel() for p in model.parameters())
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        weights -= int(in_experts * (1 - config.num_experts_per_tok / experts))
    tokens = recipe.batch_size * recipe.max_length
    attention = 12.0 * config.num_hidden_layers * config.hidden_size * recipe.max_length
    return float((6.0 * weights + attention) * tokens)


def _matrix_tflops(device: torch.device) -> float:
    """The rate of a large bf16 matrix product: what the machine could do at most."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).bfloat16()
    seconds = _median_seconds(lambda: torch.mm(a, a), device, 20 if device.type == "cuda" else 3)
    return 2.0 * size**3 / seconds / 1e12
