"""The live panel: a run at a glance, in a terminal that can redraw itself.

It only shows. Nothing of it may end a run or hold one up: memory and lanes are read when a step has ended, drawing is
done by rich's own thread, and a drawing that fails is a line that says so. The cursor stays visible, so that no way in
which a process can die leaves a terminal without one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
import torch
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel as Frame
from rich.table import Table
from rich.text import Text

from penstock.engine import MemoryUse
from penstock.engine.weights import layer_by_layer
from penstock.errors import size
from penstock.machine.gpu_memory import gpu_room
from penstock.machine.hardware import describe
from penstock.recipe.recipe import Recipe, tile_tokens
from penstock.report.facts import Recorder
from penstock.report.metrics import StepRow

CURVE_ROWS = 6
NARROW, SHORT = 60, 18
"""Columns and lines under which the panel leaves out what one can do without."""
PART_STYLES = {
    "weights": "grey62", "state: gpu": "blue", "state: stream": "green", "state: host": "yellow",
    "state: beside the weights": "blue",
    "streamed weights": "grey78", "slots of weights": "grey78", "parked inputs": "cyan",
    "gradients, activations": "magenta", "this process, the rest": "grey50",
}  # fmt: skip
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12,
    "MI300": 1307e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
"""Dense bf16 matrix products a second by the data sheet; the rate that a machine reaches is some 0.8 of it."""


def peak_flops(device: str) -> float:
    """The data sheet's rate of a device that `hardware.describe` named, or 0 where it is not known."""
    return next((rate for name, rate in PEAK_FLOPS.items() if name in device), 0.0)


@dataclass
class Sources:
    """What the panel asks for when a step has ended."""

    memory: Callable[[], Sequence[MemoryUse]]
    lanes: Callable[[], Mapping[str, float]]
    """Share of the time in which each lane was busy, in the step that was recorded; empty before."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each place has."""
    peak_flops: float = 0.0
    """Of one GPU, as the FLOPs of a row are."""
    streaming: str = ""
    """How weights and inputs of layers move, if they do."""


def sources_of(recorder: Recorder, device: torch.device, recipe: Recipe) -> Sources:
    """What there is to ask in a run."""
    totals = {"host": int(psutil.virtual_memory().total)}
    if device.type == "cuda":
        totals["gpu"] = gpu_room(device)[1]
    peak = peak_flops(describe(device)) * (2 if recipe.matmul == "fp8" else 1)  # as data sheets have it
    return Sources(recorder.memory, recorder.lanes, totals, peak, streaming_of(recipe))


def streaming_of(recipe: Recipe) -> str:
    """How weights and inputs of layers move, and what of the GPU may be taken; nothing where all is resident."""
    words = []
    if layer_by_layer(recipe):
        order = "layers" if recipe.order == "auto" else recipe.order
        inputs = "kept" if recipe.inputs == "auto" else recipe.inputs
        words = [f"weights {recipe.weights}", f"order {order}", f"inputs {inputs}"]
        words += [f"tiles of {tokens:,} tokens"] if (tokens := tile_tokens(recipe)) else []
    if recipe.gpu_memory != "auto":
        words.append(f"{recipe.gpu_memory} of the GPU allowed")
    return ", ".join(words)


