"""`penstock doctor`: what to fix on this machine before a run, each finding with its fix.

A finding is `ok`, `advice` (it works, but slower or with less), `problem` (something that was meant to work does not),
or `impossible` (no run can succeed). Only the last makes the command fail. Paths are arguments, so that the tests show
it machines that are not there.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock.bench.this_machine import disk_rate
from penstock.checkpoint.places import check_path
from penstock.errors import OutputError
from penstock.machine import resctrl
from penstock.machine.hardware import (
    CGROUP_FILES,
    PciGpu,
    adam_cores,
    available_host_bytes,
    parse_cores,
    pci_gpus,
    shares_of_cores,
    usable_cores,
)

Level = Literal["ok", "advice", "problem", "impossible"]
GIB = 2**30
LEAST_HOST_BYTES = 2 * GIB
"""torch and transformers alone take 1.8 GB."""
LEAST_DISK_BYTES = GIB
DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each major version of CUDA
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    level: Level
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Paths:
    """Where the kernel tells about the machine."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    resctrl: Path = resctrl.RESCTRL
    cgroup: tuple[tuple[str, str], ...] = CGROUP_FILES


def examine(output_dir: Path, *, apply: bool = False, paths: Paths | None = None) -> list[Finding]:
    """Everything, in the order in which one would fix it."""
    paths = paths or Paths()
    gpus = pci_gpus(paths.sys / "bus/pci/devices")
    return [
        *torch_and_driver(gpus, paths),
        compiler(),
        host_memory(paths),
        memory_lock(bool(gpus)),
        huge_pages(paths),
        swap(paths),
        *numa(gpus, paths),
        *pcie(gpus),
        governor(paths),
        *disk(output_dir),
        *allocator(bool(gpus)),
        *hub(),
        *memory_partitions(gpus, paths, apply=apply),
    ]


def torch_and_driver(gpus: list[PciGpu], paths: Paths) -> Iterator[Finding]:
    """Whether torch can be imported and sees the GPUs that are there."""
    if find_spec("torch") is None:
        yield Finding("torch", "impossible", "torch is not installed", "pip install -c constraints.txt .")
        return
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver = _driver(paths)
    built_for = torch.version.cuda or ("ROCm " + torch.version.hip if torch.version.hip else "")
    if not gpus and not seen:
        yield Finding("torch", "ok", f"torch {torch.__version__}; no GPU in this machine, so runs use the CPU")
    elif seen:
        yield Finding("torch", "ok", f"torch {torch.__version__} for CUDA {built_for}, driver {driver}, {seen} GPU(s)")
        if len(gpus) > seen:
            what = f"{len(gpus)} GPUs in the machine, torch sees {seen}"
            yield Finding("torch", "advice", what, "Look at CUDA_VISIBLE_DEVICES and at the container's --gpus.")
    elif not built_for:
        fix = "Install a CUDA build: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield Finding("torch", "problem", f"{len(gpus)} GPU(s), but torch {torch.__version__} was built for CPUs", fix)
    elif not driver:
        fix = "Install NVIDIA's driver, or start the container with --gpus all."
        yield Finding("torch", "problem", f"{len(gpus)} GPU(s), but no driver is loaded", fix)
    else:
        yield driver_mismatch(driver, built_for, str(torch.__version__))


def driver_mismatch(driver: str, built_for: str, version: str) -> Finding:
    """A driver is there and torch sees no GPU: mostly the driver is older than torch's CUDA."""
    major = int(built_for.split(".")[0]) if built_for[:1].isdigit() else 0
    needed = DRIVERS.get(major, 0)
    if needed and int(driver.split(".")[0]) < needed:
        what = f"driver {driver} is too old for torch {version}, built for CUDA {built_for}"
        return Finding("torch", "problem", what, f"Install driver {needed} or newer, or a torch for an older CUDA.")
    what = f"driver {driver} and torch {version} for CUDA {built_for}, but torch sees no GPU"
    return Finding("torch", "problem", what, "Run nvidia-smi; a reboot after a driver update, or --gpus all, mends it.")


def _driver(paths: Paths) -> str:
    match = re.search(r"Kernel Module\D*([0-9.]+)", _read(paths.proc / "driver/nvidia/version"))
    return match[1] if match else ""


def compiler() -> Finding:
    """The C kernel of CPU AdamW, built at install."""
    from penstock.update.host_threads import host_library

    if host_library() is not None:
        return Finding("compiler", "ok", "the C kernel of CPU AdamW is built")
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    fix = "pip install --force-reinstall --no-deps ." if found else "apt install gcc, then install penstock again."
    what = "the C kernel is not built: the same bits, but the home `host` is many times slower"
    return Finding("compiler", "advice", what + ("" if found else "; there is no C compiler"), fix)


