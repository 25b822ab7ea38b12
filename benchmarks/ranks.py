"""Runs with several ranks in one table: seconds a step, what each lane had to do, and memory beside what was planned.

    python benchmarks/ranks.py RUN...

Each rank measures its own memory; the first one's is shown, and in the objects, one a run, that follow the table also
the most that one took. A run of which that is more than LIMIT off the plan is marked, and the exit code is 1, as it is
where a run cannot be read. Ranks that share a GPU share its speed and its link, which the plan does not know: layers
that stream are planned with the homes that their state has in the run.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from penstock.bench.this_machine import this_machine
from penstock.checkpoint.run_dir import run_recipe
from penstock.machine.known import Machine
from penstock.plan.predict import Plan
from penstock.plan.report import limited, make_plan
from penstock.plan.split import Split
from penstock.recipe.recipe import Recipe

WARM_UP = 3
LIMIT = 0.05
"""As in `plan_check.py`."""
PLANNED = (
    "model", "init", "shape", "dtype", "batch_size", "micro_batch_size", "max_length", "recompute", "compile", "mode",
    "attention", "states", "homes", "weights", "update", "max_grad_norm", "accumulate_dtype", "matmul", "gpu_memory",
)  # fmt: skip
"""Fields of the recipe that memory depends on, so that a row can be planned again without its run."""


def read(run: Path, name: str) -> object:
    file = run / "facts" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def row(run: Path) -> dict[str, object]:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    timeline, ranks = read(run, "timeline"), json.loads((run / "ranks.json").read_text())["ranks"]
    recipe, machine = run_recipe(run), this_machine(remeasure=False, say=lambda _: None)
    plan = planned(recipe, machine, ranks)
    share = streamed_share(plan, read(run, "placement"))
    plan = with_share(plan, share)
    taken, *others = [by_place(uses) for uses in (read(run, "memory"), *read(run, "memory_of_other_ranks"))]
    busy: dict[str, float] = {}
    for span in timeline.get("spans", ()):
        busy[span["lane"]] = busy.get(span["lane"], 0.0) + span["end"] - span["start"]
    return {
        "run": run.name,
        "ranks": ranks,
        "step_s": round(statistics.median(line["step_seconds"] for line in metrics), 4),
        "loss": metrics[-1]["loss"],
        "gpu_gb": round(taken.get("gpu", 0.0), 2),
        "gpu_most_gb": round(max(one.get("gpu", 0.0) for one in (taken, *others)), 2),
        "gpu_planned_gb": round(plan.peak_bytes("gpu") / 1e9, 2),
        "host_gb": round(taken.get("host", 0.0), 2),
        "host_most_gb": round(max(one.get("host", 0.0) for one in (taken, *others)), 2),
        "host_planned_gb": round(plan.peak_bytes("host") / 1e9, 2),
        "streamed_share": share,
        "settings": {field: getattr(recipe, field) for field in PLANNED},
        "lanes_s": {lane: round(seconds, 4) for lane, seconds in sorted(busy.items())},
    }


def by_place(uses: list[dict[str, object]]) -> dict[str, float]:
    taken: dict[str, float] = {}
    for use in uses:
        taken[use["place"]] = taken.get(use["place"], 0.0) + use["num_bytes"] / 1e9
    return taken


def planned(recipe: Recipe, machine: Machine, ranks: int) -> Plan:
    return make_plan(recipe, limited(machine, recipe), ranks)


def streamed_share(plan: Plan, placement: list[dict[str, object]]) -> float | None:
    """Of the state of layers whose weights stream, what streams too; None where no weights do."""
    if plan.streamed_split is None:
        return None
    state = {"stream": 0, "host": 0}
    layers = plan.job.architecture.layers
    streamed = [f"layers.{number}" for number in range(layers - plan.settings.streamed, layers)]
    for unit in placement:
        if unit["unit"].endswith(tuple(streamed)):
            state[unit["home"]] += unit["num_bytes"]
    return state["stream"] / sum(state.values())


def with_share(plan: Plan, share: float | None) -> Plan:
    """The plan with that share, and the rest of the state of those layers on the host."""
    away = plan.streamed_split
    if away is None or share is None:
        return plan
    num_params = away.stream + away.host
    now = Split(0.0, share * num_params, (1 - share) * num_params, 0.0)
    rest = plan.split.stream - away.stream, plan.split.host - away.host
    split = replace(plan.split, stream=rest[0] + now.stream, host=rest[1] + now.host)
    return replace(plan, split=split, streamed_split=now)


def off_by(one: dict[str, object]) -> dict[str, float]:
    """The plan's memory over the most that one rank took, less one."""
    measured = {"GPU": one["gpu_most_gb"], "host": one["host_most_gb"]}
    plans = {"GPU": one["gpu_planned_gb"], "host": one["host_planned_gb"]}
    return {place: plans[place] / taken - 1 for place, taken in measured.items() if taken}


def line(one: dict[str, object]) -> str:
    gpu, host = (one["gpu_gb"], one["gpu_planned_gb"]), (one["host_gb"], one["host_planned_gb"])
    numbers = " ".join(f"{n:>8.2f}" for n in (*gpu, *host))
    over = [f"{place} {off:+.1%}" for place, off in off_by(one).items() if abs(off) > LIMIT]
    mark = f"  over the limit: {', '.join(over)}" if over else ""
    return f"{one['run']:<18}{one['ranks']:>6}{one['step_s']:>10.3f} {numbers}{mark}"


def main(*runs: str) -> int:
    print(f"{'run':<18}{'ranks':>6}{'s a step':>10}{'GPU GB':>9}{'planned':>9}{'host GB':>9}{'planned':>9}")
    rows, code = [], 0
    for name in runs:
        try:
            rows.append(row(Path(name)))
            print(line(rows[-1]))
        except (OSError, ValueError, KeyError) as error:  # it did not come so far; the others count
            print(f"{Path(name).name}: {error!r}")
            code = 1
    for one in rows:
        print(json.dumps(one))
        code = code or int(any(abs(off) > LIMIT for off in off_by(one).values()))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
