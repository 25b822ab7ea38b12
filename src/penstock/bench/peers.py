"""Peers: other systems on the same shapes and the same batch, each in a process of its own.

A peer may run out of memory, hang, die or not be installed; all of that is a result, and none of it may touch ours or
the next peer's. So the parent knows a peer only by its command, its exit and the JSON lines it printed. Running peers
in this process was rejected: DeepSpeed binds the process to a few cores and starts workers, and what torch's allocator
keeps would count against whoever comes next.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from penstock.errors import Interrupted
from penstock.machine.cache import cache_dir
from penstock.machine.signals import handling
from penstock.recipe.recipe import Recipe, to_dict

STATES = {"deepspeed": "fp32", "torchao": "bf16", "flashoptim": "int8"}
"""Format of the moments. torchao's weights have no master beyond bf16; FlashOptim's has 24 bits."""
CLIPS = {"deepspeed": True, "torchao": False, "flashoptim": True}
"""Whether the peer can clip by the global norm. torchao has sent the gradients down by the time the norm is known."""
SAMPLE_SECONDS = 0.25
"""Between looks at a peer's memory."""


@dataclass(frozen=True)
class Peer:
    """One peer with its settings."""

    name: str
    mode: str = ""
    ratio: float | None = None
    """Share of the state that DeepSpeed offloads."""
    offload_params: bool = False
    """Whether DeepSpeed's weights lie in host memory too, and come to the GPU while they are used."""

    @property
    def label(self) -> str:
        """For a line on the console, and a file's name."""
        return " ".join(filter(None, (self.name, self.mode, self.setting)))

    @property
    def setting(self) -> str:
        """For the row."""
        if self.offload_params:
            return "parameters on the CPU"
        return "" if self.ratio is None else f"ratio {self.ratio:g}"


@dataclass(frozen=True)
class PeerResult:
    """What came back."""

    step_s: float | None = None
    gpu_bytes: int = 0
    host_bytes: int = 0
    versions: str = ""
    error: str = ""
    driver_bytes: int = 0
    """The most of the GPU as the driver sees it, without what others had taken before."""


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    code: int | None
    """None: it was killed at the time limit."""
    lines: list[dict[str, Any]]
    """The JSON objects with a key `peer` that it printed."""
    last_line: str
    host_bytes: int


def peers_of(
    names: Sequence[str], modes: Sequence[str], ratios: Sequence[float], *, offload_params: bool = False
) -> list[Peer]:
    """Every setting of every peer that is asked for.

    With parameters in host memory DeepSpeed has one setting, ZeRO-Offload with all of the state: a GPU that is short of
    memory for weights has none for a share of their state, six times as large. SuperOffload takes the option too, but
    is described for weights on the GPU, and clipped it steps as ZeRO-Offload does, through another process.
    """
    found: list[Peer] = []
    for name in names:
        if name == "deepspeed" and offload_params:
            found.append(Peer(name, "zerooffload", 1.0, offload_params=True))
        elif name == "deepspeed":
            found += [Peer(name, mode, ratio) for mode in modes for ratio in ratios]
        else:
            found.append(Peer(name))
    return found


def run_peer(
    peer: Peer, recipe: Recipe, *, steps: int, timeout_s: float, log: Path, others_bytes: int = 0
) -> PeerResult:
    """Measure a peer's step in a new process. `log` gets what it prints, and stays only if it failed.

    `others_bytes` of the GPU are taken already, by this process for one: they do not count against the peer's limit.
    """
    if importlib.util.find_spec(peer.name) is None:
        return PeerResult(error=f"not installed: pip install {peer.name}")
    spec = log.with_suffix(".json")
    asked = {"peer": asdict(peer), "recipe": to_dict(recipe), "steps": steps, "others_bytes": others_bytes}
    spec.write_text(json.dumps(asked), encoding="utf-8")
    command = [sys.executable, "-m", "penstock.bench.peer_process", str(spec)]
    kernels = cache_dir("peer-kernels")
    try:
        ended = run_process(command, timeout_s=timeout_s, log=log, env={"TORCH_EXTENSIONS_DIR": str(kernels)})
    finally:
        spec.unlink()
        # A peer that is killed while it compiles leaves a lock, and the next would wait for it for ever.
        for lock in kernels.glob("*/lock"):
            lock.unlink(missing_ok=True)
    result = judge(ended, peer.name, timeout_s)
    if not result.error:
        log.unlink()
    return result


