"""`penstock plan`: a recipe on a machine, in words. `values.py` has the same for programs.

Figures are in GB of 10^9 bytes, as the bench and the engine print them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

from penstock.errors import RecipeError, UserError, counted
from penstock.machine.hardware import COMPILED_FROM, cpu_has_bf16
from penstock.machine.known import Machine
from penstock.plan.architecture import architecture_of, check_fp8, check_rope
from penstock.plan.job import Job, Settings
from penstock.plan.layout import gpu_reserve
from penstock.plan.predict import Plan, gpu_shortage, predict
from penstock.plan.rooms import host_reserve, sharing_a_host
from penstock.plan.solve import Alternative, Free, alternatives, fitting, flags_between, may_stream, solve
from penstock.recipe.lists import parse_homes, parse_size
from penstock.recipe.recipe import Recipe, check_inputs, tile_tokens

FAR_OFF = 0.3
"""From which difference on a plan's seconds are doubted."""
ANOTHER = 0.01
"""From which difference on it is said what a step takes with the examples at hand."""


@dataclass(frozen=True)
class RunLength:
    """The whole run."""

    steps: int
    tokens: int
    how: str
    """Where the figures come from, for people."""
    attended: float = 0.0
    """Tokens that one attends to on average, since examples are shorter than rows; 0: not known."""


@dataclass(frozen=True)
class Report:
    """A plan with all that is said about it."""

    name: str
    plan: Plan
    length: RunLength | None
    others: tuple[Alternative, ...]
    flags: tuple[str, ...] = ()
    """What the solver changed in the recipe, if it was free to."""
    note: str = ""
    unknown: str = "the data is not here"
    """Why there is no length, if there is none."""

    @cached_property
    def step_seconds(self) -> float:
        """Of a step with these examples: the plan's own is of rows that one example fills."""
        plan = self.plan
        if self.length is None or not self.length.attended:
            return plan.seconds.step
        job = replace(plan.job, attended=self.length.attended)
        return fitting(predict(job, plan.settings, plan.machine, plan.gpus)).seconds.step


def job_of(recipe: Recipe, dtype_bytes: int = 2, *, gpu: bool = True) -> Job:
    """What a recipe asks for, settings aside."""
    homes = parse_homes(recipe.homes)
    shares = {homes: 1.0} if isinstance(homes, str) else homes or {}
    overlap, architecture = recipe.mode == "superoffload", architecture_of(recipe)
    large = architecture.num_parameters() >= COMPILED_FROM
    return Job(
        architecture,
        recipe.batch_size,
        recipe.max_length,
        clip=bool(recipe.max_grad_norm),
        update=recipe.update,
        overlap=overlap,
        homes=() if recipe.homes == "auto" or not overlap else tuple(shares.items()),
        attention="varlen" if recipe.attention == "auto" else recipe.attention,
        dtype_bytes=dtype_bytes,
        checkpoints=_checkpoints(recipe),
        compiled=recipe.compile and large and gpu and dtype_bytes == 2,
        accumulate_dtype=recipe.accumulate_dtype,
        matmul=recipe.matmul,
        weights=recipe.weights if overlap else "resident",
        order=recipe.order,
        inputs=recipe.inputs,
        tile=recipe.tile,
    )


def _checkpoints(recipe: Recipe) -> int:
    """On disk at once, at the most: those that are kept, and one that is being written."""
    if not recipe.keep:
        return 0
    return recipe.keep + recipe.keep_best + 1 if recipe.save_every or recipe.keep_best else 1