def host_memory(paths: Paths) -> Finding:
    """What can be taken, and whether a cgroup keeps the rest away."""
    available, whole = available_host_bytes(), _meminfo(paths).get("MemTotal", 0)
    limits = [int(text) for limit, _ in paths.cgroup if (text := _read(Path(limit))).isdigit()]
    limit = min(limits, default=0)
    what = f"{available / GIB:.1f} GiB of host memory are available"
    if available < LEAST_HOST_BYTES:
        return Finding("host memory", "impossible", what, f"At least {LEAST_HOST_BYTES / GIB:.0f} GiB are needed.")
    if limit and whole and limit < 0.9 * whole:
        what += f"; the cgroup allows {limit / GIB:.1f} of the machine's {whole / GIB:.1f}"
        return Finding("host memory", "advice", what, "Raise the container's --memory, or the job's --mem.")
    return Finding("host memory", "ok", what)


def memory_lock(has_gpu: bool) -> Finding:
    """Arenas are pinned, and some drivers count that against the limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY:
        return Finding("memory lock", "ok", "no limit on locked memory")
    what = f"locked memory is limited to {soft / GIB:.2f} GiB (ulimit -l)"
    fix = "ulimit -l unlimited, or `* - memlock unlimited` in /etc/security/limits.conf, or docker --ulimit memlock=-1."
    return Finding("memory lock", "advice" if has_gpu else "ok", what, fix if has_gpu else "")


def huge_pages(paths: Paths) -> Finding:
    """Arenas ask for huge pages: fewer to fault and to register."""
    text = _read(paths.sys / "kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", text)
    if match and match[1] == "never":
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        return Finding("huge pages", "advice", "transparent huge pages are off: arenas take longer to pin", fix)
    return Finding("huge pages", "ok", f"transparent huge pages: {match[1] if match else 'not known'}")


def swap(paths: Paths) -> Finding:
    """Swapping makes a run that does not fit slow instead of refused."""
    memory = _meminfo(paths)
    size, free = memory.get("SwapTotal", 0), memory.get("SwapFree", 0)
    if size and free < 0.9 * size:
        what = f"{(size - free) / GIB:.1f} GiB are swapped out"
        return Finding(
            "swap", "advice", what, "Free memory, then swapoff -a (as root): updates must not wait for a disk."
        )
    return Finding("swap", "ok", f"{size / GIB:.1f} GiB of swap, unused" if size else "no swap")


def numa(gpus: list[PciGpu], paths: Paths) -> Iterator[Finding]:
    """Whether this process runs on the cores and in the memory of its GPU."""
    nodes = sorted(p.name for p in (paths.sys / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        yield Finding("NUMA", "ok", "one node")
        return
    mine = set(usable_cores())
    for gpu in gpus:
        near = mine & set(gpu.cores)
        command = f"numactl --cpunodebind={gpu.node} --membind={gpu.node} penstock train ..."
        if gpu.node >= 0 and mine - near:
            what = f"GPU {gpu.address} is on node {gpu.node}; this process may run on cores of other nodes too"
            fix = f"A run keeps to the cores near its GPU by itself; its memory too with: {command}"
            yield Finding("NUMA", "advice" if near else "problem", what if near else f"{what}, and on none of its", fix)
        else:
            yield Finding("NUMA", "ok", f"GPU {gpu.address}: bound to node {gpu.node}")
    if not gpus:
        sizes = {n: len(parse_cores(_read(paths.sys / f"devices/system/node/{n}/cpulist"))) for n in nodes}
        yield Finding("NUMA", "ok", ", ".join(f"{node}: {count} cores" for node, count in sizes.items()))


def pcie(gpus: list[PciGpu]) -> Iterator[Finding]:
    """Lanes that are missing halve the rate at which state moves."""
    for gpu in gpus:
        if gpu.below_its_width:
            what = f"GPU {gpu.address} has {gpu.link_width} PCIe lanes of {gpu.link_width_max}"
            yield Finding("PCIe", "problem", what, "Reseat the card or the riser, or use a slot with all lanes.")
        elif gpu.link_width:
            what = f"GPU {gpu.address}: x{gpu.link_width}, up to {gpu.link_speed_max}"
            yield Finding("PCIe", "ok", what)


def governor(paths: Paths) -> Finding:
    """Cores that wake up slowly hold up launches and updates."""
    name = _read(paths.sys / "devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if name and name not in ("performance", "schedutil"):
        fix = "cpupower frequency-set -g performance (as root)"
        return Finding("CPU governor", "advice", f"the governor is {name}", fix)
    return Finding("CPU governor", "ok", name or "not visible here, as in most virtual machines")


def disk(directory: Path) -> Iterator[Finding]:
    """Room and speed where runs are written."""
    try:
        check_path(directory, "--output-dir")
    except OutputError as error:
        yield Finding("disk", "impossible", f"{error.where} {error.what}", error.remedy)
        return
    existing = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    what = f"{free / GIB:.1f} GiB free at {existing}"
    if free < LEAST_DISK_BYTES:
        yield Finding("disk", "impossible", what, "Free space, or use --output-dir on another disk.")
        return
    rate = disk_rate(existing, 64 * 2**20)
    if rate is None:
        yield Finding(
            "disk", "impossible", f"{existing} cannot be written", "Use an --output-dir that you can write to."
        )
        return
    what += f", {rate / 1e6:,.0f} MB/s"
    slow = rate < 200e6
    fix = "A checkpoint of llama-8b is 96 GB: save to a local NVMe disk, or less often (--save-every)." if slow else ""
    yield Finding("disk", "advice" if slow else "ok", what, fix)


def allocator(has_gpu: bool) -> Iterator[Finding]:
    """Without expandable segments, fragments eat the memory that the plan counts on."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if has_gpu and "expandable_segments:True" not in text:
        fix = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield Finding("allocator", "advice", "torch's allocator may fragment the last GB of a full GPU", fix)
    elif has_gpu:
        yield Finding("allocator", "ok", text)


