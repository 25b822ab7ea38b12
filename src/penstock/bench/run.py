"""`penstock bench`: random weights, real shapes, real kernels; our step against its own floor, and against peers.

The floor is forward and backward of the same micro-batches in the same process with nobody wanting the gradients. What
a step takes beyond it is what the optimizer exposes. Absolute figures of different machines or days were rejected as a
measure: only ratios inside one run mean anything.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from penstock.bench.ceilings import Ceilings, measure_ceilings
from penstock.bench.peers import Peer, peers_of, row_values, run_peer
from penstock.bench.rows import Memory, Results, Row, is_noise, table, write_timeline
from penstock.bench.this_machine import this_machine
from penstock.bench.timing import median_seconds
from penstock.data.loader import MicroBatch
from penstock.engine.native import NativeEngine
from penstock.engine.packed import PackedModel
from penstock.engine.trial import drop_gradient, full_batch
from penstock.engine.weights import layer_by_layer, load_to_stream, streams
from penstock.errors import DoesNotFit, RecipeError, UserError
from penstock.flow.timeline import Span
from penstock.machine.gpu_memory import driver_bytes, limit_gpu, most_driver_bytes
from penstock.machine.hardware import describe, make_repeatable, pick_compile, pick_device, pick_dtype
from penstock.model.flops import flops_per_token, reference_flops_per_token
from penstock.model.load import load_config, load_model
from penstock.model.load_rows import build_on_meta, count_parameters
from penstock.model.matmul import check_matmul
from penstock.plan.report import with_recompute
from penstock.recipe.lists import parse_size
from penstock.recipe.recipe import Recipe

Say = Callable[[str], None]
STEPS_ON_TIMELINE = 3


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to measure."""

    steps: int = 6
    modes: Sequence[str] = ()
    """Empty, here and for `formats`: the recipe's own."""
    updates: Sequence[str] = ("after-norm", "in-backward")
    formats: Sequence[str] = ()
    against: Sequence[str] = ()
    peer_modes: Sequence[str] = ("superoffload", "zerooffload")
    peer_ratios: Sequence[float] = (0.3,)
    timeout_s: float = 600.0
    timeline: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """What `bench` found."""

    directory: Path
    ceilings: Ceilings
    rows: list[Row]


def bench(recipe: Recipe, asked: Asked, *, to: str, say: Say) -> Report:
    """Ceilings, the floor, our step in every variant, then peers. Each row is on disk as soon as it is known."""
    device = pick_device(recipe.device)
    recipe = dataclasses.replace(recipe, init="random", dtype=pick_dtype(recipe.dtype, device))
    make_repeatable(recipe)
    check_matmul(recipe, load_config(recipe), device)
    num_params = count_parameters(recipe, load_config(recipe))
    recipe = dataclasses.replace(recipe, compile=pick_compile(recipe, device, num_params))
    if layer_by_layer(recipe) or "auto" in (recipe.recompute, recipe.weights):
        recipe = with_recompute(recipe, this_machine(remeasure=False, say=say) if device.type == "cuda" else None)
    wanted = variants(recipe, asked.modes, asked.updates, asked.formats)
    results = Results(Path(to) if to else default_directory(device))
    say(f"measuring what {describe(device)} can do")
    ceilings = measure_ceilings(device, torch.float32 if recipe.dtype == "fp32" else torch.bfloat16)
    text = json.dumps(dataclasses.asdict(ceilings), indent=2)
    results.write("ceilings.json", f"{text}\n")
    for line in ceilings.lines():
        say(f"  {line}")
    rows: list[Row] = []

    def found(row: Row) -> None:
        rows.append(row)
        results.add(row)
        say("  " + show(row))

    config = load_config(recipe)
    architecture = build_on_meta(recipe, config, torch.bfloat16, lambda model: model.tie_weights())
    flops, reference = flops_of_step(architecture, recipe), reference_flops_of_step(architecture, recipe)
    rate = (recipe.matmul == "fp8" and ceilings.fp8_flops_per_s) or ceilings.matrix_flops_per_s
    case = Case(recipe, device, rate / 1e12, flops, reference_flops=reference)
    if asked.timeline:
        case = dataclasses.replace(case, timeline=results.directory / "timeline.jsonl")
    for row in our_rows(case, wanted, asked.steps, say):
        found(row)
        case = dataclasses.replace(case, floor_s=row.floor_s)
    _give_back(device)
    short = streams(recipe) or recipe.gpu_memory != "auto"
    for peer in peers_of(asked.against, asked.peer_modes, asked.peer_ratios, offload_params=short):
        say(f"running {peer.label}, at most {asked.timeout_s:g} s")
        found(peer_row(case, peer, asked, results.directory))
    say("\n" + table(rows) + f"\nwritten to {results.directory}")
    return Report(results.directory, ceilings, rows)


