"""`penstock plan`: a recipe on a machine, in words or as one JSON object.

Figures are in GB of 10^9 bytes, as the bench and the engine print them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from penstock.errors import RecipeError, UserError, counted
from penstock.machine.hardware import COMPILED_FROM, cpu_has_bf16
from penstock.machine.known import Machine
from penstock.plan.architecture import architecture_of
from penstock.plan.job import Job, Settings
from penstock.plan.layout import gpu_reserve
from penstock.plan.predict import Plan, host_reserve, predict, sharing_a_host
from penstock.plan.solve import (
    EVERYTHING,
    Alternative,
    Free,
    alternatives,
    flags_between,
    solve,
)
from penstock.recipe.lists import parse_homes
from penstock.recipe.presets import ARCHITECTURES, PRESETS
from penstock.recipe.recipe import Recipe

REFERENCE_GPUS = {
    "llama-8b": 1, "qwen3-14b": 1, "phi-4": 1, "gpt-oss-20b": 1, "seed-oss-36b": 2, "qwen3-30b-a3b": 2, "llama-70b": 4,
}  # fmt: skip
"""Superchips that the launch scripts of DeepSpeedExamples' DeepSpeed-SuperOffload use."""


FAR_OFF = 0.3
"""From which difference on a plan's seconds are doubted."""


@dataclass(frozen=True)
class RunLength:
    """The whole run."""

    steps: int
    tokens: int
    how: str
    """Where the figures come from, for people."""


@dataclass(frozen=True)
class Report:
    """A plan with all that is said about it."""

    name: str
    plan: Plan
    length: RunLength | None
    others: tuple[Alternative, ...]
    flags: tuple[str, ...] = ()
    """What the solver changed in the recipe, if it was free to."""


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
    )


def _checkpoints(recipe: Recipe) -> int:
    """On disk at once, at the most: those that are kept, and one that is being written."""
    if not recipe.keep:
        return 0
    return recipe.keep + recipe.keep_best + 1 if recipe.save_every or recipe.keep_best else 1


def with_recompute(recipe: Recipe, machine: Machine | None, gpus: int = 1) -> Recipe:
    """The recipe with a word for `recompute = auto`: the fastest that fits; of what is not known, `full`."""
    if recipe.recompute != "auto":
        return recipe
    if machine is None or not machine.has_gpu:
        return replace(recipe, recompute="none")
    try:
        plan = solve(job_on(recipe, machine), machine, gpus, Free(recipe.states, recipe.rows_on(gpus)))
    except UserError:  # a model that the plan does not know
        plan = None
    return replace(recipe, recompute=plan.settings.recompute if plan else "full")


def job_on(recipe: Recipe, machine: Machine) -> Job:
    """What a recipe asks for on a machine."""
    wide = recipe.dtype == "fp32" or (recipe.dtype == "auto" and not machine.has_gpu and not cpu_has_bf16())
    return job_of(recipe, 4 if wide else 2, gpu=machine.has_gpu)


def make_plan(recipe: Recipe, machine: Machine, gpus: int = 1) -> Plan:
    """The recipe as it stands."""
    if gpus > recipe.batch_size:
        raise RecipeError(
            f"each GPU needs a row, and batch_size is {recipe.batch_size}",
            where=f"--gpus {gpus}",
            remedy=f"Use --batch-size {gpus}, or fewer GPUs.",
        )
    recipe = with_recompute(recipe, machine, gpus)
    settings = Settings(recipe.states, recipe.rows_on(gpus), recipe.recompute)
    return predict(job_on(recipe, machine), settings, machine, gpus)


def make_report(
    recipe: Recipe, machine: Machine, gpus: int = 1, *, best: bool = False, length: RunLength | None = None
) -> Report:
    """The plan, the whole run, and what else could be done. `best`: format, micro-batch and recompute are free."""
    stated = plan = make_plan(recipe, machine, gpus)
    if best:
        plan = solve(plan.job, machine, gpus) or plan
    found = alternatives(plan) if plan.fits else []
    others = tuple(replace(other, flags=flags_between(stated, other.plan)) for other in found)
    return Report(recipe.name, plan, length, others, flags_between(stated, plan))


