"""Finished steps: what is said of them, and when they end the run."""

import dataclasses
import math
import re
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.cost import TokenFlops
from penstock.errors import Diverged
from penstock.machine.known import H200
from penstock.plan.memory import Work
from penstock.plan.report import make_plan
from penstock.plan.speed import arithmetic
from penstock.recipe.presets import ARCHITECTURES, PRESETS
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.report.metrics import StepRow
from penstock.run.progress import WIDEST, Pace, Progress

DEMO = PRESETS["demo"]


def test_skips_in_a_row_end_the_run_and_name_the_first():
    progress = Progress(Recipe(skip_limit=3), 100, np.ones(100), Console(quiet=True))

    def row(step, skipped):
        return StepRow(step, math.nan if skipped else 1.0, 1e-5, math.nan, 10, 5, 0.1, skipped)

    for step, skipped in enumerate([True, True, False, True, True], start=1):
        progress.row(row(step, skipped))
    with pytest.raises(Diverged, match=r"step 4: .* 3 steps in a row"):
        progress.row(row(6, True))


@pytest.mark.parametrize(("steps", "bad", "diverged"), [(8, 7, True), (8, 4, True), (8, 3, False), (1, 1, True)])
def test_a_short_run_that_skipped_its_second_half_has_diverged(steps, bad, diverged):
    progress = Progress(Recipe(skip_limit=10), steps, np.ones(steps), Console(quiet=True))
    rows = [StepRow(n, 1.0, 1e-5, 1.0, 10, 5, 0.1, n > steps - bad) for n in range(1, steps + 1)]
    for row in rows[:-1]:
        progress.row(row)
    with pytest.raises(Diverged, match="up to the last") if diverged else nullcontext():
        progress.row(rows[-1])


def row_of(step, seconds):
    return StepRow(step, 1.0, 1e-5, 1.0, 10, 5, seconds, False)


def lefts(printed):
    """Seconds left in every line, by its step."""
    found = (re.match(r"step +(\d+)/.* (\d+):(\d+):(\d+) left", line) for line in printed.splitlines())
    return {int(m[1]): 3600 * int(m[2]) + 60 * int(m[3]) + int(m[4]) for m in found if m}


COSTS = np.repeat([1.0, 10.0], 20) * 3e12


def test_time_left_is_that_of_the_steps_that_remain(capsys):
    """The second half costs ten times as much, which steps and seconds so far cannot tell."""
    progress = Progress(Recipe(log_every=1), 40, COSTS, Console())
    seconds = 7 * COSTS / COSTS[0]
    for step in range(1, 41):
        progress.row(row_of(step, float(seconds[step - 1])))
    assert lefts(capsys.readouterr().out) == {step: round(seconds[step:].sum()) for step in range(1, 41)}


def test_the_first_step_of_a_process_compiles_and_does_not_count(capsys):
    progress = Progress(Recipe(log_every=1), 40, COSTS, Console())
    for step in range(1, 4):
        progress.row(row_of(step, 500.0 if step == 1 else 7.0))
    assert lefts(capsys.readouterr().out)[3] == 7 * (17 + 200)


def test_after_a_resume_time_left_is_at_the_rate_of_this_process(capsys):
    """Ten steps were made on a machine that took a hundred times as long."""
    progress = Progress(Recipe(log_every=1), 40, COSTS[10:], Console())
    progress.catch_up([row_of(step, 700.0) for step in range(1, 11)])
    for step in range(11, 31):
        progress.row(row_of(step, 7.0 if step <= 20 else 70.0))
    left = lefts(capsys.readouterr().out)
    assert (left[11], left[15], left[30]) == (7 * 209, 7 * 205, 700)


WORDS = [(131_072,), (124_518, 6_554), (65_536, 65_536), (16_384,) * 8, (4_096,) * 32, (512,) * 256]


