"""`penstock plan --all`: every preset on one, two and four GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.machine.known import Machine
from penstock.plan.predict import Plan
from penstock.plan.report import job_of
from penstock.plan.solve import EVERYTHING, solve
from penstock.recipe.presets import ARCHITECTURES, PRESETS

REFERENCE_GPUS = {
    "llama-8b": 1, "qwen3-14b": 1, "phi-4": 1, "gpt-oss-20b": 1, "seed-oss-36b": 2, "qwen3-30b-a3b": 2, "llama-70b": 4,
}  # fmt: skip
"""Superchips that the launch scripts of DeepSpeedExamples' DeepSpeed-SuperOffload use."""


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
        "best settings: format, tokens/s, recompute or layers that stream, rows at once on a GPU",
        f"{'':<16}" + "".join(f"{f'{n} GPU' + ('s' if n > 1 else ''):<{width}}" for n in counts).rstrip(),
    ]
    for name in dict.fromkeys(cell.preset for cell in cells):
        own = {cell.gpus: cell.plan for cell in cells if cell.preset == name}
        found.append(f"{name:<16}" + "".join(f"{_cell(own[n]):<{width}}" for n in counts).rstrip())
    if any(cell.plan and not cell.plan.job.clip for cell in cells):
        found.append("*: not clipped (--max-grad-norm 0); clipped it does not fit")
    return [*found, "", *_fewer(cells)]


def _cell(plan: Plan | None) -> str:
    if plan is None:
        return "does not fit"
    settings = plan.settings
    clip = "" if plan.job.clip else " *"
    rate = f" {plan.tokens_per_s:,.0f}" if plan.machine.predicts_time else ""
    how = f"streams {settings.streamed}" if settings.streamed else settings.recompute
    return f"{settings.states}{rate} {how} {settings.micro_batch}{clip}"


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