# --- for people ---------------------------------------------------------------------------------------------------


def headline(plan: Plan) -> str:
    """What was planned, in one line."""
    settings = plan.settings
    recompute = "no recompute" if settings.recompute == "none" else f"recompute {settings.recompute}"
    exact = "exact fp32 state" if settings.states == "fp32" else f"{settings.states} moments"
    clip = "clipped" if plan.job.clip else "not clipped"
    return f"{exact}, {counted(settings.micro_batch, 'row')} at once, {recompute}, updates {plan.job.schedule} ({clip})"


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
        "",
        *_memory(plan),
    ]
    if plan.fits:
        found += ["", *_time(plan, report.length)]
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
    found.append(f"Loading: {plan.loading / 1e9:,.1f} GB at the peak; no copy in host memory")
    kept = {0: "no checkpoint", 1: "one, at the end"}.get(plan.job.checkpoints, f"{plan.job.checkpoints} at once")
    found.append(
        f"Disk: {written.checkpoint_bytes / 1e9:,.1f} GB a checkpoint, {written.peak_bytes / 1e9:,.1f} at the peak "
        f"({kept}, and the model); saving takes no extra memory"
    )
    return found


def _time(plan: Plan, length: RunLength | None) -> list[str]:
    s = plan.seconds
    homes = homes_in_words(plan)
    if not plan.machine.predicts_time:
        found = ["Time: not predicted without a GPU; `penstock train` shows what is left after its first step"]
        if length:
            found.insert(0, f"Whole run: {counted(length.steps, 'step')}, {length.tokens:,} tokens ({length.how})")
        return found
    lanes = {"link, each way": s.link, "CPU": s.cpu, "updates": s.update, "between GPUs": s.exchange}
    beside = ", ".join(f"{name} {value:.3f}" for name, value in lanes.items() if value > 0.0005)
    found = [
        f"State lives: {homes}",
        f"Step: {s.step:.3f} s = forward {s.forward:.3f} + backward {s.backward:.3f} + recompute {s.recompute:.3f} "
        f"+ exposed {s.exposed:.3f}",
        f"  lanes: {beside}",
        f"Speed: {plan.tokens_per_s:,.0f} tokens/s, {plan.tflops:,.3g} model TFLOP/s a GPU",
    ]
    if length is None:
        return [*found, "Whole run: the data is not here, so its length is not known; --max-steps would fix it"]
    clock = timedelta(seconds=round(length.steps * s.step))
    return [
        *found,
        f"Whole run: {counted(length.steps, 'step')}, {counted(length.tokens, 'token')}, {clock} ({length.how})",
    ]


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


def compare(plan: Plan, step_seconds: Sequence[float], gpu_bytes: int, host_bytes: int) -> str:
    """How reality compares. The first two steps compile kernels and make buffers, so that they do not count."""
    real = statistics.median(step_seconds[2:] or step_seconds)
    parts = []
    if plan.machine.predicts_time:
        parts.append(_against(f"{real:.3g} s a step", real, plan.seconds.step, f"{plan.seconds.step:.3g}"))
    if gpu_bytes:
        planned = plan.peak_bytes("gpu")
        parts.append(_against(f"{gpu_bytes / 1e9:.1f} GB GPU", gpu_bytes, planned, f"{planned / 1e9:.1f}"))
    planned = plan.peak_bytes("host")
    parts.append(_against(f"{host_bytes / 1e9:.1f} GB host", host_bytes, planned, f"{planned / 1e9:.1f}"))
    said = f"after {counted(len(step_seconds), 'step')}: " + "; ".join(parts)
    if plan.machine.predicts_time and not 1 - FAR_OFF < real / plan.seconds.step < 1 + FAR_OFF:
        said += "\n  far from the plan: if this machine was busy when it was measured, --remeasure of `plan` helps"
    return said


def _against(text: str, real: float, planned: float, number: str) -> str:
    return f"{text}, planned {number} ({real / planned - 1:+.0%})"


# --- every preset -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One preset on so many GPUs."""

    preset: str
    gpus: int
    plan: Plan | None


