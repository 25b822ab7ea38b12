"""What this machine has. Nothing here allocates; torch is imported only when a device is asked for."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import RecipeError
from penstock.recipe.recipe import Recipe

if TYPE_CHECKING:
    import torch

CPU_ADAM_CORES = 0.9
"""Share of the cores near a GPU that update state in host memory, unless a recipe says otherwise."""


def pick_device(choice: str) -> torch.device:
    """The device a run uses: the GPU if there is one, unless the recipe says otherwise."""
    import torch

    if choice not in ("auto", "cpu", "cuda"):
        raise RecipeError("is no device", where=f"device = {choice!r}", remedy="Use auto, cpu or cuda.")
    if choice == "cuda" and not torch.cuda.is_available():
        remedy = "Use --device cpu. If there is a GPU, `penstock doctor` says why torch does not see it."
        raise RecipeError("torch sees no GPU", where="device = 'cuda'", remedy=remedy)
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


def pick_dtype(choice: str, device: torch.device) -> Literal["bf16", "fp32"]:
    """The working precision: bf16, but fp32 on a CPU that would have to emulate its products."""
    if choice == "auto":
        return "bf16" if device.type == "cuda" or cpu_has_bf16() else "fp32"
    return "fp32" if choice == "fp32" else "bf16"


BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
"""As the kernel lists them in /proc/cpuinfo, on x86 and on Arm."""


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bf16 itself. The plan asks this too, so that both mean the same by `auto`.

    Torch's own answer was rejected: with AVX-512 alone it says yes, converts, and takes twice the time of fp32.
    """
    lines = _read(cpuinfo).splitlines()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return bool(BF16_INSTRUCTIONS & set(flags.partition(":")[2].split()))


COMPILED_FROM = 100_000_000
"""Parameters from which on layers are compiled, and a GPU is measured for its plan. Below, half a minute of both is
longer than what they save: 55 s for the 4 s in which an H200 trains the demo."""


def pick_compile(recipe: Recipe, device: torch.device, num_params: int = COMPILED_FROM) -> bool:
    """Whether layers are compiled: of large models on a GPU, unless DeepSpeed gathers weights inside of them.

    Without a number the recipe's word is taken: whoever prepared the run has looked at its size.
    """
    wanted = recipe.compile and num_params >= COMPILED_FROM
    return wanted and device.type == "cuda" and recipe.engine == "penstock"


def make_repeatable(recipe: Recipe) -> None:
    """Seed every generator in use; with `deterministic`, refuse operations that may differ between runs."""
    import torch

    torch.manual_seed(recipe.seed)
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its handle is made
    torch.use_deterministic_algorithms(recipe.deterministic)


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


def adam_cores(near: Sequence[int], share: float = CPU_ADAM_CORES) -> list[int]:
    """Of the cores near a GPU, those that update state in host memory; at least one."""
    return list(near[: max(1, int(len(near) * share))])


def shares_of_cores(near: Sequence[Sequence[int]]) -> list[list[int]]:
    """The cores of each rank of a machine, of what is near each: ranks near the same cores split them.

    With fewer cores than ranks none gets a share: two ranks on one core would wait for each other.
    """
    found: list[list[int]] = []
    for rank, cores in enumerate(near):
        neighbours = [other for other, theirs in enumerate(near) if list(theirs) == list(cores)]
        place, count = neighbours.index(rank), len(cores) // len(neighbours)
        found.append(list(cores[place * count : (place + 1) * count]))
    return found


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
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit_bytes != resource.RLIM_INFINITY:  # of addresses, so that what is merely mapped counts too
        available = min(available, max(0, limit_bytes - int(psutil.Process().memory_info().vms)))
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


@dataclass(frozen=True)
class PciGpu:
    """A GPU as the kernel's list of devices has it: found without a driver library."""

    address: str
    node: int
    """NUMA node, or -1 where there is one only."""
    cores: tuple[int, ...]
    """Cores near it."""
    link_speed_max: str
    link_width: int
    link_width_max: int

    @property
    def below_its_width(self) -> bool:
        """Fewer lanes than it could have. Speed is no sign: an idle GPU slows its link down to save power."""
        return 0 < self.link_width < self.link_width_max


_GPU_VENDORS = ("0x10de", "0x1002")
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


def pci_gpus(devices: Path | None = None) -> list[PciGpu]:
    """Every GPU in the machine with its NUMA node, near cores and PCIe link."""
    found: list[PciGpu] = []
    root = PCI_DEVICES if devices is None else devices
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if _read(path / "vendor") not in _GPU_VENDORS or _read(path / "class")[:6] not in _GPU_CLASSES:
            continue
        node, widths = _read(path / "numa_node"), [_read(path / f"{n}_link_width") for n in ("current", "max")]
        found.append(
            PciGpu(
                path.name,
                int(node) if node.lstrip("-").isdigit() else -1,
                tuple(sorted(parse_cores(_read(path / "local_cpulist")))),
                _read(path / "max_link_speed"),
                *(int(width) if width.isdigit() else 0 for width in widths),
            )
        )
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