def with_recompute(recipe: Recipe, machine: Machine | None, gpus: int = 1) -> Recipe:
    """The recipe with a word for `recompute = auto`: the fastest that fits; of what is not known, `full`.

    Where layers are computed one by one, because the recipe says so or nothing else fits, it also has the weights, the
    order and the inputs that the plan chooses.
    """
    by_layer = recipe.weights not in ("auto", "resident") or recipe.order == "layers"
    if machine is None or not machine.has_gpu:
        return _with_layers(recipe, gpus=gpus) if by_layer else _with_word(recipe, "none")
    check_one_gpu(recipe, gpus)
    machine, free = limited(machine, recipe), Free(recipe.states, recipe.rows_on(gpus), _word(recipe))
    try:
        job = job_on(recipe, machine)
        plan = solve(job, machine, gpus, free)
    except UserError:  # a model that the plan does not know
        return _with_layers(recipe, gpus=gpus) if by_layer else _with_word(recipe, "full")
    if plan is None and may_stream(job, machine, free):
        return _with_layers(recipe, predict(job, _least(job, machine, free, gpus), machine, gpus))
    if plan is None or not plan.settings.by_layer:
        return _with_word(recipe, plan.settings.recompute if plan else "full")
    return _with_layers(recipe, plan)


def _word(recipe: Recipe) -> str | None:
    return None if recipe.recompute == "auto" else recipe.recompute


def _with_word(recipe: Recipe, recompute: str) -> Recipe:
    return replace(recipe, recompute=_word(recipe) or recompute)


def _with_layers(recipe: Recipe, plan: Plan | None = None, gpus: int = 1) -> Recipe:
    """With what was planned, or with what is usual."""
    order = "layers" if gpus == 1 else "rows"
    words: dict[str, Any] = {"weights": "resident", "order": order, "inputs": "kept", "tile": "none"}
    if plan is not None:
        settings, tile = plan.settings, str(plan.settings.tile or "none")
        words = {"weights": plan.weights, "order": settings.order, "inputs": settings.inputs, "tile": tile}
    free = {name: word for name, word in words.items() if getattr(recipe, name) == "auto"}
    return replace(recipe, recompute="full", **free)


def _least(job: Job, machine: Machine, free: Free, gpus: int) -> Settings:
    """What takes least of the GPU, for a recipe that does not fit: what is missing then shows in host memory."""
    assert free.states, "the recipe has a format"
    assert free.micro_batch, "and rows"
    order = "layers" if job.order == "auto" else job.order
    streamed = job.streamed_choices[-1]
    if gpus > 1:
        return Settings(free.states, free.micro_batch, "full", streamed)
    tile = next((tile for tile in job.tile_choices[-1] if tile < free.micro_batch * job.length), 0)
    inputs = "kept" if job.inputs == "auto" else job.inputs
    kept = Settings(free.states, free.micro_batch, "full", streamed, order, inputs, tile)
    if job.inputs != "auto" or gpu_shortage(job, kept, machine) <= 0:
        return kept
    return replace(kept, inputs="parked")  # and not fewer of them: the layers between are computed again together


def check_one_gpu(recipe: Recipe, gpus: int) -> None:
    """Refuse what only one GPU can do."""
    by_layer = {
        "order": recipe.order == "layers",
        "inputs": recipe.inputs.startswith("parked"),
        "tile": recipe.tile not in ("auto", "none"),
    }
    names = [name for name, asked in by_layer.items() if asked]
    if gpus > 1 and names:
        what = "goes with layers that are computed one by one, on one GPU"
        remedy = f"Leave {'it' if len(names) == 1 else 'them'} out, or use one GPU."
        fields = ", ".join(f"{name} = {getattr(recipe, name)}" for name in names)
        raise RecipeError(what, where=f"{fields}", remedy=remedy)


def limited(machine: Machine, recipe: Recipe) -> Machine:
    """The machine with no more GPU memory than the recipe may take."""
    limit = None if recipe.gpu_memory == "auto" else parse_size(recipe.gpu_memory)
    return replace(machine, gpu_bytes=min(machine.gpu_bytes, limit)) if limit else machine


def job_on(recipe: Recipe, machine: Machine) -> Job:
    """What a recipe asks for on a machine."""
    wide = recipe.dtype == "fp32" or (recipe.dtype == "auto" and not machine.has_gpu and not cpu_has_bf16())
    return job_of(recipe, 4 if wide else 2, gpu=machine.has_gpu)


