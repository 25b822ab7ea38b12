"""Result rows: what one measurement says, the file that keeps them, and the table that people read.

`rows.jsonl` only ever grows, a line as soon as a row is measured, so that a run that is killed leaves what it had.
`table.txt` is made anew from all of its rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from penstock.flow.timeline import Span
from penstock.machine.disk import append_line, write_whole, writing

WIDTH = 160
"""Columns of the table: a wide terminal, or a page in a small face."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes by place. Weights, gradients, resident state and activations share the device."""

    weights: int
    gradients: int
    """The most that lay there at once, between micro-batches or before the update."""
    resident: int
    """State with the home `gpu`."""
    streamed: int
    """State with the home `stream`, in host memory."""
    host_state: int
    """State with the home `host`, without the weights and gradients mirrored beside it."""
    activations: int | None
    """The floor's peak beyond the weights. None on a CPU, where nobody counts."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a result file. Times are in seconds, sizes in bytes."""

    date: str
    machine: str
    system: str
    """penstock, floor, deepspeed, torchao or flashoptim."""
    model: str
    mode: str
    update: str
    """When weights are updated: after-norm or in-backward. Empty for systems that have none."""
    states: str
    clip: bool
    batch: int
    seq: int
    micro_batch: int
    recompute: str
    compiled: bool
    step_s: float | None
    floor_s: float | None
    exposed_s: float | None
    tokens_per_s: float | None
    model_tflops: float | None
    """FLOPs of the model, recompute not counted, over the time of the step."""
    matrix_tflops: float | None
    """The machine's rate for one large matrix product in the same run, of fp8 numbers in rows with fp8 products."""
    gpu_bytes: int
    """Peak of what torch's allocator handed out."""
    host_bytes: int
    """Resident memory: ours while state is allocated, a peer's at its peak over all of its processes."""
    versions: str
    error: str
    setting: str = ""
    """What a peer was told beyond the recipe."""
    homes: str = ""
    memory: Memory | None = None
    lanes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Busy seconds of a step by lane, and what was exposed."""
    loss: float | None = None
    """Of the last step, on tokens without meaning."""
    reference_tflops: float | None = None
    """By the formula of DeepSpeedExamples' DeepSpeed-SuperOffload, which counts recompute, but no experts."""
    weights: str = "resident"
    """`resident`, or how many layers stream; of a peer, `streamed` if its parameters lie in host memory."""
    order: str = "rows"
    inputs: str = ""
    """Of layers that are computed again as a whole: kept or parked."""
    gpu_limit_gb: float | None = None
    """What the run was allowed of the GPU."""
    driver_bytes: int = 0
    """What was taken of the GPU after the steps as the driver sees it, context included."""
    retries: int = 0
    """How often torch's allocator found no memory and waited for the device to get some back, in all steps."""
    matmul: str = "bf16"
    """In what the decoder's linear layers multiply; the floor of the row does the same."""
    deterministic: bool = False
    """Only with operations that repeat to the bit, in its floor too."""


def row_of(values: dict[str, Any]) -> Row:
    """A row from JSON. Files of earlier versions lack fields that have a default, and may have others."""
    if "schedule" in values:  # what `update` was called
        values = {"update": values["schedule"], **values}
    known = {field.name: values[field.name] for field in dataclasses.fields(Row) if field.name in values}
    if known.get("memory"):
        known["memory"] = Memory(**known["memory"])
    return Row(**known)


