"""Partitions of caches and memory bandwidth through the kernel's resctrl (Intel RDT, AMD QoS, Arm MPAM).

CPU AdamW streams through state that it never reads twice, so that cache is of no use to it, but it evicts what the
cores that feed the GPU need. Two groups keep them apart: a quarter of the cache ways for the cores that update, the
rest for those that train; and where bandwidth can be capped, the updates leave some of it to the link's copies, which
no cap touches. Everything is shown before it is applied, and applying only writes files below one directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import OutputError

RESCTRL = Path("/sys/fs/resctrl")
ADAM_CACHE_SHARE = 0.25
ADAM_BANDWIDTH_PERCENT = 80
"""Not measured: no machine with resctrl was at hand. The link takes up to half of a PCIe machine's memory rate."""


@dataclass(frozen=True)
class Group:
    """One partition: the files that are written and what goes into them."""

    name: str
    cpus_list: str
    schemata: tuple[str, ...]


@dataclass(frozen=True)
class Support:
    """What the machine can do."""

    in_kernel: bool
    mounted: bool
    resources: tuple[str, ...]
    """Such as L3 and MB."""


def support(root: Path = RESCTRL, filesystems: Path = Path("/proc/filesystems")) -> Support:
    """Whether the kernel has resctrl, whether it is mounted, and what it controls."""
    try:
        in_kernel = "resctrl" in filesystems.read_text(encoding="ascii").split()
    except OSError:
        in_kernel = False
    mounted = (root / "schemata").is_file()
    info = root / "info"
    names = sorted(p.name for p in info.iterdir() if not p.name.endswith("_MON")) if info.is_dir() else []
    return Support(in_kernel or mounted, mounted, tuple(name for name in names if name in ("L2", "L3", "MB")))


def partitions(train: Sequence[int], adam: Sequence[int], root: Path = RESCTRL) -> list[Group]:
    """The two groups for these cores, in the words of this machine's own schemata."""
    train_lines, adam_lines = [], []
    for line in (root / "schemata").read_text(encoding="ascii").splitlines():
        name, _, domains = line.strip().partition(":")
        kind, ids = name.strip(), [part.split("=")[0].strip() for part in domains.split(";") if "=" in part]
        if kind.startswith(("L2", "L3")):
            mask = int(_info(root, kind, "cbm_mask"), 16)
            least = int(_info(root, kind, "min_cbm_bits") or 1)
            ways = mask.bit_length()
            few = max(least, round(ways * ADAM_CACHE_SHARE))
            if ways - few < least:
                continue  # too few ways to share out
            low = (1 << few) - 1  # contiguous, as the hardware wants it
            adam_lines.append(f"{kind}:" + ";".join(f"{i}={low:x}" for i in ids))
            train_lines.append(f"{kind}:" + ";".join(f"{i}={mask & ~low:x}" for i in ids))
        elif kind == "MB":
            grain = int(_info(root, kind, "bandwidth_gran") or 10)
            least = int(_info(root, kind, "min_bandwidth") or grain)
            percent = max(least, ADAM_BANDWIDTH_PERCENT // grain * grain)
            adam_lines.append("MB:" + ";".join(f"{i}={percent}" for i in ids))
            train_lines.append("MB:" + ";".join(f"{i}=100" for i in ids))
    return [
        Group("penstock-train", cpus_list(train), tuple(train_lines)),
        Group("penstock-adam", cpus_list(adam), tuple(adam_lines)),
    ]


def apply(groups: Sequence[Group], root: Path = RESCTRL) -> None:
    """Make the groups; the same again is no change."""
    for group in groups:
        directory = root / group.name
        try:
            directory.mkdir(exist_ok=True)
            (directory / "cpus_list").write_text(group.cpus_list + "\n", encoding="ascii")
            (directory / "schemata").write_text("".join(f"{line}\n" for line in group.schemata), encoding="ascii")
        except OSError as error:
            status = root / "info" / "last_cmd_status"
            said = status.read_text(encoding="ascii").strip() if status.is_file() else ""
            raise OutputError(
                f"cannot be written ({error.strerror})" + (f"; the kernel says: {said}" if said else ""),
                where=str(directory),
                remedy="Run `penstock doctor --apply` as root.",
            ) from None


def cpus_list(cores: Sequence[int]) -> str:
    """Cores as the kernel writes them: 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _info(root: Path, kind: str, name: str) -> str:
    try:
        return (root / "info" / kind / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
