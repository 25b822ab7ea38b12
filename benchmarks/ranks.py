"""Runs with several ranks in one table: seconds a step, what each lane had to do, and memory beside what was planned.

    python benchmarks/ranks.py RUN...

Each rank measures its own memory; the first one's is shown, and in the objects, one a run, that follow the table also
the most that one took of the GPU. Ranks that share a GPU share its speed and its link, which the plan does not know:
layers that stream are planned with the homes that their state has in the run.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from penstock.bench.this_machine import this_machine
from penstock.checkpoint.run_dir import run_recipe
from penstock.plan.predict import Plan
from penstock.plan.report import limited, make_plan
from penstock.plan.split import Split

WARM_UP = 3


def read(run: Path, name: str) -> object:
    file = run / "facts" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def row(run: Path) -> dict[str, object]:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    timeline, ranks = read(run, "timeline"), json.loads((run / "ranks.json").read_text())["ranks"]
    recipe = run_recipe(run)
    plan = make_plan(recipe, limited(this_machine(remeasure=False, say=lambda _: None), recipe), ranks)
    plan = with_homes(plan, read(run, "placement"))
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
        "host_planned_gb": round(plan.peak_bytes("host") / 1e9, 2),
        "lanes_s": {lane: round(seconds, 4) for lane, seconds in sorted(busy.items())},
    }


def by_place(uses: list[dict[str, object]]) -> dict[str, float]:
    taken: dict[str, float] = {}
    for use in uses:
        taken[use["place"]] = taken.get(use["place"], 0.0) + use["num_bytes"] / 1e9
    return taken


def with_homes(plan: Plan, placement: list[dict[str, object]]) -> Plan:
    away = plan.streamed_split
    if away is None:
        return plan
    state = {"stream": 0, "host": 0}
    layers = plan.job.architecture.layers
    streamed = [f"layers.{number}" for number in range(layers - plan.settings.streamed, layers)]
    for unit in placement:
        if unit["unit"].endswith(tuple(streamed)):
            state[unit["home"]] += unit["num_bytes"]
    share = state["stream"] / sum(state.values())
    num_params = away.stream + away.host
    now = Split(0.0, share * num_params, (1 - share) * num_params, 0.0)
    rest = plan.split.stream - away.stream, plan.split.host - away.host
    split = replace(plan.split, stream=rest[0] + now.stream, host=rest[1] + now.host)
    return replace(plan, split=split, streamed_split=now)


def line(one: dict[str, object]) -> str:
    gpu, host = (one["gpu_gb"], one["gpu_planned_gb"]), (one["host_gb"], one["host_planned_gb"])
    numbers = " ".join(f"{n:>8.2f}" for n in (*gpu, *host))
    return f"{one['run']:<12}{one['ranks']:>6}{one['step_s']:>10.3f} {numbers}"


if __name__ == "__main__":
    print(f"{'run':<12}{'ranks':>6}{'s a step':>10}{'GPU GB':>9}{'planned':>9}{'host GB':>9}{'planned':>9}")
    rows = []
    for name in sys.argv[1:]:
        try:
            rows.append(row(Path(name)))
            print(line(rows[-1]))
        except (OSError, ValueError, KeyError) as error:  # it did not come so far; the others count
            print(f"{Path(name).name}: {error!r}")
    for one in rows:
        print(json.dumps(one))
