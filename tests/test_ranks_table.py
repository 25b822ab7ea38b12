"""The table of benchmarks/ranks.py: rows that ranks on the H200 left, against the plan of today."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from penstock.machine.known import MACHINES
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe, to_dict, with_values

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("ranks_table", ROOT / "benchmarks/ranks.py")
ranks_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ranks_table)


RUNS = {
    **{f"ranks-{n}": {"batch_size": 4, "micro_batch_size": 1, "homes": "gpu=0.5,host=0.5"} for n in (1, 2, 4)},
    **{f"host-{n}": {"batch_size": 4, "micro_batch_size": 4 // n, "homes": "host"} for n in (2, 4)},
    **{f"streamed-{n}": {"batch_size": 4, "micro_batch_size": 4 // n, "weights": "streamed"} for n in (2, 4)},
    **{f"streamed-{n}-again": {"batch_size": 8, "micro_batch_size": 1, "weights": "streamed"} for n in (2, 4)},
}
"""What benchmarks/ranks.sh told runs whose rows do not say it yet. State of streamed layers was on the host."""


def recipe_of(row):
    if "settings" in row:
        return with_values(Recipe(), row["settings"], "row")
    shared = {
        "shape": "num_hidden_layers=8",
        "recompute": "full",
        "gpu_memory": f"{132 // row['ranks']}GB",
        "dtype": "bf16",
    }
    return with_values(replace(PRESETS["llama-8b"], init="random"), {**shared, **RUNS[row["run"]]}, "row")


def rows():
    for file in sorted(ROOT.glob("benchmarks/results/*/ranks/*.txt")):
        for line in file.read_text().splitlines():
            if line.startswith('{"run"'):
                row = json.loads(line)
                yield pytest.param(row, id=f"{file.parts[-3]}-{row['run']}")


ROWS = list(rows())


def off(row):
    """As the table has it, with the plan of today. Old rows have the first rank's memory where there is no most."""
    plan = ranks_table.planned(recipe_of(row), MACHINES["h200"], row["ranks"])
    plan = ranks_table.with_share(plan, row.get("streamed_share", 0.0))
    gpu, host = (plan.peak_bytes(place) / 1e9 for place in ("gpu", "host"))
    most = {"gpu_most_gb": row["gpu_gb"], "host_most_gb": row["host_gb"]}
    return ranks_table.off_by({**most, **row, "gpu_planned_gb": gpu, "host_planned_gb": host})


def test_every_kind_of_run_is_there():
    assert {row.values[0]["run"] for row in ROWS} >= set(RUNS)


@pytest.mark.parametrize("row", ROWS)
def test_the_plan_is_within_the_limit_of_what_ranks_took(row):
    found = off(row)
    assert set(found) == {"GPU", "host"}
    for place, share in found.items():
        assert abs(share) <= ranks_table.LIMIT, f"{place} {share:+.1%}"


def run_of(row, path, *gpu_gb):
    """What the table reads of a run: each rank's memory of the GPU is given, that of the host as planned."""
    (path / "facts").mkdir(parents=True)
    uses = [[{"place": "gpu", "num_bytes": int(gb * 1e9)}, {"place": "host", "num_bytes": 11.8e9}] for gb in gpu_gb]
    for name, fact in {"memory": uses[0], "memory_of_other_ranks": uses[1:], "placement": []}.items():
        (path / "facts" / f"{name}.json").write_text(json.dumps(fact))
    (path / "recipe.yaml").write_text(yaml.safe_dump(to_dict(recipe_of(row))))
    (path / "metrics.jsonl").write_text('{"step_seconds": 0.7, "loss": 12.0}\n' * 4)
    (path / "ranks.json").write_text(json.dumps({"ranks": len(gpu_gb)}))
    return str(path)


@pytest.fixture
def on_an_h200(monkeypatch):
    monkeypatch.setattr(ranks_table, "this_machine", lambda **_: MACHINES["h200"])


def test_a_rank_that_took_more_than_planned_fails_the_table(tmp_path, capsys, on_an_h200):
    row = next(row.values[0] for row in ROWS if row.values[0]["run"] == "ranks-2")
    within, beyond = run_of(row, tmp_path / "within", 18.6, 18.8), run_of(row, tmp_path / "beyond", 18.6, 20.5)
    assert ranks_table.main(within) == 0
    assert "over the limit" not in capsys.readouterr().out
    assert ranks_table.main(within, beyond) == 1
    said = capsys.readouterr().out.splitlines()
    assert ["over the limit: GPU -9" in line for line in said[1:3]] == [False, True]
    written = json.loads(said[-1])
    assert (written["gpu_gb"], written["gpu_most_gb"], written["host_most_gb"]) == (18.6, 20.5, 11.8)
    others = {field: getattr(Recipe(), field) for field in to_dict(Recipe()) if field not in ranks_table.PLANNED}
    assert recipe_of(written) == replace(recipe_of(row), **others)


def test_a_run_that_did_not_come_so_far_fails_the_table_and_the_others_are_shown(tmp_path, capsys, on_an_h200):
    row = next(row.values[0] for row in ROWS if row.values[0]["run"] == "ranks-2")
    assert ranks_table.main(str(tmp_path / "none"), run_of(row, tmp_path / "whole", 18.6, 18.6)) == 1
    assert "whole " in capsys.readouterr().out
