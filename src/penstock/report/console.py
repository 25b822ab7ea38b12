"""What a person sees while a run goes on: a live panel on a terminal, elsewhere one plain line at a time.

With --json the lines go to standard error, so that standard output holds exactly one JSON object.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape

from penstock import BEGAN
from penstock.errors import counted, short
from penstock.machine.signals import is_device, leave_terminal
from penstock.report.metrics import EvalRow, Speed, StepRow, Summary
from penstock.report.panel import Panel, Sources, Working

LEAST_COLUMNS = 30
"""A terminal that is narrower gets plain lines."""


@dataclass
class Phase:
    """Something that takes a while. Who knows how many bytes it moves can say so, and the rate is shown."""

    num_bytes: int = 0


class _Steady:
    """A file for lines. One whose terminal is gone, or whose disk is full, forgets them: a run is worth more."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write, or pretend to."""
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or pretend to."""
        self._try(self._file.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            raise  # which `_Lines` sees to
        except OSError as error:
            if error.errno == errno.EIO and is_device(self._file.fileno()):
                leave_terminal()
                return
            _to_nowhere(self._file)
            with suppress(OSError):
                print(f"WARNING: no more lines can be written ({error.strerror}): none follow", file=sys.stderr)


def _to_nowhere(file: TextIO) -> None:
    """Forget all that goes to the file: what others print there would fail too, and so would Python at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


class _Lines(RichConsole):
    """Rich's console, which would end the process when whoever reads its lines is gone, such as `head`."""

    def on_broken_pipe(self) -> None:
        """A run is worth more than its lines: they go nowhere from here on."""
        self.quiet = True
        _to_nowhere(cast(TextIO, self.file))


