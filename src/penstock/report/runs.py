"""A run read back from its directory, for the report.

Whatever the run did not leave is empty, never an error: a report of a run that is still going, or was cut off, shows
what there is. Whatever is not as a run writes it is left out, and named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.checkpoint.places import check_is_run
from penstock.checkpoint.run_dir import recipe_values
from penstock.errors import counted
from penstock.report.facts import FACTS
from penstock.report.metrics import EvalRow, StepRow, is_row


@dataclass(frozen=True)
class RunRecord:
    """All that a report shows of one run.

    The values are JSON as the run wrote it: fields of a later version must not keep an older run from being read.
    """

    name: str
    path: Path
    recipe: dict[str, Any]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    environment: dict[str, Any] = field(default_factory=dict)
    placement: list[dict[str, Any]] = field(default_factory=list)
    timeline: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """What is there and damaged: files, with their lines where it is only some."""

    @property
    def answer(self) -> dict[str, str]:
        """The question that was asked before and after, if there was one."""
        return self.summary.get("answer") or {}

    @property
    def ended(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary)


SHOWN = {
    "environment": {"started", "device", "processor", "cores", "host_bytes", "system", "python", "cuda", "packages"},
    "placement": {"unit", "home", "num_bytes"},
    "timeline": {"step", "seconds", "spans"},
    "memory": {"place", "part", "num_bytes"},
    "data": {"source", "data_format", "train", "fingerprint", "samples"},
    "summary": {"answer"},
    "plan": {"step_seconds", "gpu_bytes", "host_bytes"},
}
"""What the page takes from each of the facts. One without them is damaged."""
LISTED = ("placement", "memory")
"""Facts that are many, each with these."""


def _is_shown(facts: Any, name: str) -> bool:
    """Whether facts that were read are such as a run writes."""
    found = facts if name in LISTED else [facts]
    return isinstance(found, list) and all(isinstance(one, dict) and SHOWN[name] <= one.keys() for one in found)


def read_run(path: Path, name: str) -> RunRecord:
    """Read a run's directory."""
    check_is_run(path)
    found = {fact: _json(path / FACTS / f"{fact}.json") for fact in SHOWN}
    facts = {fact: value for fact, value in found.items() if _is_shown(value, fact)}
    steps, bad_steps = _rows(path / "metrics.jsonl", StepRow)
    evals, bad_evals = _rows(path / "eval.jsonl", EvalRow)
    files = [path / FACTS / f"{fact}.json" for fact in SHOWN if fact not in facts]
    damaged = [f"{FACTS}/{file.name}" for file in files if file.exists()]
    return RunRecord(
        name, path, recipe_values(path), steps, evals, **facts, left_out=[*bad_steps, *bad_evals, *damaged]
    )


def read_runs(paths: list[Path]) -> list[RunRecord]:
    """Several runs, each under a name that no other has."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{number} {name}" for number, name in enumerate(names, start=1)]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


@dataclass(frozen=True)
class Overlap:
    """One step on the lanes, in seconds."""

    busy: float
    """Time in which at least one lane was at work."""
    exposed: float
    """Time in which the model stood still for an update."""

    @property
    def hidden_share(self) -> float:
        """Share of the lanes' work that cost the model nothing."""
        return max(0.0, 1 - self.exposed / self.busy) if self.busy else 1.0


Stretch = tuple[float, float]


def overlap(spans: list[dict[str, Any]]) -> Overlap:
    """What was hidden and what was exposed."""
    work = [(span["start"], span["end"]) for span in spans if span["lane"] not in MODEL_LANES]
    return Overlap(busy=_length(_merged(work)), exposed=_length(exposed(spans)))


def exposed(spans: list[dict[str, Any]]) -> list[Stretch]:
    """When the model stood still for an update: it waited, or lanes worked while it computed nothing."""
    of = {kind: [(s["start"], s["end"]) for s in spans if s["lane"] == kind] for kind in MODEL_LANES}
    work = _merged([(span["start"], span["end"]) for span in spans if span["lane"] not in MODEL_LANES])
    computing = _merged(of["forward"] + of["backward"])
    return _merged(of["wait"] + _without(work, computing))


MODEL_LANES = ("forward", "backward", "wait")


def _merged(stretches: list[Stretch]) -> list[Stretch]:
    """The same time, no two stretches of it touching."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _without(stretches: list[Stretch], taken: list[Stretch]) -> list[Stretch]:
    """Merged stretches less merged ones."""
    found: list[Stretch] = []
    for start, end in stretches:
        for other_start, other_end in taken:
            if other_start < end and other_end > start:
                if other_start > start:
                    found.append((start, other_start))
                start = other_end
        if start < end:
            found.append((start, end))
    return found


def _length(stretches: list[Stretch]) -> float:
    return sum(end - start for start, end in stretches)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or being written this very moment
        return None


def _rows(path: Path, kind: type[StepRow] | type[EvalRow]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a file, and what to say of lines that are none."""
    text = path.read_bytes() if path.exists() else b""
    lines = text[: text.rfind(b"\n") + 1].splitlines()  # a run may still be writing the last
    rows = [row for line in lines if is_row(row := _parsed(line), kind)]
    bad = len(lines) - len(rows)
    return rows, [f"{counted(bad, 'line')} of {path.name}"] if bad else []


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