def variants(recipe: Recipe, modes: Sequence[str], updates: Sequence[str], formats: Sequence[str]) -> list[Recipe]:
    """A recipe for each combination that exists.

    `in-backward` has no norm to clip by, so its recipe does not clip. `zerooffload` updates after backward by
    definition, so it comes with `after-norm` only.
    """
    found: list[Recipe] = []
    for mode in modes or [recipe.mode]:
        for update in updates:
            if mode == "zerooffload" and update == "in-backward":
                continue
            for states in formats or [recipe.states]:
                clip = 0.0 if update == "in-backward" else recipe.max_grad_norm
                changes: dict[str, Any] = {"mode": mode, "update": update, "states": states, "max_grad_norm": clip}
                found.append(dataclasses.replace(recipe, **changes))
    if not found:
        raise RecipeError("zerooffload updates after backward", where="--updates", remedy="Add after-norm to it.")
    return found


def default_directory(device: torch.device) -> Path:
    """A directory a day and machine, among the repository's results when called from there."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
    parent = Path("benchmarks/results") if Path("benchmarks").is_dir() else Path("bench-results")
    return parent / f"{_today()}-{slug}"


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


@dataclasses.dataclass(frozen=True)
class Case:
    """What all rows of one run share."""

    recipe: Recipe
    device: torch.device
    matrix_tflops: float
    flops: float
    floor_s: float | None = None
    timeline: Path | None = None
    """File for the spans of two steps of each of our rows."""
    reference_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of a step, by the reference's formula: with each word for recompute."""

    def row(self, system: str, step_s: float | None, **more: Any) -> Row:
        """A result, or what went wrong; `more` are fields of the row that differ from a floor's."""
        recipe, gpu = self.recipe, self.device.type == "cuda"
        values: dict[str, Any] = {
            "date": _today(),
            "machine": describe(self.device),
            "model": recipe.name,
            "mode": "",
            "update": "",
            "states": "",
            "clip": False,
            "batch": recipe.batch_size,
            "seq": recipe.max_length,
            "micro_batch": recipe.rows_at_once,
            "recompute": recipe.recompute,
            "compiled": recipe.compile,
            "matmul": recipe.matmul,
            "deterministic": recipe.deterministic,
            "floor_s": self.floor_s,
            "exposed_s": step_s - self.floor_s if step_s and self.floor_s else None,
            "tokens_per_s": recipe.batch_size * recipe.max_length / step_s if step_s else None,
            "model_tflops": self.flops / step_s / 1e12 if step_s else None,
            "matrix_tflops": self.matrix_tflops,
            "gpu_bytes": torch.cuda.max_memory_allocated(self.device) if gpu else 0,
            "host_bytes": psutil.Process().memory_info().rss,
            "versions": _versions(),
            "error": "",
            "weights": "resident" if recipe.weights == "auto" else recipe.weights,
            "order": recipe.order if recipe.order != "auto" else "layers" if layer_by_layer(recipe) else "rows",
            "inputs": (recipe.inputs if recipe.inputs != "auto" else "kept") if layer_by_layer(recipe) else "",
            "gpu_limit_gb": (parse_size(recipe.gpu_memory) or 0) / 1e9 or None,
            "driver_bytes": most_driver_bytes(self.device) if gpu else 0,
        }
        values |= more
        reference = self.reference_flops.get(values["recompute"])
        values["reference_tflops"] = reference / step_s / 1e12 if reference and step_s else None
        return Row(system=system, step_s=step_s, **values)