def run_process(command: Sequence[str], *, timeout_s: float, log: Path, env: dict[str, str] | None = None) -> Exit:
    """Run a command as a process group of its own, watch its memory, and leave nothing of the group behind.

    `env` is what the command gets where the environment does not say it already.
    """
    peak = 0
    deadline = time.monotonic() + timeout_s
    with log.open("wb") as file, _stoppable(log.parent):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**(env or {}), **os.environ},
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                peak = max(peak, tree_bytes(process.pid))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.01, min(SAMPLE_SECONDS, deadline - time.monotonic())))
            code = process.poll()
        finally:  # also when we are interrupted: the group does not get our terminal's signals
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    printed = [line for line in text.splitlines() if line.strip()]
    return Exit(code, _objects(printed), printed[-1].strip() if printed else "", peak)


@contextlib.contextmanager
def _stoppable(results: Path) -> Iterator[None]:
    """SIGTERM, such as a job's own time limit sends, unwinds like Ctrl-C: dying of it would leave the group running."""

    def stop(number: int, frame: object) -> None:
        what, remedy = "stopped by SIGTERM; the rows so far are written", "The same command again adds rows to them."
        raise Interrupted(what, signal_number=number, where=str(results), remedy=remedy)

    with handling(stop, signal.SIGTERM):
        yield


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants. What they share is counted once, for the one with most."""
    private, shared = 0, 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                memory = process.memory_info()
                private += memory.rss - memory.shared
                shared = max(shared, memory.shared)
    return private + shared


def _objects(lines: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if "peer" in value:
                    found.append(value)
    return found


def judge(ended: Exit, name: str, timeout_s: float) -> PeerResult:
    """A result, or why there is none, in words for the table."""
    last = ended.lines[-1] if ended.lines else {}
    done = "step_s" in last
    return PeerResult(
        step_s=last["step_s"] if done else None,
        gpu_bytes=int(last.get("gpu_bytes", 0)),
        host_bytes=ended.host_bytes,
        versions=str(last.get("versions", "")),
        error="" if done else _reason(ended, last, name, timeout_s),
        driver_bytes=int(last.get("driver_bytes", 0)),
    )


def row_values(peer: Peer, recipe: Recipe, result: PeerResult) -> dict[str, Any]:
    """What a peer's row says that one of ours on the same recipe would not."""
    return {
        "mode": peer.mode,
        "states": STATES[peer.name],
        "clip": CLIPS[peer.name] and bool(recipe.max_grad_norm),
        "recompute": "none" if recipe.recompute == "none" else "full",  # Hugging Face has nothing between
        "compiled": False,
        "gpu_bytes": result.gpu_bytes,
        "host_bytes": result.host_bytes,
        "driver_bytes": result.driver_bytes,
        "error": result.error,
        "setting": peer.setting,
        "weights": "streamed" if peer.offload_params else "resident",
        "order": "rows",
        "inputs": "",
        **({"versions": result.versions} if result.versions else {}),
    }


def _reason(ended: Exit, last: dict[str, Any], name: str, timeout_s: float) -> str:
    if "missing" in last:
        return f"not installed: pip install {last['missing']} ({name} needs it)"
    if "error" in last:
        return str(last["error"])
    if ended.code is None:
        done = int(last.get("steps_done", 0))
        return f"only {done} steps within {timeout_s:g} s" if done else f"no step within {timeout_s:g} s"
    if ended.code == -signal.SIGKILL:
        return "killed (host memory?)"
    if ended.code < 0:
        return f"died of {signal.Signals(-ended.code).name}"
    return f"exit {ended.code}: {ended.last_line}"
