"""What this machine has. Nothing here allocates; torch is imported only when a device is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
