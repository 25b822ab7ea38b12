"""What a person sees while a run goes on: one plain line at a time, each with what it is about.

With --json the lines go to standard error, so that standard output holds exactly one JSON object.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console as RichConsole
from rich.markup import escape

from penstock.report.metrics import StepRow, Summary


class Console:
    """Where lines for people go."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.rich = RichConsole(file=sys.stderr if json else sys.stdout, highlight=False, quiet=quiet, soft_wrap=True)

    def say(self, text: str) -> None:
        """One line."""
        self.rich.print(escape(text))

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """Say what begins, and how long it took if that was noticeable."""
        self.rich.print(f"[bold]{escape(title)}[/bold]")
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        if seconds >= 2:
            self.rich.print(f"[dim]  {escape(title)}: {seconds:.1f} s[/dim]")  # phases may lie in one another

    def step(self, row: StepRow, total_steps: int, seconds_left: float) -> None:
        """One line for one step."""
        width = len(str(total_steps))
        rate = row.tokens / row.step_seconds
        line = (
            f"step {row.step:>{width}}/{total_steps}  loss {row.loss:7.4f}  lr {row.lr:.2e}  "
            f"norm {row.grad_norm:6.2f}  {rate:8,.0f} tokens/s"
        )
        line += "  skipped: gradient not finite" if row.skipped else f"  {_clock(seconds_left)} left"
        self.say(line)

    def summary(self, summary: Summary) -> None:
        """The end of a run, which is said even to who wants quiet."""
        self.rich.quiet = False
        rows = [
            ("steps", f"{summary.steps:,}" + (f" ({summary.skipped_steps} skipped)" if summary.skipped_steps else "")),
            ("loss", f"{summary.loss_first:.4f} at the first step, {summary.loss_last:.4f} at the last"),
            ("eval loss", "" if summary.eval_loss is None else f"{summary.eval_loss:.4f}"),
            ("tokens", f"{summary.tokens:,}, of them {summary.trained_tokens:,} trained on"),
            ("speed", f"{summary.tokens_per_s:,.0f} tokens/s, {_clock(summary.seconds)} in all"),
            ("prompt", summary.answer.prompt if summary.answer else ""),
            ("  before", summary.answer.before if summary.answer else ""),
            ("  after", summary.answer.after if summary.answer else ""),
            ("model", summary.model_dir),
            ("run", summary.run_dir),
        ]
        self.rich.print("[bold]Done[/bold]")
        for name, value in rows:
            if value:
                self.say(f"  {name:<10}{value}")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
