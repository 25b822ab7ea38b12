"""The table of benchmarks/plan_check.py, from the committed rows of the H200 instead of a new run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.command.cli import main
from penstock.plan import layout

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/2026-11-15-h200/rows.jsonl"
JOBS = [
    ["qwen3-14b", "--recompute", "selected"],
    ["qwen3-14b", "--recompute", "selected:14", "--max-grad-norm", "0"],
    ["phi-4", "--recompute", "selected:14", "--max-grad-norm", "0"],
    ["llama-8b", "--recompute", "none", "--micro-batch-size", "1", "--accumulate-dtype", "bf16"],
    ["qwen3-30b-a3b", "--recompute", "selected:36", "--states", "int8"],
]


@pytest.mark.slow
def test_the_plan_is_within_the_limits_of_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(layout, "LANDING_BYTES", 2**40)  # a place for every gradient, as there was then
    plans = []
    for words in JOBS:
        assert main(["plan", *words, "--gpu", "h200", "--json"]) == 0
        plans.append(capsys.readouterr().out.strip())
    (tmp_path / "plans.jsonl").write_text("\n".join([*plans, "{}"]) + "\n")
    rows = [row for row in RESULTS.read_text().splitlines() if json.loads(row)["compiled"]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    command = [sys.executable, ROOT / "benchmarks/plan_check.py", tmp_path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(text.splitlines()) == 1 + 3 * len(JOBS) + 1, text
    assert "over the limit" not in text, text
    assert "no plan" in text
    print(text)


def test_a_plan_that_was_not_run_as_planned_is_said_to_be_so(tmp_path, capsys):
    assert main(["plan", "qwen3-14b", "--recompute", "full:7", "--gpu", "h200", "--json"]) == 0
    (tmp_path / "plans.jsonl").write_text(capsys.readouterr().out)
    shutil.copy(RESULTS, tmp_path / "rows.jsonl")
    command = [sys.executable, ROOT / "benchmarks/plan_check.py", tmp_path]
    assert "no row with these settings" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
