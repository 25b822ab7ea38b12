"""Finished steps: what is said of them, and when they end the run."""

import dataclasses
import math
from contextlib import nullcontext

import pytest

from penstock.errors import Diverged
from penstock.machine.known import H200
from penstock.plan.report import make_plan
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.report.metrics import StepRow
from penstock.run.progress import Progress

DEMO = PRESETS["demo"]


def test_skips_in_a_row_end_the_run_and_name_the_first():
    progress = Progress(Recipe(skip_limit=3), 100, Console(quiet=True))

    def row(step, skipped):
        return StepRow(step, math.nan if skipped else 1.0, 1e-5, math.nan, 10, 5, 0.1, skipped)

    for step, skipped in enumerate([True, True, False, True, True], start=1):
        progress.row(row(step, skipped))
    with pytest.raises(Diverged, match=r"step 4: .* 3 steps in a row"):
        progress.row(row(6, True))


@pytest.mark.parametrize(("steps", "bad", "diverged"), [(8, 7, True), (8, 4, True), (8, 3, False), (1, 1, True)])
def test_a_short_run_that_skipped_its_second_half_has_diverged(steps, bad, diverged):
    progress = Progress(Recipe(skip_limit=10), steps, Console(quiet=True))
    rows = [StepRow(n, 1.0, 1e-5, 1.0, 10, 5, 0.1, n > steps - bad) for n in range(1, steps + 1)]
    for row in rows[:-1]:
        progress.row(row)
    with pytest.raises(Diverged, match="up to the last") if diverged else nullcontext():
        progress.row(rows[-1])


def test_after_ten_steps_reality_is_compared_with_the_plan_once(capsys):
    plan = make_plan(DEMO, H200)
    progress = Progress(DEMO, 30, Console(), plan)
    for step in range(1, 26):
        progress.row(StepRow(step, 1.0, 1e-5, 1.0, 100, 50, 2 * plan.seconds.step, False))
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("after ")]
    assert sum("far from the plan" in line and "--remeasure" in line for line in lines) == 1
    assert len(said) == 1
    assert said[0].startswith("after 10 steps: ")
    assert "(+100%)" in said[0]


def test_without_a_gpu_only_memory_is_compared(capsys):
    plan = make_plan(dataclasses.replace(DEMO, dtype="fp32"), dataclasses.replace(H200, name="cpu", gpu_bytes=0))
    progress = Progress(DEMO, 30, Console(), plan)
    for step in range(1, 12):
        progress.row(StepRow(step, 1.0, 1e-5, 1.0, 100, 50, 9.0, False))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("after ")]
    assert "GB host, planned" in said
    assert "a step" not in said
