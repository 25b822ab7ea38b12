"""What a run leaves for its report beside the metrics: small files in RUN/facts, written once each.

They say what cannot be found out later: on what machine, with which versions, where state lived, how one step went on
the lanes, what took memory. Environment variables, host names and command lines are not among them, since keys hide in
all three; what is written is listed here by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedTokenizerBase

from penstock import __version__
from penstock.data.loader import Dataset
from penstock.data.preview import samples, summary
from penstock.engine import Engine, MemoryUse
from penstock.flow.timeline import Span
from penstock.machine.gpu_memory import gpu_room
from penstock.machine.hardware import describe
from penstock.report.metrics import Summary, to_json

FACTS = "facts"
SAMPLES = 4
RECORDED_STEP = 3
"""The first step compiles and the second still settles, so the third of a run, or of its resumption, is recorded."""
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "triton", "deepspeed")


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where a run ran. A field that is not here is not written."""

    started: str
    device: str
    gpu_bytes: int
    host_bytes: int
    processor: str
    cores: int
    system: str
    python: str
    cuda: str
    packages: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Spans from the beginning of `step` to the end of the next backward, under which its updates may hide."""

    step: int
    seconds: float
    spans: list[Span]

    def load(self) -> dict[str, float]:
        """Share of the time in which each lane was busy."""
        busy: dict[str, float] = {}
        for span in self.spans:
            if span.lane not in ("forward", "backward"):
                busy[span.lane] = busy.get(span.lane, 0.0) + (span.end - span.start) / self.seconds
        return busy


class Recorder:
    """Writes the facts of one run: what is known at the start, one step on the timeline, memory, and the end."""

    def __init__(self, run_dir: Path, engine: Engine, first_step: int, last_step: int, *, write: bool = True) -> None:
        """Without `write` nothing is recorded: of several ranks one does."""
        self._directory, self._engine, self._writes = run_dir / FACTS, engine, write
        self._step = min(first_step + RECORDED_STEP - 1, last_step)
        self._recording, self._lanes = False, dict[str, float]()

    def start(self, data: Dataset, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> None:
        """What is known before the first step."""
        if not self._writes:
            return
        self._directory.mkdir(exist_ok=True)
        for name in ("summary", "plan"):  # of an end that the run goes on after, and of another machine
            (self._directory / f"{name}.json").unlink(missing_ok=True)
        self._write("environment", dataclasses.asdict(environment(device)))
        self._write("placement", [dataclasses.asdict(unit) for unit in self._engine.placement()])
        self._write("data", {**summary(data), "samples": samples(data.train, tokenizer, SAMPLES)})

    def planned(self, step_seconds: float, gpu_bytes: int, host_bytes: int) -> None:
        """What was predicted, to be held against what is measured; 0 of what was not."""
        self._write("plan", {"step_seconds": step_seconds, "gpu_bytes": gpu_bytes, "host_bytes": host_bytes})

    def step_begins(self, step: int) -> None:
        """Start the tape before the step to be recorded, and stop it when the following one has ended too."""
        if step == self._step and self._writes:
            self._engine.start_timeline()
            self._recording = True
        elif step == self._step + 2:
            self._stop()

    def close(self, memory: Sequence[Sequence[MemoryUse]]) -> None:
        """The steps are over, state is still there: `memory` of each rank."""
        self._stop()
        first, *others = [[dataclasses.asdict(use) for use in uses] for uses in memory]
        self._write("memory", first)
        if others:
            self._write("memory_of_other_ranks", others)

    def end(self, result: Summary) -> None:
        """The run came to its end."""
        self._write("summary", json.loads(to_json(result)))

    def memory(self) -> list[MemoryUse]:
        """What takes memory now."""
        return self._engine.memory()

    def lanes(self) -> dict[str, float]:
        """Share of the recorded step in which each lane was busy; empty before it was recorded."""
        return self._lanes

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            timeline = cut(self._step, self._engine.stop_timeline())
            self._lanes = timeline.load()
            self._write("timeline", dataclasses.asdict(timeline))

    def _write(self, name: str, facts: Any) -> None:
        if not self._writes:
            return
        text = json.dumps(facts, ensure_ascii=False)
        # A name of a file may have bytes that are no letters; JSON has the same escape for them.
        (self._directory / f"{name}.json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def cut(step: int, spans: Sequence[Span]) -> Timeline:
    """The tape up to the end of the second step's backward.

    What follows it are updates that the tape itself waited for: nothing could hide them, so they would look exposed. A
    run of one step has no second backward and is taken as it is: nothing hid its updates.
    """
    backwards = sorted(span.end for span in spans if span.lane == "backward")
    end = backwards[-1] if backwards else 0.0
    firsts = [span.start for span in spans if span.lane == "forward"]
    updates = [span.start for span in spans if span.lane not in ("forward", "backward", "wait")]
    if not updates or not any(start > min(updates) for start in firsts):
        end = max((span.end for span in spans), default=0.0)
    kept = sorted((span for span in spans if span.start < end), key=lambda span: span.start)
    kept = [dataclasses.replace(span, end=min(span.end, end)) for span in kept]
    return Timeline(step, end, kept)


def environment(device: torch.device) -> Environment:
    """The machine and the software, as far as they explain a result."""
    cuda = device.type == "cuda"
    return Environment(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=describe(device),
        gpu_bytes=gpu_room(device)[1] if cuda else 0,
        host_bytes=int(psutil.virtual_memory().total),
        processor=processor(),
        cores=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cuda=str(torch.version.cuda or torch.version.hip or "") if cuda else "",
        packages=packages(),
    )


def packages() -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {"penstock": __version__}  # not of a distribution's name: on PyPI `penstock` is another project
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The processor's name, which Python's own `platform` does not know on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
