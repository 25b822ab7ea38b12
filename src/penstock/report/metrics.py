"""What a run writes down: a line a step in metrics.jsonl, a line an evaluation in eval.jsonl, and the summary."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.resume import best_step
from penstock.engine import StepResult
from penstock.flow.lanes import Instant
from penstock.model.flops import Flops


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One line of metrics.jsonl."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    step_seconds: float
    skipped: bool
    tokens_per_s: float = math.nan
    """Of all GPUs. This and what follows is not in files of earlier versions."""
    model_tflops: float = math.nan
    """FLOPs of the model, recompute not counted, of one rank; in TFLOP/s."""
    reference_tflops: float = math.nan
    """The same by the reference's formula; null where it counts nothing."""
    ranks: int = 0
    """How many made the step; 0 where an earlier version did not say."""


@dataclasses.dataclass(frozen=True)
class EvalRow:
    """One line of eval.jsonl."""

    step: int
    eval_loss: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """The same question before and after training."""

    prompt: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast the steps were that so many ranks made."""

    ranks: int
    steps: int
    tokens_per_s: float
    """Of all ranks."""
    model_tflops: float
    """Of one rank."""
    reference_tflops: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `train` prints at the end."""

    steps: int
    loss_first: float
    loss_last: float
    eval_loss: float | None
    tokens: int
    trained_tokens: int
    tokens_per_s: float
    model_tflops: float
    """Of one rank, over all steps; and by the reference's formula."""
    reference_tflops: float
    seconds: float
    skipped_steps: int
    model_dir: str
    run_dir: str
    answer: Answer | None
    unused: tuple[str, ...] = ()
    """Columns of the data, and keys of its messages, that were not used."""
    best_eval_loss: float | None = None
    best_step: int | None = None
    best_checkpoint: str | None = None
    """Of the best step, where it was kept."""
    times: tuple[tuple[str, float], ...] = ()
    """Where the seconds of the process went, by phase."""
    stopped_early: bool = False
    """Whether --patience ended the run before its last step."""
    speeds: tuple[Speed, ...] = ()
    """By number of ranks: a run may be resumed with another."""


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step without asking the device."""

    step: int
    lr: float
    tokens: int
    trained_tokens: int


class Metrics:
    """Rows in memory and on disk.

    A step's numbers lie on the device until it has finished. Waiting for them at once would leave the device idle
    between steps, so a row is read when it is ready, or at the latest when the next step has been enqueued.
    """

    def __init__(
        self,
        run_dir: Path,
        on_row: Callable[[StepRow], None],
        on_eval: Callable[[EvalRow], None] = lambda row: None,
        *,
        device: torch.device,
        flops: Flops = Flops(),  # noqa: B008  # it is frozen
        write: bool = True,
        ranks: int = 1,
    ) -> None:
        """Without `write` the rows are kept in memory only: of several ranks one writes.

        With several, a row is never read before the next step, whether it is ready or not. Ranks that find numbers that
        are not finite must find them after the same step, or some would wait in the next one for others that left.
        """
        self._flops = flops
        self.rows: list[StepRow] = []
        self.evals: list[EvalRow] = []
        self._run_dir, self._on_row, self._on_eval, self._write = run_dir, on_row, on_eval, write
        self._pending: list[tuple[StepFacts, StepResult, float]] = []
        self._device, self._ranks = device, ranks
        self.start_clock()

    def start_clock(self) -> None:
        """The next step is timed from here, where the device has nothing left to do."""
        self._before = Instant(self._device)

    def add(self, facts: StepFacts, result: StepResult, example: float = 0.0) -> None:
        """A step was enqueued. `example`: tokens of the one that a token is in, on average."""
        self._pending.append((facts, result, example))
        alone = self._ranks == 1
        while len(self._pending) > 1 or (alone and self._pending and self._pending[0][1].values.ready()):
            self._settle()

    def settle(self) -> None:
        """Wait for every step that was enqueued."""
        while self._pending:
            self._settle()

    def add_eval(self, step: int, loss: float) -> None:
        """An evaluation after `step`."""
        self.evals.append(EvalRow(step, loss))
        self._append("eval.jsonl", self.evals[-1])
        self._on_eval(self.evals[-1])

    @property
    def best(self) -> EvalRow | None:
        """The evaluation with the lowest loss so far, the first of equals."""
        step = best_step((row.step, row.eval_loss) for row in self.evals)
        return next((row for row in self.evals if row.step == step), None)

    def out_of_patience(self, patience: int) -> bool:
        """Whether so many evaluations in a row have brought no new best. Those that are not finite count."""
        since = self.evals.index(self.best) + 1 if self.best else 0
        return bool(patience) and len(self.evals) - since >= patience

    def saved(self) -> dict[str, list[dict[str, Any]]]:
        """Every row so far, as JSON has it."""
        rows: dict[str, list[StepRow] | list[EvalRow]] = {"steps": self.rows, "evals": self.evals}
        return {name: [_as_json(row) for row in group] for name, group in rows.items()}

    def restore(self, saved: dict[str, list[dict[str, Any]]]) -> None:
        """Begin with the rows of a checkpoint: what an interrupted run wrote after them is not of this run."""
        self.rows = [read_row(row) for row in saved["steps"]]
        self.evals = [EvalRow(**_with_nan(row)) for row in saved["evals"]]
        self._append("metrics.jsonl", *self.rows)
        if self.evals:
            self._append("eval.jsonl", *self.evals)

    def _settle(self) -> None:
        facts, result, example = self._pending.pop(0)
        loss, grad_norm, skipped = result.loss, result.grad_norm, result.skipped
        # Not from reading to reading: while the host is not ahead, two steps may be read at once.
        seconds, self._before = result.ended.since(self._before), result.ended
        rate = facts.tokens / seconds
        row = StepRow(
            **dataclasses.asdict(facts),
            loss=loss,
            grad_norm=grad_norm,
            skipped=skipped,
            step_seconds=seconds,
            tokens_per_s=rate,
            model_tflops=self._flops.model(example) * rate / 1e12,
            reference_tflops=self._flops.reference * rate / 1e12,
            ranks=self._ranks,
        )
        self.rows.append(row)
        self._append("metrics.jsonl", row)
        self._on_row(row)

    def _append(self, name: str, *rows: StepRow | EvalRow) -> None:
        if not self._write:
            return
        with (self._run_dir / name).open("a", encoding="utf-8") as file:
            file.writelines(to_json(row) + "\n" for row in rows)


def speeds_of(rows: Sequence[StepRow]) -> tuple[Speed, ...]:
    """By number of ranks, in the order in which they came."""
    groups: dict[int, list[StepRow]] = {}
    for row in rows:
        groups.setdefault(row.ranks, []).append(row)
    return tuple(
        Speed(
            ranks=ranks,
            steps=len(group),
            tokens_per_s=sum(row.tokens for row in group) / sum(row.step_seconds for row in group),
            model_tflops=mean_rate(group, "model_tflops"),
            reference_tflops=mean_rate(group, "reference_tflops"),
        )
        for ranks, group in groups.items()
    )


def mean_rate(rows: Sequence[StepRow], name: str) -> float:
    """Over the time of all steps that have it: those of a run that an earlier version began have not."""
    found = [(getattr(row, name), row.step_seconds) for row in rows if math.isfinite(getattr(row, name))]
    seconds = sum(time for _, time in found)
    return float(sum(rate * time for rate, time in found) / seconds) if seconds else math.nan


def read_row(row: dict[str, Any]) -> StepRow:
    """A line of metrics.jsonl, without fields that a later version may have added."""
    return StepRow(**_with_nan({name: value for name, value in row.items() if name in _STEP_FIELDS}))


_STEP_FIELDS = {field.name for field in dataclasses.fields(StepRow)}


def is_row(row: object, kind: type[StepRow] | type[EvalRow]) -> bool:
    """Whether a line of a file is a row: numbers, or null for one that was not finite. A time is finite."""
    fields = dataclasses.fields(kind)
    not_finite = {field.name for field in fields if field.type == "float"} - {"step_seconds"}
    return isinstance(row, dict) and all(
        isinstance(value := row.get(field.name, field.default), int | float)
        or (value is None and field.name in not_finite)
        for field in fields
    )


def to_json(record: Any) -> str:
    """A dataclass as one line of JSON, which has no NaN: a number that is not finite is null."""
    return json.dumps(_as_json(record))


def _as_json(record: Any) -> dict[str, Any]:
    fields: dict[str, Any] = dataclasses.asdict(record, dict_factory=_without_nan)
    return fields


def _with_nan(row: dict[str, Any]) -> dict[str, Any]:
    """A row of JSON as it was: what is null there was not finite."""
    return {key: math.nan if value is None else value for key, value in row.items()}


def _without_nan(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in items}