def show(row: Row) -> str:
    """A row while the others are still to come."""
    fp8, clipped = "fp8" if row.matmul == "fp8" else "", "clipped" if row.clip else ""
    words = (row.system, fp8, row.mode, row.update, row.states, clipped, row.setting)
    name = " ".join(filter(None, words))
    if row.step_s is None:
        return f"{name}: {row.error}"
    noise = " (under 1 is noise)" if is_noise(row) else ""
    homes = f"; {row.homes}" if row.homes else ""
    floor = f", {row.step_s / row.floor_s:.3f} of the floor{noise}" if row.floor_s else ""
    return f"{name}: {row.step_s:.3f} s{floor}{homes}"


def our_rows(case: Case, wanted: list[Recipe], steps: int, say: Say, *, floor: bool = True) -> Iterator[Row]:
    """The floor unless it is not asked for, then our step under each recipe, all in this process.

    Weights are drawn alike for all. The floor has them on the GPU, and the GPU for itself; those that will stream are
    drawn again for each.
    """
    recipe, device, config = case.recipe, case.device, load_config(case.recipe)
    say(f"building {recipe.model} with random weights")
    batches = [full_batch(rows, recipe.max_length, config.get_text_config().vocab_size) for rows in split_batch(recipe)]
    resident = dataclasses.replace(
        recipe, weights="resident", order="rows", inputs="auto", tile="auto", gpu_memory="auto"
    )
    activations: int | None = None
    model: PreTrainedModel | None = None
    try:
        if floor or not streams(recipe):
            model = load_model(resident, config, device, say)
            weights = sum(p.nbytes for p in model.parameters())
            _give_back(device)
            floor_s = _time_floor(PackedModel(model, resident, say), batches, steps)
            case = dataclasses.replace(case, floor_s=floor_s)
            row = dataclasses.replace(case, recipe=resident).row("floor", floor_s)
            activations = row.gpu_bytes - weights if device.type == "cuda" else None
            yield row
    except torch.OutOfMemoryError:
        if not streams(recipe):
            raise DoesNotFit(
                f"{recipe.rows_at_once} x {recipe.max_length} tokens do not fit even without an optimizer",
                where=describe(device),
                remedy="Try --weights streamed, --recompute full, or a smaller --micro-batch-size.",
            ) from None
        say("  weights do not fit the GPU, so that there is no floor with all of them there")
    for variant in wanted:
        if streams(variant):
            model = None
        _give_back(device)
        limit_gpu(device, variant.gpu_memory)
        if model is None:
            model = load_to_stream(variant, config, device, say)
            _give_back(device)
        yield _our_row(dataclasses.replace(case, recipe=variant), model, batches, steps, activations, say)


def split_batch(recipe: Recipe) -> list[int]:
    """Rows of each micro-batch of a step; the last is smaller where the batch is not a multiple."""
    whole, rest = divmod(recipe.batch_size, recipe.rows_at_once)
    return [recipe.rows_at_once] * whole + ([rest] if rest else [])


def _our_row(
    case: Case, model: PreTrainedModel, batches: list[MicroBatch], steps: int, activations: int | None, say: Say
) -> Row:
    recipe = case.recipe
    asked = {
        "mode": recipe.mode,
        "states": recipe.states,
        "update": recipe.update,
        "clip": bool(recipe.max_grad_norm),
    }
    engine: NativeEngine | None = None
    try:
        engine = NativeEngine(model, recipe, lambda text: say(f"  {text}"), device=case.device)
        before = _alloc_retries(case.device)
        step_s, gradients, loss, spans = _time_steps(engine, recipe, batches, steps)
        retries = _alloc_retries(case.device) - before
        if case.timeline is not None:
            write_timeline(case.timeline, {"model": recipe.name, **asked, "compiled": recipe.compile}, spans)
        state = engine.optimizer.state_bytes()
        memory = Memory(
            weights=sum(p.nbytes for p in model.parameters()),
            gradients=gradients,
            resident=state.get("gpu", 0),
            streamed=state.get("stream", 0),
            host_state=state.get("host", 0),
            activations=activations,
        )
        homes = engine.optimizer.describe()
        return case.row(
            "penstock", step_s, **asked, homes=homes, memory=memory, lanes=busy_seconds(spans), retries=retries,
            loss=loss, error="" if math.isfinite(loss) else f"the loss is {loss}",
        )  # fmt: skip
    except (UserError, torch.OutOfMemoryError) as error:
        text = "out of GPU memory" if isinstance(error, torch.OutOfMemoryError) else str(error).splitlines()[0]
        return case.row("penstock", None, **asked, error=text)
    finally:
        if engine is not None:
            engine.release()
            engine.drop_weights()
        model.zero_grad()