def hub() -> Iterator[Finding]:
    """Whether models can be fetched, and whether there is a token; never the token."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):  # as the Hub's library reads it
        yield Finding("Hub", "advice", "HF_HUB_OFFLINE is set: only what is in the cache", "unset HF_HUB_OFFLINE")
    else:
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        proxies, host = getproxies(), urlsplit(endpoint).hostname or endpoint
        proxy = proxies.get(urlsplit(endpoint).scheme) or proxies.get("all", "")
        proxy = "" if proxy_bypass(host) else proxy
        try:
            met = _address(proxy or endpoint)
            socket.create_connection(met, timeout=2).close()
            yield Finding("Hub", "ok", f"the proxy {met[0]} can be reached" if proxy else f"{host} can be reached")
        except (OSError, ValueError) as error:
            set_by = "HTTPS_PROXY" if proxy else "HF_ENDPOINT" if "HF_ENDPOINT" in os.environ else ""
            fix = f"See that {set_by} is right" if set_by else "Behind a proxy set HTTPS_PROXY"
            fix += "; without a network use --model DIRECTORY and local --data."
            by = ", by the proxy that is set" if proxy else ""
            # A proxy's address may hold a password, which a ValueError would quote.
            why = error.strerror or error if isinstance(error, OSError) else "that is no address"
            what = f"{host} cannot be reached{by} ({why})"
            yield Finding("Hub", "advice", what, fix)
    from huggingface_hub import get_token

    if get_token():
        yield Finding("token", "ok", "a Hub token is set (it is never printed, logged or saved)")
    else:
        fix = "Gated models such as Llama need one: export HF_TOKEN=..., or hf auth login."
        yield Finding("token", "advice", "no Hub token", fix)


def _address(url: str) -> tuple[str, int]:
    """Host and port of an address, which a proxy's may be without https://."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme, 1080)


def memory_partitions(gpus: list[PciGpu], paths: Paths, *, apply: bool) -> Iterator[Finding]:
    """Caches and bandwidth, shared out between the cores that train and those that update, with a rank on each GPU."""
    found = resctrl.support(paths.resctrl, paths.proc / "filesystems")
    if not found.in_kernel:
        yield Finding("partitions", "ok", "no resctrl here (Intel RDT, AMD QoS or Arm MPAM): nothing to share out")
        return
    if not found.mounted:
        fix = "mount -t resctrl resctrl /sys/fs/resctrl (as root), then `penstock doctor` shows the partitions."
        yield Finding("partitions", "advice", "the kernel has resctrl, but it is not mounted", fix)
        return
    cores = usable_cores()
    near = [[core for core in cores if core in gpu.cores] or cores for gpu in gpus] or [cores]
    adam = {core for share in shares_of_cores(near) for core in adam_cores(share) if share}  # as the engine takes them
    train = [core for core in cores if core not in adam]
    if not (train and adam):
        yield Finding("partitions", "ok", "too few cores to share out")
        return
    groups = resctrl.partitions(train, sorted(adam), paths.resctrl)
    if apply:
        resctrl.apply(groups, paths.resctrl)
    for group in groups:
        where = paths.resctrl / group.name
        what = f"{where}: cpus_list {group.cpus_list}; schemata {' '.join(group.schemata) or 'as it is'}"
        if apply:
            yield Finding("partitions", "ok", f"applied: {what}")
        else:
            yield Finding("partitions", "advice", what, "penstock doctor --apply (as root) writes this.")


def lines(findings: Iterable[Finding]) -> list[str]:
    """For people: what is wrong comes with its fix."""
    findings = list(findings)
    marks: dict[Level, str] = {"ok": "ok", "advice": "advice", "problem": "PROBLEM", "impossible": "STOP"}
    found = []
    for finding in findings:
        found.append(f"{marks[finding.level]:<8} {finding.topic:<14} {finding.what}")
        if finding.fix:
            found.append(f"{'':<24}fix: {finding.fix}")
    counts = {level: sum(f.level == level for f in findings) for level in marks}
    stop = "runs are impossible until STOP is mended" if counts["impossible"] else "runs are possible"
    return [*found, "", f"{counts['problem']} problems, {counts['advice']} pieces of advice; {stop}"]


def _meminfo(paths: Paths) -> dict[str, int]:
    rows = (line.split() for line in _read(paths.proc / "meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