class Panel:
    """A run as it stands. Give it rows; rich asks it to draw itself."""

    def __init__(self, title: str, total_steps: int, sources: Sources) -> None:
        self._title, self._total, self._sources = title, total_steps, sources
        self._row: StepRow | None = None
        self._losses: list[float] = []
        self._eval, self._left, self._skipped = math.nan, 0.0, 0
        self._memory: Sequence[MemoryUse] = ()
        self._lanes: Mapping[str, float] = {}
        self._doing, self._since, self._saved = "", 0.0, ""

    def row(self, row: StepRow, seconds_left: float) -> None:
        """A step has ended."""
        self._row, self._left = row, seconds_left
        self._losses.append(row.loss)
        self._skipped += row.skipped
        self._memory, self._lanes = self._sources.memory(), self._sources.lanes()

    def earlier(self, rows: Sequence[StepRow]) -> None:
        """Steps that were made before the run was resumed."""
        self._losses += [row.loss for row in rows]
        self._skipped += sum(row.skipped for row in rows)

    def evaluated(self, loss: float) -> None:
        """An evaluation has ended."""
        self._eval = loss

    def begins(self, what: str) -> None:
        """Something beside the steps begins, such as saving."""
        self._doing, self._since = what, time.perf_counter()

    def ends(self, what: str) -> None:
        """It has ended."""
        self._doing, self._saved = "", f"{what}: {time.perf_counter() - self._since:.1f} s"

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        try:
            drawn: RenderableType = self._draw(options.max_width, console.height)
        except Exception as error:  # whatever it is, the run is worth more
            drawn = Text(f"(the panel cannot be drawn: {error})", overflow="ellipsis", no_wrap=True)
        yield drawn

    def _draw(self, width: int, height: int) -> RenderableType:
        inner, narrow = max(10, width - 4), width < NARROW
        parts: list[RenderableType] = [self._progress(inner)]
        if self._row is None:
            parts.append(Text("waiting for the first step", style="dim"))
        else:
            parts.append(self._numbers(narrow))
            curve = list(self._curve(inner)) if height >= SHORT else []
            parts += [Text(), *curve] if curve else []
            parts += [Text(), *self._bars(inner)]
            if self._lanes and not narrow:
                parts.append(self._lane_line())
            if self._sources.streaming:
                parts.append(Text(self._sources.streaming, style="dim"))
        if self._doing:
            parts.append(Text(f"{self._doing}: {time.perf_counter() - self._since:.0f} s", style="bold"))
        elif self._saved:
            parts.append(Text(self._saved, style="dim"))
        for part in parts:
            if isinstance(part, Text):
                part.no_wrap, part.overflow = True, "ellipsis"
        frame = Frame(Group(*parts), title=Text(self._title), title_align="left", width=width, border_style="dim")
        # The terminal writes ^C where the cursor stands. At the end of a full line it would begin another, and the
        # panel would be drawn again one line too low.
        return Group(frame, Text())

    def _progress(self, width: int) -> Text:
        step = self._row.step if self._row else len(self._losses)
        left = f"{timedelta(seconds=round(self._left))} left" if self._row else ""
        label = f" {step:,}/{self._total:,}  {left}"
        cells = max(4, width - len(label))
        return _bar([(step / max(1, self._total), "cyan")], cells).append(label)

    def _numbers(self, narrow: bool) -> RenderableType:
        row, sources = self._row, self._sources
        assert row is not None, "drawn only after a step"
        rate = row.tokens / row.step_seconds if row.step_seconds else 0.0
        peak = sources.peak_flops / 1e12
        share = f" ({row.model_tflops / peak:.0%} of {peak:,.0f})" if peak else ""
        found = [
            ("loss", f"{row.loss:.4f}"),
            ("eval", "" if math.isnan(self._eval) else f"{self._eval:.4f}"),
            ("lr", f"{row.lr:.2e}"),
            ("norm", f"{row.grad_norm:.2f}"),
            ("tokens/s", f"{rate:,.0f}"),
            (
                "TFLOP/s a rank" if row.ranks > 1 else "TFLOP/s",
                f"{row.model_tflops:.3g}{share}" if math.isfinite(row.model_tflops) else "",
            ),
            ("skipped", f"{self._skipped}" if self._skipped else ""),
        ]
        shown = [(name, value) for name, value in found if value]
        grid, columns = Table.grid(padding=(0, 2)), 2 if narrow else 4
        for first in range(0, len(shown), columns):
            cells = [
                Text.assemble((name, "dim"), " ", (value, "bold")) for name, value in shown[first : first + columns]
            ]
            grid.add_row(*cells)
        return grid

    def _curve(self, width: int) -> Iterator[Text]:
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        if len(finite) < 2:
            return
        low, high = min(finite), max(finite)
        lines = braille(finite, max(4, width - 8), CURVE_ROWS)
        labels = {0: f"{high:.3f}", len(lines) - 1: f"{low:.3f}"}
        for number, line in enumerate(lines):
            yield Text.assemble((f"{labels.get(number, ''):>7} ", "dim"), (line, "cyan"))

    def _bars(self, width: int) -> Iterator[Text]:
        """A bar a place, filled in the colours of its parts, and the parts in words as far as there is room."""
        for place in dict.fromkeys(use.place for use in self._memory):
            parts = [use for use in self._memory if use.place == place and use.num_bytes]
            used = sum(use.num_bytes for use in parts)
            total = self._sources.totals.get(place) or used
            label = f" {size(used)} of {size(total)}" if total != used else f" {size(used)}"
            shares = [(use.num_bytes / max(1, total), PART_STYLES.get(use.part, "red")) for use in parts]
            yield Text(f"{place:<5}").append(_bar(shares, max(4, width - 5 - len(label)))).append(label)
            words = Text("     ")
            for use in parts:
                words.append("■ ", PART_STYLES.get(use.part, "red"))
                words.append(f"{use.part} {size(use.num_bytes)}  ", "dim")
            yield words

    def _lane_line(self) -> Text:
        line = Text("lanes ")
        for lane, share in self._lanes.items():
            line.append(f"{lane} ", "dim").append(f"{share:.1%}  ")
        return line


class Working:
    """One line that says what goes on and for how long, until it has ended."""

    def __init__(self, title: str) -> None:
        self._title, self._start = title, time.perf_counter()

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        seconds = time.perf_counter() - self._start
        wheel = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(seconds * 8) % 10]
        yield Text(f"{wheel} {self._title} ... {seconds:.0f} s", style="dim", no_wrap=True, overflow="ellipsis")


def _bar(shares: Sequence[tuple[float, str]], cells: int) -> Text:
    """Parts of a whole side by side, and what is left of it."""
    bar, filled, reached = Text(), 0, 0.0
    for share, style in shares:
        reached = min(1.0, reached + share)
        upto = round(reached * cells)
        bar.append("━" * (upto - filled), style)
        filled = upto
    return bar.append("─" * (cells - filled), "grey35")  # thinner, to be told apart without colours too


def braille(values: Sequence[float], columns: int, rows: int) -> list[str]:
    """A curve in braille: two points a column, four heights a row. Values that share a point show their mean."""
    points = min(2 * columns, len(values))
    edges = [round(i * len(values) / points) for i in range(points + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high, top = min(means), max(means), 4 * rows - 1
    scale = top / (high - low) if high > low else 0.0
    heights = [round((_between(means, x / (2 * columns - 1)) - low) * scale) for x in range(2 * columns)]
    cells = [[0] * columns for _ in range(rows)]
    for x, (before, here) in enumerate(itertools.pairwise([heights[0], *heights])):
        step = (here > before) - (here < before)
        for y in range(min(here, before + step), max(here, before + step) + 1):  # a steep line stays in one piece
            row, dot = divmod(top - y, 4)
            cells[row][x // 2] |= DOTS[x % 2][dot]
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _between(values: Sequence[float], place: float) -> float:
    """The value at a place from 0 to 1, on the straight line between its neighbours."""
    index, rest = divmod(place * (len(values) - 1), 1)
    after = values[min(len(values) - 1, int(index) + 1)]
    return values[int(index)] * (1 - rest) + after * rest


DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille cell: left and right column, from the top."""
