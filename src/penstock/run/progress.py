"""What is said of each finished step, and the end of a run whose gradients stay non-finite.

Time left is told from a line through the steps so far, seconds by cost. Attention takes other seconds a FLOP than
products do; rows of one length have the same products, so that the line knows both. Seconds in proportion to the cost
were rejected: of llama-8b a step with one example of 131,072 tokens takes 1.58 s a PFLOP, with 32 of 4,096 2.22 s.
"""

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
SURE_STEPS, SURE_SPREAD = 3, 0.1
"""As if so many steps, whose costs differ by this much of their mean, had taken seconds in proportion to them: a few
that cost about the same say nothing of others."""
WIDEST = 4.0
"""How far a line may be from proportion: rates of attention and of products differ by less."""


class Pace:
    """Seconds of steps by their cost, as a line through those so far."""

    def __init__(self) -> None:
        """No step yet."""
        self._count, self._sums = 0, np.zeros(4)

    def add(self, cost: float, seconds: float) -> None:
        """A step took so long."""
        self._count += 1
        self._sums += (cost, seconds, cost * cost, cost * seconds)

    def seconds(self, steps: int, cost: float) -> float:
        """Of so many steps that cost so much together."""
        mean_cost, mean_seconds, squares, products = (self._sums / self._count).tolist()
        rate = mean_seconds / mean_cost
        sure = SURE_STEPS / self._count * (SURE_SPREAD * mean_cost) ** 2
        variance = max(0.0, squares - mean_cost**2)
        slope = (products - mean_cost * mean_seconds + sure * rate) / (variance + sure)
        found = steps * mean_seconds + slope * (cost - steps * mean_cost)
        return float(min(max(found, cost * rate / WIDEST), cost * rate * WIDEST))


class Progress:
    """Takes each finished step: a line on the console, and an end to the run when gradients stay non-finite."""

    def __init__(
        self, recipe: Recipe, total_steps: int, costs: Floats, console: Console, plan: Plan | None = None
    ) -> None:
        """`costs`, in any unit, are those of the steps that this process will make."""
        self._recipe, self._total_steps, self._console = recipe, total_steps, console
        self._costs, self._cost_left = costs, np.append(np.cumsum(costs[::-1])[::-1], 0.0)
        self._plan, self._recent = plan, list[float]()  # steps of this process, until they are compared
        self._pace, self._first_skip, self._skips_in_a_row = Pace(), 0, 0

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
        done = row.step - self._total_steps + len(self._costs)
        if done == 2:
            self._pace = Pace()
        self._pace.add(float(self._costs[done - 1]), row.step_seconds)
        return self._pace.seconds(len(self._costs) - done, float(self._cost_left[done]))

    def _compare(self, row: StepRow) -> None:
        """After ten steps, what the plan said and what is."""
        if self._plan is None:
            return
        self._recent.append(row.step_seconds)
        if len(self._recent) == COMPARED_STEPS:
            gpu_bytes = torch.cuda.max_memory_allocated() if self._plan.machine.has_gpu else 0
            host_bytes = psutil.Process().memory_info().rss
            share = np.median(self._costs[2:COMPARED_STEPS]) / self._costs.mean()
            self._console.say(compare(self._plan, self._recent, gpu_bytes, host_bytes, float(share)))
            self._plan = None

    def _count(self, row: StepRow) -> None:
        self._skips_in_a_row = self._skips_in_a_row + 1 if row.skipped else 0
        if self._skips_in_a_row == 1:
            self._first_skip = row.step