class Results:
    """A directory of results."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with writing(directory, "directory"):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "rows.jsonl").open("a").close()
        self.read()  # a file that is not ours is found before an hour is spent

    def add(self, row: Row) -> None:
        """Append the row and make the table anew."""
        with writing(self.directory, "directory"):
            append_line(self.directory / "rows.jsonl", json.dumps(dataclasses.asdict(row)))
        self.write("table.txt", table(self.read()))

    def write(self, name: str, text: str) -> None:
        """A file beside the rows."""
        with writing(self.directory, "directory"):
            write_whole(self.directory / name, text)

    def read(self) -> list[Row]:
        """Every row of the file."""
        path = self.directory / "rows.jsonl"
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rows.append(row_of(json.loads(line)))
            except (ValueError, TypeError, AttributeError) as error:
                remedy = "Mend or remove the line, or name another directory with --to."
                raise DataError(f"is no result row ({error})", where=f"{path}:{number}", remedy=remedy) from None
        return rows


def write_timeline(path: Path, about: dict[str, Any], spans: Sequence[Span]) -> None:
    """Add what the lanes did in the last steps of a row to a file."""
    rounded = [(span.lane, round(span.start, 6), round(span.end, 6)) for span in spans]
    with writing(path, "directory"):
        append_line(path, json.dumps({**about, "spans": rounded}))


def table(rows: Sequence[Row]) -> str:
    """All rows for people: one block for rows that did the same work, with ratios inside the block."""
    blocks = [
        "\n".join(_block(title, list(group))) for title, group in itertools.groupby(sorted(rows, key=_work), key=_work)
    ]
    return "\n\n".join(blocks) + "\n"


def _work(row: Row) -> str:
    """What rows that may be compared have in common."""
    repeats = ", deterministic" if row.deterministic else ""
    return f"{row.model}: {row.batch} x {row.seq} tokens{repeats}; {row.machine}; {row.date}"


_HEADINGS = ("system", "mode", "update", "states", "clip", "micro", "recomp", "step s", "/floor", "/best", "exposed",
             "tokens/s", "TFLOP/s", "/matrix", "GPU GB", "host GB", "setting")  # fmt: skip
_NUM_WORDS = 7
"""Columns before the first number; they stand left, numbers stand right."""


def _block(title: str, rows: list[Row]) -> list[str]:
    steps = [row.step_s for row in rows if row.system == "penstock" and row.step_s]
    best = min(steps) if steps else None
    cells = [_HEADINGS, *(_cells(row, best) for row in rows)]
    widths = [max(len(line[i]) for line in cells if i < len(line)) for i in range(len(_HEADINGS))]
    words = sum(widths[:_NUM_WORDS]) + 2 * _NUM_WORDS
    lines = [title]
    for line, row in zip(cells, [None, *rows], strict=True):
        text = "".join(
            f"{cell:<{width}}  " if i < _NUM_WORDS or i == len(_HEADINGS) - 1 else f"{cell:>{width}}  "
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        )
        if row is not None and row.error:
            text = f"{text:<{words}}{' '.join(filter(None, (row.setting, row.error)))}"
        lines.append(text.rstrip()[:WIDTH])
    lines += [f"  GPU, {_name(row)}: {flow}"[:WIDTH] for row in rows if (flow := _flow(row))]
    lines += [line[:WIDTH] for row in rows if row.system == "penstock" for line in _details(row)]
    if any(is_noise(row) for row in rows):
        lines.append(NOISE[:WIDTH])
    lines.append(f"/floor: forward and backward alone. /best: penstock's fastest row. {rows[-1].versions}"[:WIDTH])
    return lines


NOISE = "Under 1 of the floor, or less than nothing exposed: noise of the measurement. More --steps make it smaller."


def is_noise(row: Row) -> bool:
    """Whether a step seems faster than its own forward and backward, which it contains."""
    return row.step_s is not None and bool(row.floor_s) and row.step_s < (row.floor_s or 0.0)


def _cells(row: Row, best: float | None) -> tuple[str, ...]:
    clip = "yes" if row.clip else "no" if row.states else ""
    system = f"{row.system} fp8" if row.matmul == "fp8" else row.system
    words = (system, row.mode, row.update, row.states, clip, str(row.micro_batch), row.recompute)
    if row.step_s is None:
        return words
    return (
        *words,
        f"{row.step_s:.3f}",
        _number(row.step_s / row.floor_s if row.floor_s else None, ".3f"),
        _number(row.step_s / best if best and row.system != "floor" else None, ".2f"),
        _number(row.exposed_s, ".3f"),
        _number(row.tokens_per_s, ",.0f"),
        _number(row.model_tflops, ".1f" if (row.model_tflops or 0.0) >= 1 else ".4f"),
        _number(row.model_tflops / row.matrix_tflops if row.model_tflops and row.matrix_tflops else None, ".2f"),
        f"{row.gpu_bytes / 1e9:.1f}",
        f"{row.host_bytes / 1e9:.1f}",
        row.setting or ("compiled" if row.compiled else ""),
    )


def _flow(row: Row) -> str:
    """What streams and what is allowed of the GPU, if anything does or is. A column would be cut."""
    if row.system == "floor":
        return ""
    flows = row.weights != "resident" or row.order != "rows"
    words = (f"weights {row.weights}", row.order, row.inputs) if flows else ()
    limit = f"{row.gpu_limit_gb:g} GB allowed" if row.gpu_limit_gb else ""
    taken = f"{row.driver_bytes / 1e9:.1f} taken" if limit and row.driver_bytes else ""
    return ", ".join(filter(None, (row.setting if flows else "", *words, limit, taken)))


def _name(row: Row) -> str:
    ours = row.system == "penstock"
    fp8, clipped = "fp8" if row.matmul == "fp8" else "", "clipped" if row.clip else ""
    words = ("" if ours else row.system, fp8, row.mode, row.update, row.states, clipped)
    return " ".join(filter(None, words))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _details(row: Row) -> Iterable[str]:
    """Memory by place and lanes of one of our rows."""
    name = _name(row)
    if row.memory is not None:
        parts = {k.replace("_", " "): v for k, v in dataclasses.asdict(row.memory).items() if v is not None}
        yield f"  memory, {name}: " + ", ".join(f"{place} {size / 1e9:.2f} GB" for place, size in parts.items())
    if row.reference_tflops:
        yield f"  by the reference's formula, {name}: {row.reference_tflops:.4g} TFLOP/s"
    if row.retries:
        yield f"  memory, {name}: too little to run ahead, the allocator waited for the device {row.retries} times"
    if row.lanes:
        yield f"  lanes, {name}: " + ", ".join(f"{lane} {seconds:.3f} s" for lane, seconds in row.lanes.items())
