"""What is said of each finished step, and the end of a run whose gradients stay non-finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import psutil
import torch

from penstock.data.cost import Floats
from penstock.errors import Diverged, counted
from penstock.plan.predict import Plan
from penstock.plan.report import compare
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.report.metrics import StepRow

COMPARED_STEPS = 10
"""Steps after which reality is compared with the plan."""


class Progress:
    """Takes each finished step: a line on the console, and an end to the run when gradients stay non-finite."""

    def __init__(
        self, recipe: Recipe, total_steps: int, costs: Floats, console: Console, plan: Plan | None = None
    ) -> None:
        """`costs`, in any unit, are those of the steps that this process will make."""
        self._recipe, self._total_steps, self._console = recipe, total_steps, console
        self._cost_after = np.concatenate(([0.0], np.cumsum(costs)))
        self._plan, self._recent = plan, list[float]()  # steps of this process, until they are compared
        self._seconds, self._first_skip, self._skips_in_a_row = 0.0, 0, 0

    def catch_up(self, rows: Sequence[StepRow]) -> None:
        """Steps that were made before the run was resumed."""
        for row in rows:
            self._count(row)

    def row(self, row: StepRow) -> None:
        """One step has finished."""
        self._count(row)
        due = row.skipped or row.step in (1, self._total_steps) or row.step % self._recipe.log_every == 0
        self._console.step(row, self._total_steps, self._seconds_left(row), due=due)
        self._compare(row)
        last = row.step == self._total_steps
        limit = min(self._recipe.skip_limit, max(1, self._total_steps // 2)) if last else self._recipe.skip_limit
        if self._skips_in_a_row >= limit:  # a short run that skipped its second half never reaches the whole limit
            raise Diverged(
                f"the gradient was not finite in {counted(self._skips_in_a_row, 'step')} in a row"
                + (", up to the last" if last else ""),
                where=f"step {self._first_skip}",
                remedy="Lower --lr, lengthen --warmup, or look at the data.",
            )

    def _seconds_left(self, row: StepRow) -> float:
        """By the cost of the steps that remain, at the rate of this process: before a resume it may have been another.

        The first step is left out once there is a second: it compiles.
        """
        after = self._cost_after
        done = row.step - self._total_steps + len(after) - 1
        self._seconds = row.step_seconds + (self._seconds if done > 2 else 0.0)
        measured = after[done] - after[1 if done > 1 else 0]
        return float(self._seconds / measured * (after[-1] - after[done]))

    def _compare(self, row: StepRow) -> None:
        """After ten steps, what the plan said and what is."""
        if self._plan is None:
            return
        self._recent.append(row.step_seconds)
        if len(self._recent) == COMPARED_STEPS:
            gpu_bytes = torch.cuda.max_memory_allocated() if self._plan.machine.has_gpu else 0
            host_bytes = psutil.Process().memory_info().rss
            self._console.say(compare(self._plan, self._recent, gpu_bytes, host_bytes))
            self._plan = None

    def _count(self, row: StepRow) -> None:
        self._skips_in_a_row = self._skips_in_a_row + 1 if row.skipped else 0
        if self._skips_in_a_row == 1:
            self._first_skip = row.step