def _alloc_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def busy_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Busy seconds of a step by lane. `wait`: how long the model stood still for updates; the first step has none."""
    busy: dict[str, float] = {}
    for span in spans:
        if span.lane not in ("forward", "backward"):  # the model's own arithmetic is the floor
            steps = STEPS_ON_TIMELINE - (span.lane == "wait")
            busy[span.lane] = busy.get(span.lane, 0.0) + (span.end - span.start) / steps
    return dict(sorted(busy.items()))


def peer_row(case: Case, peer: Peer, asked: Asked, directory: Path) -> Row:
    """A peer's step on the same work, or why there is none."""
    log = directory / f"{case.recipe.name} {peer.label}.log".replace(" ", "-")
    others_bytes = driver_bytes(case.device) if case.device.type == "cuda" else 0
    result = run_peer(
        peer, case.recipe, steps=asked.steps, timeout_s=asked.timeout_s, log=log, others_bytes=others_bytes
    )
    return case.row(peer.name, result.step_s, **row_values(peer, case.recipe, result))


def _give_back(device: torch.device) -> None:
    """Whoever is measured next finds the device as empty as it can be, and a peak that starts from here."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _time_floor(packed: PackedModel, batches: list[MicroBatch], steps: int) -> float:
    hooks = [p.register_post_accumulate_grad_hook(drop_gradient) for p in packed.model.parameters()]
    trained = sum(batch.num_trained for batch in batches)

    def step() -> None:
        for batch in batches:
            (packed.loss_sum(batch) / trained).backward()

    seconds = median_seconds(step, packed.device, steps)
    for hook in hooks:
        hook.remove()
    return seconds


def _time_steps(
    engine: NativeEngine, recipe: Recipe, batches: list[MicroBatch], steps: int
) -> tuple[float, int, float, list[Span]]:
    """Seconds of a step, the most bytes of gradients between its parts, the last loss, and what more steps did."""
    trained = sum(batch.num_trained for batch in batches)
    gradients, result = 0, None

    def step() -> None:
        nonlocal gradients, result
        engine.begin(recipe.lr)
        for number, batch in enumerate(batches, start=1):
            engine.accumulate(batch, trained, last=number == len(batches))
            gradients = max(gradients, sum(p.grad.nbytes for p in engine.model.parameters() if p.grad is not None))
        result = engine.step()

    seconds = median_seconds(step, engine.packed.device, steps)
    engine.optimizer.synchronize()  # or the first step on the timeline would wait for updates that are not on it
    engine.optimizer.timeline.start()
    for _ in range(STEPS_ON_TIMELINE):
        step()
    engine.optimizer.synchronize()
    assert result is not None, "steps were made"
    return seconds, gradients, result.loss, engine.optimizer.timeline.stop()


def flops_of_step(model: PreTrainedModel, recipe: Recipe) -> float:
    """Model FLOPs of a step whose rows are each one example."""
    return flops_per_token(model, recipe.max_length) * recipe.batch_size * recipe.max_length


def reference_flops_of_step(model: PreTrainedModel, recipe: Recipe) -> dict[str, float]:
    """The same as the reference counts it, by what is computed again. Nothing for models with experts."""
    tokens = recipe.batch_size * recipe.max_length
    words = {recipe.recompute, "none", "full"}
    found = {word: reference_flops_per_token(model, recipe.max_length, word) * tokens for word in words}
    return {word: flops for word, flops in found.items() if math.isfinite(flops)}