def make_plan(recipe: Recipe, machine: Machine, gpus: int = 1, attended: float = 0.0) -> Plan:
    """The recipe as it stands. `attended`: as in a job."""
    if gpus > recipe.batch_size:
        raise RecipeError(
            f"each GPU needs a row, and batch_size is {recipe.batch_size}",
            where=f"--gpus {gpus}",
            remedy=f"Use --batch-size {gpus}, or fewer GPUs.",
        )
    check_one_gpu(recipe, gpus)
    if recipe.matmul == "fp8" and machine.predicts_time and not machine.fp8_flops_per_s:
        what = f"Penstock has no fp8 products for {machine.name}"
        remedy = "Use --matmul bf16. It has them for NVIDIA's GPUs from Ada and Hopper on."
        raise RecipeError(what, where="matmul = 'fp8'", remedy=remedy)
    job, machine = replace(job_on(recipe, machine), attended=attended), limited(machine, recipe)
    check_inputs(recipe, job.architecture.layers)
    if recipe.matmul == "fp8":
        check_fp8(job.architecture, recipe.model)
    recipe = with_recompute(recipe, machine, gpus)
    settings = Settings(recipe.states, recipe.rows_on(gpus), recipe.recompute)
    if (chosen := job_on(recipe, machine)).asks_for_layers:
        streamed = chosen.streamed_choices[0]
        tile = tile_tokens(recipe)
        settings = replace(settings, streamed=streamed, order=chosen.order, inputs=chosen.inputs, tile=tile)
    return fitting(predict(job, settings, machine, gpus))


def make_report(
    recipe: Recipe,
    machine: Machine,
    gpus: int = 1,
    *,
    best: bool = False,
    length: RunLength | None = None,
    unknown: str = Report.unknown,
) -> Report:
    """The plan, the whole run, and what else could be done. `best`: format, micro-batch and recompute are free."""
    stated = plan = make_plan(recipe, machine, gpus)
    if best:
        plan = solve(plan.job, plan.machine, gpus) or plan
    found = alternatives(plan) if plan.fits else []
    others = tuple(replace(other, flags=flags_between(stated, other.plan)) for other in found)
    note = check_rope(plan.job.architecture, recipe)
    return Report(recipe.name, plan, length, others, flags_between(stated, plan), note, unknown)


def headline(plan: Plan) -> str:
    """What was planned, in one line."""
    settings = plan.settings
    recompute = "no recompute" if settings.recompute == "none" else f"recompute {settings.recompute}"
    if settings.by_layer:
        layers, order = plan.job.architecture.layers, f"order {settings.order}, inputs {settings.inputs}"
        weights = f"{settings.streamed} of {layers} layers stream" if settings.streamed else "weights resident"
        recompute = f"{weights}, {order if plan.gpus == 1 else recompute}"
        recompute += f", tiles of {settings.tile:,} tokens" if settings.tile else ""
    exact = "exact fp32 state" if settings.states == "fp32" else f"{settings.states} moments"
    clip = "clipped" if plan.job.clip else "not clipped"
    exact = f"fp8 products, {exact}" if plan.job.matmul == "fp8" else exact
    rows = counted(settings.micro_batch, "row")
    return f"{exact}, {rows} at once, {recompute}, updates {plan.job.chosen_update} ({clip})"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e8 else f"{number / 1e6:,.1f} M"


def gpus_in_words(machine: Machine, gpus: int) -> str:
    """`2 x gh200 (from data sheets, not measured)`."""
    if not machine.has_gpu:
        return f"{machine.name}, which has no GPU"
    measured = "measured" if gpus == 1 else "rates of one were measured"
    return f"{gpus} x {machine.name} ({measured if machine.measured else 'from data sheets, not measured'})"


def homes_in_words(plan: Plan) -> str:
    """Shares by home; on a machine without a GPU there is only one place."""
    if not plan.machine.has_gpu:
        return "beside the weights"
    return ", ".join(f"{share:.0%} {name}" for name, share in plan.split.shares().items())