@pytest.mark.parametrize("name", ["llama-8b", "qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("recompute", ["full", "selected"])
@pytest.mark.parametrize("seed", range(3))
def test_time_left_where_rows_attend_to_more_or_less(name, recompute, seed):
    """Rows of 131,072 tokens; seconds are the plan's, whose attention has other rates than products have."""
    a = ARCHITECTURES[PRESETS[name].model]
    weights, windowed = a.num_active_parameters() - a.vocab * a.hidden, -(-a.layers // 2) if a.sliding_window else 0
    flops = TokenFlops(6.0 * weights, 12.0 * a.heads * a.head_dim, a.layers, windowed, a.sliding_window or 0)
    costs, seconds = [], []
    for row in map(np.array, WORDS):
        costs.append(flops.products * row.sum() + flops.pair * flops.pairs(row).sum())
        attended = np.square(row).sum() / 2 / row.sum() if len(row) > 1 else 0.0
        work = Work(1, 131_072, recompute, compiled=True, attended=attended)
        seconds.append(arithmetic(a, work, H200).total_s)
    drawn = np.random.default_rng(seed).integers(len(WORDS), size=60)
    drawn[11:] = drawn[11:] % 3  # what remains is heavier
    costs, seconds = np.array(costs)[drawn], np.array(seconds)[drawn]
    pace = Pace()
    for cost, taken in zip(costs[1:11], seconds[1:11], strict=True):
        pace.add(cost, taken)
    in_proportion = seconds[1:11].sum() / costs[1:11].sum() * costs[11:].sum()
    left = pace.seconds(49, costs[11:].sum())
    assert left == pytest.approx(seconds[11:].sum(), rel=0.06)
    assert abs(left - seconds[11:].sum()) <= abs(in_proportion - seconds[11:].sum())


@given(st.lists(st.tuples(st.floats(1.0, 1e3), st.floats(1e-3, 1e4)), min_size=1, max_size=9), st.floats(1.0, 1e6))
def test_no_pace_is_far_from_proportion(steps, cost):
    """Two steps with a pause in one of them could tell anything of a third."""
    pace = Pace()
    for one, seconds in steps:
        pace.add(one, seconds)
    rate = sum(seconds for _, seconds in steps) / sum(one for one, _ in steps)
    assert 0 < cost * rate / WIDEST * (1 - 1e-9) <= pace.seconds(3, cost) <= cost * rate * WIDEST * (1 + 1e-9)


def test_steps_of_one_cost_say_nothing_of_others():
    pace = Pace()
    for cost, seconds in ((1.0, 7.0), (1.001, 9.0)):
        pace.add(cost, seconds)
    assert pace.seconds(10, 20.0) == pytest.approx(20 * 8.0, rel=0.1)


def test_after_ten_steps_reality_is_compared_with_the_plan_once(capsys):
    plan = make_plan(DEMO, H200)
    progress = Progress(DEMO, 30, np.ones(30), Console(), plan)
    for step in range(1, 26):
        progress.row(StepRow(step, 1.0, 1e-5, 1.0, 100, 50, 2 * plan.seconds.step, False))
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("after ")]
    assert sum("far from the plan" in line and "--remeasure" in line for line in lines) == 1
    assert len(said) == 1
    assert said[0].startswith("after 10 steps: ")
    assert "(+100%)" in said[0]


def test_heavy_steps_are_compared_with_what_they_would_take(capsys):
    """The plan is of a mean step, and the first ones cost twice as much."""
    plan, costs = make_plan(DEMO, H200), np.repeat([2.0, 1.0], [10, 30])
    progress = Progress(DEMO, 40, costs, Console(), plan)
    for step, cost in enumerate(costs / costs.mean(), start=1):
        progress.row(row_of(step, cost * plan.seconds.step))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("after ")]
    assert "a step, planned" in said
    assert "(+0%)" in said.split(";")[0]


def test_without_a_gpu_only_memory_is_compared(capsys):
    plan = make_plan(dataclasses.replace(DEMO, dtype="fp32"), dataclasses.replace(H200, name="cpu", gpu_bytes=0))
    progress = Progress(DEMO, 30, np.ones(30), Console(), plan)
    for step in range(1, 12):
        progress.row(StepRow(step, 1.0, 1e-5, 1.0, 100, 50, 9.0, False))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("after ")]
    assert "GB host, planned" in said
    assert "a step" not in said
