"""This machine as a `Machine`: its rates, measured once in a few seconds and kept in a file.

The file is keyed by what the rates depend on (machine, cores, GPUs, torch), so that a home directory which several
machines share holds an entry for each. Memory is looked up anew every time: others use it too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.machine.hardware import adam_cores, available_host_bytes, pci_gpus, usable_cores
from penstock.machine.known import Machine

if TYPE_CHECKING:
    import torch

Say = Callable[[str], None]
BUSY_SHARE = 0.25
"""Of the cores, from which on what others do shows in what is measured."""
_FORMAT = 4
"""Raised when what is measured changes, so that old files are measured again."""


def cache_file() -> Path:
    """Where rates are kept: $PENSTOCK_CACHE, else ~/.cache/penstock."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    return (Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "penstock") / "machines.json"


def identity() -> str:
    """What the rates depend on, as a key. Read from files, so that it takes no time and needs no torch."""
    try:
        machine_id = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        machine_id = platform.node()
    gpus = [f"{gpu.address} x{gpu.link_width_max}" for gpu in pci_gpus()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    parts = (_FORMAT, machine_id, platform.machine(), usable_cores(), gpus, visible, version("torch"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def this_machine(*, remeasure: bool, say: Say, cache: Path | None = None) -> Machine:
    """Rates from the file, or measured now; memory as it is at the moment."""
    path, key = cache or cache_file(), identity()
    known = {} if remeasure else _load(path)
    if key in known:
        machine = known[key]
    else:
        say("measuring this machine once (link, memories, matrix product, CPU AdamW) ...")
        start, others = time.perf_counter(), busy_cores()
        machine = measure()
        if others > BUSY_SHARE * machine.cores:
            note = f"measured while other programs kept {others:.1f} of {machine.cores} cores busy: too low, perhaps"
            machine = dataclasses.replace(machine, sources=(*machine.sources, note))
            say(f"  WARNING: {note}; measure again when they have ended: penstock plan --remeasure")
        say(f"  measured in {time.perf_counter() - start:.1f} s, kept in {path}; --remeasure measures again")
        _store(path, _load(path) | {key: machine}, say)
    return dataclasses.replace(machine, host_bytes=available_host_bytes())


def busy_cores() -> float:
    """How many of this process's cores are busy, on average over the last minute, if all of the machine are alike."""
    return os.getloadavg()[0] * len(usable_cores()) / (os.cpu_count() or 1)


def unmeasured_machine(device: torch.device | None = None) -> Machine:
    """This machine's memory, with rates of one: enough to tell whether something fits, and nothing else.

    Without a device, one without a GPU. How long a step takes there is not predicted: cores that others use too, caches
    and small products make it anything between half and twice of what rates say.
    """
    gpu_bytes = 0
    if device is not None and device.type == "cuda":
        import torch

        gpu_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return Machine(
        name="this machine",
        gpu_bytes=gpu_bytes,
        host_bytes=available_host_bytes(),
        cores=len(usable_cores()),
        matrix_flops_per_s=1.0,
        device_memory_bytes_per_s=1.0,
        link_bytes_per_s=1.0,
        host_params_per_s=1.0,
    )


def measure() -> Machine:
    """Every rate that the plan needs, in under ten seconds."""
    import torch

    from penstock.bench.ceilings import measure_ceilings
    from penstock.machine.hardware import describe, near_cores, pick_device, pick_dtype
    from penstock.offload.rates import measure_rates

    device = pick_device("auto")
    dtype = torch.float32 if pick_dtype("auto", device) == "fp32" else torch.bfloat16
    ceilings = measure_ceilings(device, dtype)
    gpu = device.type == "cuda"
    link, updates, masters = 0.0, ceilings.cpu_adamw_params_per_s, 0.0  # without a GPU there is no link
    if gpu:
        near = near_cores(device)
        rates = measure_rates(device, adam_cores(near))
        link, updates = rates.link_bytes_per_s, rates.host_params_per_s
        masters = measure_rates(device, adam_cores(near), masters_first=True).alone_params_per_s
    return Machine(
        name="this machine",
        gpu_bytes=int(torch.cuda.get_device_properties(device).total_memory) if gpu else 0,
        host_bytes=available_host_bytes(),
        cores=len(usable_cores()),
        matrix_flops_per_s=ceilings.matrix_flops_per_s,
        device_memory_bytes_per_s=ceilings.device_memory_bytes_per_s or ceilings.host_memory_bytes_per_s,
        link_bytes_per_s=link or 1.0,
        host_params_per_s=updates,
        masters_per_s=masters,
        fp8_flops_per_s=ceilings.fp8_flops_per_s or 0.0,
        measured=True,
        sources=(f"measured here: {describe(device)}", *ceilings.lines()),
    )


def disk_rate(directory: Path, num_bytes: int) -> float | None:
    """Bytes a second that reach the disk, or None where nothing can be written."""
    block = os.urandom(2**20)  # a disk that compresses would make zeros look fast
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            start = time.perf_counter()
            for _ in range(num_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return num_bytes / (time.perf_counter() - start)
    except OSError:
        return None


def _load(path: Path) -> dict[str, Machine]:
    """What is known; a file that cannot be read is as good as none."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {key: Machine(**values | {"sources": tuple(values["sources"])}) for key, values in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _store(path: Path, machines: dict[str, Machine], say: Say) -> None:
    text = json.dumps({key: dataclasses.asdict(machine) for key, machine in machines.items()}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)  # whole or not at all: another process may be reading
    except OSError as error:
        say(f"  {path} cannot be written ({error.strerror}), so that it is measured each time")