def matrix(machine: Machine, counts: Sequence[int] = (1, 2, 4)) -> list[Cell]:
    """Every preset with an architecture on every number of GPUs, with the best settings; clipped, if that fits."""
    jobs = {r.name: job_of(r) for r in PRESETS.values() if r.model in ARCHITECTURES}
    return [
        Cell(name, n, solve(job, machine, n, EVERYTHING) or solve(replace(job, clip=False), machine, n, EVERYTHING))
        for name, job in jobs.items()
        for n in counts
    ]


def matrix_lines(machine: Machine, cells: Sequence[Cell]) -> list[str]:
    """A row a preset, a column a number of GPUs."""
    counts = sorted({cell.gpus for cell in cells})
    width = 30
    found = [
        f"Every preset on {machine.name} ({'one measured' if machine.measured else 'from data sheets, not measured'}), "
        "best settings: format, tokens/s, recompute, rows at once on a GPU",
        f"{'':<16}" + "".join(f"{f'{n} GPU' + ('s' if n > 1 else ''):<{width}}" for n in counts).rstrip(),
    ]
    for name in dict.fromkeys(cell.preset for cell in cells):
        own = {cell.gpus: cell.plan for cell in cells if cell.preset == name}
        found.append(f"{name:<16}" + "".join(f"{_cell(own[n]):<{width}}" for n in counts).rstrip())
    notes = ["*: not clipped (--max-grad-norm 0); clipped it does not fit"]
    return [*found, *(notes if any(c.plan and not c.plan.job.clip for c in cells) else []), "", *_fewer(cells)]


def _cell(plan: Plan | None) -> str:
    if plan is None:
        return "does not fit"
    settings = plan.settings
    clip = "" if plan.job.clip else " *"
    rate = f" {plan.tokens_per_s:,.0f}" if plan.machine.predicts_time else ""
    return f"{settings.states}{rate} {settings.recompute} {settings.micro_batch}{clip}"


def _fewer(cells: Sequence[Cell]) -> list[str]:
    """Where fewer GPUs than the reference's are enough."""
    found: list[str] = []
    for name, needed in REFERENCE_GPUS.items():
        fitting = {c.gpus: c.plan for c in cells if c.preset == name and c.plan is not None}
        if not fitting:
            found.append(f"{name}: does not fit (the reference uses {needed} GH200)")
        elif min(fitting) < needed:
            plan = fitting[min(fitting)]
            how = f"{plan.settings.states} state" + ("" if plan.job.clip else ", not clipped")
            found.append(f"{name}: {min(fitting)} is enough with {how} (the reference uses {needed} GH200)")
    return found


# --- for programs -------------------------------------------------------------------------------------------------


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain values."""
    return {
        "fits": plan.fits,
        "gpus": plan.gpus,
        "machine": plan.machine.name,
        "measured": plan.machine.measured,
        "batch_size": plan.job.batch_size,
        "max_length": plan.job.length,
        "settings": asdict(plan.settings),
        "schedule": plan.job.schedule,
        "homes": plan.split.shares(),
        "gpu_bytes": plan.peak_bytes("gpu"),
        "gpu_room_bytes": plan.gpu_room if plan.machine.has_gpu else 0.0,
        "host_bytes": plan.peak_bytes("host"),
        "host_room_bytes": plan.host_room if plan.machine.has_gpu else plan.gpu_room,  # its one memory
        "buffers": [asdict(b) for b in plan.buffers],
        "activation_bytes": plan.activation_bytes,
        "loading_bytes": plan.loading,
        "disk": asdict(plan.disk),
        "seconds": asdict(plan.seconds) | {"step": plan.seconds.step} if plan.machine.predicts_time else None,
        "tokens_per_s": plan.tokens_per_s if plan.machine.predicts_time else None,
        "model_tflops": plan.tflops if plan.machine.predicts_time else None,
    }


def report_json(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    others = [{"flags": list(o.flags), "trades": o.trades, **as_json(o.plan)} for o in report.others]
    length = asdict(report.length) if report.length else None
    sources = {"sources": list(report.plan.machine.sources)}
    return {
        "recipe": report.name,
        **as_json(report.plan),
        "run": length,
        "flags": report.flags,
        "alternatives": others,
    } | sources
