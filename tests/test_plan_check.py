"""The table of benchmarks/plan_check.py, from the committed rows of the H200 instead of a new run."""

import json
import subprocess
import sys
from pathlib import Path

from penstock.cli import main

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/2026-11-15-h200/rows.jsonl"
JOBS = [
    ("qwen3-14b", "after-norm", 4, "selected", ["qwen3-14b"]),
    ("qwen3-14b", "in-backward", 4, "selected:14", ["qwen3-14b", "--max-grad-norm", "0"]),
    ("phi-4", "in-backward", 4, "selected:14", ["phi-4", "--max-grad-norm", "0"]),
    ("llama-8b", "after-norm", 1, "none", ["llama-8b", "--micro-batch-size", "1"]),
]


def test_the_plan_is_within_the_limits_of_what_was_measured(tmp_path, capsys):
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for number, (*key, words) in enumerate(JOBS, start=1):
        assert main(["plan", *words, "--recompute", key[-1], "--gpu", "h200", "--json"]) == 0
        (tmp_path / f"plan-{number}.json").write_text(capsys.readouterr().out)
        names = ("model", "schedule", "micro_batch", "recompute")
        own = [row for row in rows if [row[name] for name in names] == key and row["compiled"]][-1:]
        directory = tmp_path / f"bench-{number}"
        directory.mkdir()
        (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (tmp_path / "plan-5.json").write_text("")
    command = [sys.executable, ROOT / "benchmarks/plan_check.py", tmp_path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(text.splitlines()) == 1 + 3 * len(JOBS) + 1
    assert "over the limit" not in text, text
    assert "no row" in text
    print(text)