class Console:
    """Where lines for people go."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        file = cast(TextIO, _Steady(sys.stderr if json else sys.stdout))
        self.rich = _Lines(  # without emoji: code in an answer has `x[:end:2]`
            file=file, highlight=False, quiet=quiet, soft_wrap=True, force_jupyter=False, emoji=False
        )
        self._json, self._showing = json, False
        self.times: list[tuple[str, float]] = []
        """Every phase that lay in no other, and its seconds."""
        self._depth = 0
        self._panel: Panel | None = None

    def say(self, text: str) -> None:
        """One line."""
        self.rich.print(escape(text))

    @property
    def live(self) -> bool:
        """Whether there is a terminal that can redraw itself, and someone who wants to see it."""
        rich = self.rich
        at_terminal = rich.file.isatty()  # rich says so too where FORCE_COLOR is set, and in a notebook
        able = at_terminal and rich.is_terminal and not rich.is_dumb_terminal and rich.width >= LEAST_COLUMNS
        able = able and rich.encoding.startswith("utf")  # what the panel is drawn of is in no other
        return able and not (self._json or rich.quiet)

    @contextmanager
    def phase(self, title: str, ended: str = "") -> Iterator[Phase]:
        """Say what begins, and how long it, or what `ended` calls it, took if that was noticeable."""
        phase, start = Phase(), time.perf_counter()
        if self._panel is not None:  # beside the steps, such as saving
            self._panel.begins(title)
            yield phase
            self._panel.ends(title)
            return
        self.rich.print(f"[bold]{escape(title)}[/bold]")
        with self._redrawn(Working(title), transient=True), self._timed(title):
            yield phase
        seconds = time.perf_counter() - start
        if seconds >= 2:
            gigabytes = phase.num_bytes / 1e9
            worth_saying = gigabytes / seconds >= 0.05  # a rate that is not 0.0
            said = f", {gigabytes:.1f} GB at {gigabytes / seconds:.1f} GB/s" if worth_saying else ""
            named = escape(ended or title)  # since phases may lie in one another
            self.rich.print(f"[dim]  {named}: {seconds:.1f} s{said}[/dim]")

    @contextmanager
    def _timed(self, title: str) -> Iterator[None]:
        start, outer = time.perf_counter(), self._depth == 0
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if outer:
                self.times.append((title.split()[0].lower(), time.perf_counter() - start))

    @contextmanager
    def training(self, name: str, total_steps: int, sources: Sources, earlier: Sequence[StepRow]) -> Iterator[None]:
        """Around the steps: the live panel, or a phase like any other."""
        if not self.live:
            with self.phase(f"Training {counted(total_steps, 'step')}", "Training"):  # it may be stopped before
                yield
            return
        panel = Panel(name, total_steps, sources)
        panel.earlier(earlier)
        with self._redrawn(panel, transient=False), self._timed("Training"):
            self._panel = panel
            try:
                yield
            finally:
                self._panel = None

    @contextmanager
    def _redrawn(self, what: RenderableType, *, transient: bool) -> Iterator[None]:
        """Draw `what` again and again below the lines, unless something is being drawn already."""
        if self._showing or not self.live:
            yield
            return
        self._showing = True
        try:
            with Live(what, console=self.rich, refresh_per_second=4, transient=transient):
                self.rich.show_cursor(True)  # a process that is killed could not bring it back
                yield
        finally:
            self._showing = False

    def step(self, row: StepRow, total_steps: int, seconds_left: float, *, due: bool = True) -> None:
        """A step has ended: the panel shows each, lines only those that are due."""
        if self._panel is not None:
            self._panel.row(row, seconds_left)
        elif due:
            self._step_line(row, total_steps, seconds_left)

    def evaluated(self, row: EvalRow, total_steps: int, best: EvalRow | None) -> None:
        """An evaluation has ended: in the panel, or a line with the best so far."""
        if self._panel is not None:
            self._panel.evaluated(row.eval_loss)
            return
        found = "the lowest so far"
        if best != row:
            found = f"lowest {best.eval_loss:.4f} at step {best.step:,}" if best else "not finite"
        self.say(f"eval {row.step:>{len(str(total_steps))}}/{total_steps}  loss {row.eval_loss:7.4f}  {found}")

    def _step_line(self, row: StepRow, total_steps: int, seconds_left: float) -> None:
        width = len(str(total_steps))
        line = (
            f"step {row.step:>{width}}/{total_steps}  loss {row.loss:7.4f}  lr {row.lr:.2e}  "
            f"norm {row.grad_norm:6.2f}  {speed(row, row.ranks, width=8)}"
        )
        line += "  skipped: gradient not finite" if row.skipped else f"  {_clock(seconds_left)} left"
        self.say(line)

    def all_times(self) -> list[tuple[str, float]]:
        """Where the time of this process went, by phase: starting, what was measured, and the rest."""
        total = time.monotonic() - BEGAN
        known = sum(seconds for _, seconds in self.times)
        return [("starting and the rest", max(0.0, total - known)), *self.times]

    def summary(self, summary: Summary) -> None:
        """The end of a run, which is said even to who wants quiet."""
        self.rich.quiet = False
        rows = [
            ("steps", f"{summary.steps:,}" + (f" ({summary.skipped_steps} skipped)" if summary.skipped_steps else "")),
            ("loss", f"{summary.loss_first:.4f} at the first step, {summary.loss_last:.4f} at the last"),
            ("eval loss", "" if summary.eval_loss is None else f"{summary.eval_loss:.4f} at the end" + _best(summary)),
            ("  best in", summary.best_checkpoint if summary.best_step != summary.steps else ""),
            ("ended", "early: patience ran out" if summary.stopped_early else ""),
            ("tokens", f"{summary.tokens:,}, of them {summary.trained_tokens:,} trained on"),
            *_speeds(summary),
            ("time", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.all_times())),
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


def speed(found: StepRow | Speed | Summary, ranks: int, width: int = 0) -> str:
    """Tokens of all ranks and FLOPs of one: the model's, and behind them what the reference's formula counts."""
    text = f"{found.tokens_per_s:{width},.0f} tokens/s"
    if math.isfinite(found.model_tflops):
        text += f"  {short(found.model_tflops)} TFLOP/s" + (" a rank" if ranks > 1 else "")
    if math.isfinite(found.reference_tflops):
        text += f" (reference {short(found.reference_tflops)})"
    return text


def _speeds(summary: Summary) -> Iterator[tuple[str, str]]:
    """Over all steps. Of a run that was resumed with another number of ranks, FLOPs of one rank are said by number."""
    clock = f"{_clock(summary.seconds)} in all"
    if len(summary.speeds) < 2:
        yield "speed", f"{speed(summary, max([found.ranks for found in summary.speeds], default=1))}, {clock}"
        return
    yield "speed", f"{summary.tokens_per_s:,.0f} tokens/s, {clock}"
    for found in summary.speeds:
        on = f"on {counted(found.ranks, 'rank')}" if found.ranks else "by an earlier version"
        yield "", f"{speed(found, found.ranks or 2)}, {counted(found.steps, 'step')} {on}"


def _best(summary: Summary) -> str:
    if summary.best_step in (None, summary.steps):
        return ", the lowest"
    return f", lowest {summary.best_eval_loss:.4f} at step {summary.best_step:,}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