def lines(report: Report) -> list[str]:
    """All of it. Of what does not fit only the memory: a speed that nobody can reach is no information."""
    plan, job, machine = report.plan, report.plan.job, report.plan.machine
    found = [
        f"{report.name} on {gpus_in_words(machine, plan.gpus)}: {_count(plan.num_params)} parameters, "
        f"{counted(job.batch_size, 'row')} of {job.length:,} tokens a step",
        f"  {headline(plan)}" + ("" if plan.fits else ": does not fit"),
        *([f"  chosen by the solver: {' '.join(report.flags)}"] if report.flags else []),
        *([f"  {report.note}"] if report.note else []),
        "",
        *_memory(plan),
    ]
    if plan.fits:
        found += ["", *_time(plan, report)]
    if report.others and machine.predicts_time:
        found += ["", "Other settings that fit:", *(line for other in report.others for line in _other(plan, other))]
    rates = [f"Rates of {machine.name}:", *(f"  {source}" for source in machine.sources)]
    return [*found, "", *rates] if machine.sources else found


def _memory(plan: Plan) -> list[str]:
    share = " (of one GPU)" if plan.gpus > 1 else ""
    found: list[str] = []
    places: list[tuple[tuple[str, ...], str, int]]
    places = [(("gpu",), "GPU memory", plan.machine.gpu_bytes), (("host",), "Host memory", plan.machine.host_bytes)]
    if plan.machine.unified:
        places = [(("gpu", "host"), "Memory, one for GPU and host", plan.machine.host_bytes)]
    for where, name, size in places if plan.machine.has_gpu else places[1:]:
        parts = [b for b in plan.buffers if b.place in where and b.num_bytes >= 5e6]
        total = sum(b.num_bytes for b in parts)
        free, what = gpu_reserve(plan.machine.gpu_bytes), "fragments and workspaces"
        if where != ("gpu",):
            sharing = sharing_a_host(plan.machine, plan.gpus)
            size, free = size // sharing, host_reserve(plan.machine) // sharing
            what = "the data, the page cache, other programs"
        found.append(
            f"{name}{share}: {total / 1e9:,.1f} GB of {size / 1e9:,.1f}; {free / 1e9:.1f} are kept free for {what}"
        )
        for part in sorted(parts, key=lambda b: -b.num_bytes):
            note = ""
            if part.name == "activations" and plan.gradient_bytes:
                note = f"  beside all gradients; {plan.activation_bytes / 1e9:.1f} before there are any"
            found.append(f"  {part.name:<24}{part.num_bytes / 1e9:>8.2f}{note}")
    written = plan.disk
    copy = "streamed weights go to host memory once" if plan.settings.streamed else "no copy in host memory"
    found.append(f"Loading: {plan.loading / 1e9:,.1f} GB at the peak; {copy}")
    kept = {0: "no checkpoint", 1: "one, at the end"}.get(plan.job.checkpoints, f"{plan.job.checkpoints} at once")
    found.append(
        f"Disk: {written.checkpoint_bytes / 1e9:,.1f} GB a checkpoint, {written.peak_bytes / 1e9:,.1f} at the peak "
        f"({kept}, and the model); saving takes no extra memory"
    )
    return found


