"""What this machine has. Nothing here allocates; torch is imported only when a device is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import RecipeError

if TYPE_CHECKING:
    import torch


def pick_device(choice: str) -> torch.device:
    """The device a run uses: the GPU if there is one, unless the recipe says otherwise."""
    import torch

    if choice == "cuda" and not torch.cuda.is_available():
        raise RecipeError("device = 'cuda': torch sees no GPU", remedy="Use --device cpu, or install a CUDA torch.")
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


def pick_dtype(choice: str, device: torch.device) -> Literal["bf16", "fp32"]:
    """The working precision: bf16, but fp32 on a CPU that would emulate bf16 products a hundred times slower."""
    import torch

    if choice == "auto":
        return "bf16" if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"
    return "fp32" if choice == "fp32" else "bf16"


def describe(device: torch.device) -> str:
    """The device in words, for the console."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()} cores"


def usable_cores() -> list[int]:
    """Cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def near_cores(device: torch.device) -> list[int]:
    """Usable cores of the NUMA node that the GPU hangs on, or all usable ones where that is not known."""
    usable = usable_cores()
    if device.type != "cuda":
        return usable
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        near = parse_cores((PCI_DEVICES / address / "local_cpulist").read_text(encoding="ascii"))
    except (AttributeError, OSError, ValueError):
        return usable
    return [core for core in usable if core in near] or usable


def parse_cores(text: str) -> set[int]:
    """The kernel's way of writing a set of cores: 0-3,8,10-11."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return {core for first, *last in ranges for core in range(int(first), int(last[0] if last else first) + 1)}


PCI_DEVICES = Path("/sys/bus/pci/devices")


def available_host_bytes() -> int:
    """Host memory that can still be taken: what the machine has free, or what the cgroup leaves if that is less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit_path, usage_path in CGROUP_FILES:
        try:
            limit = Path(limit_path).read_text(encoding="ascii").strip()
            usage = int(Path(usage_path).read_text(encoding="ascii")) - _page_cache(Path(usage_path).parent)
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            available = min(available, max(0, int(limit) - usage))
    return available


def _page_cache(cgroup: Path) -> int:
    """Bytes of files that the kernel keeps in memory as long as nobody else wants it."""
    try:
        words = (cgroup / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return 0
    stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    return stat.get("inactive_file", 0) + stat.get("active_file", 0)


CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