def _time(plan: Plan, report: Report) -> list[str]:
    s, length = plan.seconds, report.length
    homes = homes_in_words(plan)
    if not plan.machine.predicts_time:
        found = ["Time: not predicted without a GPU; `penstock train` shows what is left after its first step"]
        if length:
            found.insert(0, f"Whole run: {counted(length.steps, 'step')}, {length.tokens:,} tokens ({length.how})")
        return found
    lanes = {"link, each way": s.link, "CPU": s.cpu, "updates": s.update, "between GPUs": s.exchange}
    beside = ", ".join(f"{name} {value:.3f}" for name, value in lanes.items() if value > 0.0005)
    crossed = (
        ("in", [(c.name, c.in_bytes) for c in plan.crossings]),
        ("out", [(c.name, c.out_bytes) for c in plan.crossings]),
    )
    found = [
        f"State lives: {homes}",
        *(
            [f"Link: {'; '.join(_crossed(*way) for way in crossed)}"]
            if plan.settings.by_layer and plan.crossings
            else []
        ),
        f"Step: {s.step:.3f} s = forward {s.forward:.3f} + backward {s.backward:.3f} + recompute {s.recompute:.3f} "
        f"+ exposed {s.exposed:.3f}",
        f"  lanes: {beside}",
        f"Speed: {plan.tokens_per_s:,.0f} tokens/s, {plan.tflops:,.3g} model TFLOP/s a GPU",
    ]
    if length is None:
        return [*found, f"Whole run: {report.unknown}, so its length is not known; --max-steps would fix it"]
    if abs(report.step_seconds / s.step - 1) > ANOTHER:
        found.append(
            f"  with these examples: {report.step_seconds:.3f} s a step; the above is of one that fills its row"
        )
    clock = timedelta(seconds=round(length.steps * report.step_seconds))
    return [
        *found,
        f"Whole run: {counted(length.steps, 'step')}, {counted(length.tokens, 'token')}, {clock} ({length.how})",
    ]


def _crossed(way: str, parts: Sequence[tuple[str, float]]) -> str:
    """What goes one way over the link in a step."""
    named = ", ".join(f"{name} {num_bytes / 1e9:,.1f}" for name, num_bytes in parts if num_bytes)
    return f"{way} {sum(num_bytes for _, num_bytes in parts) / 1e9:,.1f} GB" + (f" ({named})" if named else "")


def _other(base: Plan, other: Alternative) -> list[str]:
    step, change = other.plan.seconds.step, other.plan.seconds.step / base.seconds.step - 1
    text = f"  {step:7.3f} s ({change:+.0%}), {other.plan.tokens_per_s:,.0f} tokens/s: {' '.join(other.flags)}"
    return [text, f"{'':12}{other.trades or 'the same mathematics'}"]


def short(plan: Plan) -> str:
    """A line for `train`."""
    s = plan.seconds
    homes = homes_in_words(plan)
    host = f", {plan.peak_bytes('host') / 1e9:.1f} GB host" if plan.machine.has_gpu else ""
    device = "gpu" if plan.machine.has_gpu else "host"
    time = f"{s.step:.3g} s a step, {plan.tokens_per_s:,.0f} tokens/s; " if plan.machine.predicts_time else ""
    return (
        f"planned: {plan.peak_bytes(device) / 1e9:.1f} GB {device.upper() if device == 'gpu' else device}{host}; "
        f"{time}{headline(plan)}; state {homes}"
    )


def compare(plan: Plan, step_seconds: Sequence[float], gpu_bytes: int, host_bytes: int, cost_share: float = 1.0) -> str:
    """How reality compares. The first two steps compile kernels and make buffers, so that they do not count.

    `cost_share`: what the others cost beside a mean step, of which the plan is.
    """
    real, expected = statistics.median(step_seconds[2:] or step_seconds), cost_share * plan.seconds.step
    parts = []
    if plan.machine.predicts_time:
        parts.append(_against(f"{real:.3g} s a step", real, expected, f"{expected:.3g}"))
    if gpu_bytes:
        planned = plan.peak_bytes("gpu")
        parts.append(_against(f"{gpu_bytes / 1e9:.1f} GB GPU", gpu_bytes, planned, f"{planned / 1e9:.1f}"))
    planned = plan.peak_bytes("host")
    parts.append(_against(f"{host_bytes / 1e9:.1f} GB host", host_bytes, planned, f"{planned / 1e9:.1f}"))
    said = f"after {counted(len(step_seconds), 'step')}: " + "; ".join(parts)
    if plan.machine.predicts_time and not 1 - FAR_OFF < real / expected < 1 + FAR_OFF:
        said += "\n  far from the plan: if this machine was busy when it was measured, --remeasure of `plan` helps"
    return said


def _against(text: str, real: float, planned: float, number: str) -> str:
    return f"{text}, planned {number} ({real / planned - 1:+.0%})"
