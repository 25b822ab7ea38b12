"""Machines: what the plan needs to know of one, and a table of those that people ask about.

One of them was measured (H200). The others are data sheets times the shares of a data sheet that the H200 really gave:
each entry says so, and names its sources. A plan for such a machine is an estimate; `--remeasure` on the machine itself
replaces it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from penstock.errors import RecipeError, did_you_mean
from penstock.recipe.lists import parse_size

RESULTS = "benchmarks/results/2026-11-15-h200"
MATRIX_SHARE = 784e12 / 989.4e12
"""Of the dense bf16 peak, what an 8192-cubed product gives on the H200 (RESULTS/ceilings.json)."""
FP8_SHARE = 1531e12 / (2 * 989.4e12)
"""Of the dense fp8 peak, which is twice that of bf16, what an 8192-cubed product gives on the H200
(benchmarks/results/2026-11-17-h200/fp8/ceilings.json)."""
MEMORY_SHARE = 4.18e12 / 4.8e12
"""Of the GPU memory's bandwidth, what a copy gives, read and write counted (RESULTS/ceilings.json)."""
LINK_SHARE = 36e9 / 64e9
"""Of a link's one-way peak, what state and weights get while both ways and the CPU's updates run: 36 GB/s on PCIe 5 x16
beside CPU AdamW (RESULTS/rates.jsonl)."""
PARAMS_PER_CORE = 3.5e9 / 14
"""CPU AdamW a core and second while the link is busy: 3.5 G/s by 14 of 16 cores (RESULTS/rates.jsonl)."""
MASTERS_PER_CORE = 7.6e9 / 14
"""The same of masters alone, in a step whose weights stream (benchmarks/results/2026-11-16-h200/streamed)."""
HOST_TRAFFIC, MASTER_TRAFFIC = 26, 18
"""Bytes of host memory that one CPU update reads and writes: state both ways, gradient, weight both ways. Of a master
alone: moments one way."""
HOST_MEMORY_SHARE = 0.6
"""Of the host memory's bandwidth, what is left for updates beside the link's traffic (an assumption)."""
ALL_LINKS_SHARE = 0.8
"""Of the same, what the links of several GPUs get together (an assumption)."""


@dataclass(frozen=True)
class Machine:
    """One GPU and its share of the host, in rates that were reached or are expected, not in peaks."""

    name: str
    gpu_bytes: int
    """All of the GPU's memory, the driver's share included. Without a GPU: 0."""
    host_bytes: int
    """Of the whole host; `gpus_per_host` GPUs share it."""
    cores: int
    matrix_flops_per_s: float
    device_memory_bytes_per_s: float
    """A copy on the device, read and write counted. Without a GPU: the host's."""
    link_bytes_per_s: float
    """Each way, while both ways and the CPU are busy."""
    host_params_per_s: float
    """CPU AdamW by the usual share of the cores, while the link is busy."""
    masters_per_s: float = 0.0
    """Masters that the same cores update while weights come and no state streams; 0: as many as parameters."""
    fp8_flops_per_s: float = 0.0
    """Of one large product of fp8 numbers; 0 where there is none."""
    peer_bytes_per_s: float = 25e9
    """Between GPUs, each way."""
    gpus_per_host: int = 0
    """GPUs that share the host memory: 1 on a superchip, 0 for all there are."""
    all_links_bytes_per_s: float = math.inf
    """What host memory gives to the links of all GPUs that share it, both ways counted."""
    peers_cross_link: bool = False
    """GPUs of one host have no link of their own: what they exchange takes the way to the host."""
    unified: bool = False
    """GPU and host memory are the same: nothing is gained by moving state."""
    measured: bool = False
    sources: tuple[str, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """False for a CPU."""
        return self.gpu_bytes > 0 or self.unified

    @property
    def predicts_time(self) -> bool:
        """Whether seconds are worth saying: without a GPU they would be off by a factor of two."""
        return self.has_gpu and self.matrix_flops_per_s > 1

    @property
    def one_memory(self) -> bool:
        """Whether every home lies in the same memory as the weights."""
        return self.unified or not self.has_gpu


@dataclass(frozen=True)
class Peak:
    """A line of a data sheet."""

    matrix_tflops: float
    """bf16, dense, fp32 accumulation."""
    memory_gb_per_s: float
    link_gb_per_s: float
    """One way."""
    host_memory_gb_per_s: float
    peer_gb_per_s: float
    """One way, between GPUs of one machine."""


def _update_rates(cores: int, memory_bytes_per_s: float) -> tuple[float, float]:
    """Parameters and masters a second by the usual share of the cores, no faster than the host's memory."""
    parameters = min(0.9 * cores * PARAMS_PER_CORE, memory_bytes_per_s / HOST_TRAFFIC)
    return parameters, min(0.9 * cores * MASTERS_PER_CORE, memory_bytes_per_s / MASTER_TRAFFIC)


def _machine(
    name: str,
    gpu_mib: int,
    host_gb: float,
    cores: int,
    peak: Peak,
    *sources: str,
    gpus_per_host: int = 0,
    unified: bool = False,
    fp8: bool = True,
) -> Machine:
    parameters, masters = _update_rates(cores, peak.host_memory_gb_per_s * 1e9 * HOST_MEMORY_SHARE)
    return Machine(
        name,
        gpu_bytes=gpu_mib * 2**20,
        host_bytes=int(host_gb * 1e9),
        cores=cores,
        matrix_flops_per_s=peak.matrix_tflops * 1e12 * MATRIX_SHARE,
        device_memory_bytes_per_s=peak.memory_gb_per_s * 1e9 * MEMORY_SHARE,
        link_bytes_per_s=peak.link_gb_per_s * 1e9 * LINK_SHARE,
        host_params_per_s=parameters,
        masters_per_s=masters,
        fp8_flops_per_s=2 * peak.matrix_tflops * 1e12 * FP8_SHARE if fp8 else 0.0,
        peer_bytes_per_s=peak.peer_gb_per_s * 1e9 * 0.8,
        gpus_per_host=gpus_per_host,
        all_links_bytes_per_s=peak.host_memory_gb_per_s * 1e9 * ALL_LINKS_SHARE,
        peers_cross_link=not gpus_per_host and peak.peer_gb_per_s < peak.link_gb_per_s,
        unified=unified,
        sources=sources,
    )


_KLOCKWOOD = "https://glennklockwood.com/garden/processors/"
_MLPERF = "https://github.com/mlcommons/"
_SMI = "GPU memory as nvidia-smi reports it"
_HOST = "host: assumed, set --host-memory and --cores"

H200 = Machine(
    "h200",
    gpu_bytes=143771 * 2**20,
    host_bytes=125 * 2**30,
    cores=16,
    matrix_flops_per_s=784e12,
    device_memory_bytes_per_s=4.18e12,
    link_bytes_per_s=36e9,
    host_params_per_s=3.5e9,
    masters_per_s=7.6e9,
    fp8_flops_per_s=2 * 989.4e12 * FP8_SHARE,
    peer_bytes_per_s=450e9 * 0.8,
    measured=True,
    sources=(
        f"measured: {RESULTS}/ceilings.json, machine.txt, rates.jsonl",
        "PCIe 5 x16, 16 cores",
    ),
)

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        H200,
        _machine("h100", 81559, 512, 32, Peak(989.4, 3350, 64, 300, 450),
                 _KLOCKWOOD + "h100", _SMI, _HOST),
        _machine("a100", 81920, 512, 32, Peak(312, 2039, 32, 200, 300),
                 _KLOCKWOOD + "A100", _SMI, _HOST, fp8=False),
        _machine("gh200", 97871, 480, 72, Peak(989.4, 4000, 450, 500, 150),
                 "https://datacrunch.io/blog/data-movement-in-the-nvidia-gh200-grace-hopper-superchip (96 GB HBM3, "
                 "480 GB LPDDR5X, C2C 450 GB/s one way)", _KLOCKWOOD + "h100 (matrix rate)", _SMI,
                 "peer link: assumed", gpus_per_host=1),
        _machine("gb200", 189471, 480, 72, Peak(2250, 7700, 450, 500, 900),
                 "https://verda.com/blog/gb300-nvl72-architecture (bf16, HBM, NVLink)",
                 _MLPERF + "inference_results_v6.1 GB200-NVL72 (186 GB a GPU, two GPUs a Grace CPU)", _SMI,
                 gpus_per_host=2),
        _machine("mi300a", 0, 128, 24, Peak(980.6, 5300, 5300, 5300, 128),
                 "https://rocm.docs.amd.com/en/docs-6.2.2/conceptual/gpu-arch/mi300.html (architecture)",
                 "https://www.tomshardware.com/pc-components/cpus/amd-unveils-instinct-mi300x-gpu-and-mi300a-apu-"
                 "claims-up-to-16x-lead-over-nvidias-competing-gpus (128 GB shared by CPU and GPU)",
                 "matrix rate: AMD's data sheet, not looked up again; ROCm was never run",
                 gpus_per_host=1, unified=True, fp8=False),
        _machine("rtx4090", 24564, 128, 16, Peak(165.2, 1008, 32, 80, 20),
                 "https://hmc-tech.com/gpus/nvidia-geforce-rtx-4090-vs-nvidia-rtx-pro-5000-blackwell", _SMI, _HOST),
        _machine("rtx5090", 32607, 128, 16, Peak(209.5, 1792, 64, 80, 40),
                 "https://www.spheron.network/blog/nvidia-rtx-5090-specs/ (838 TFLOP/s sparse with fp16 sums: a "
                 "quarter of it dense with fp32 sums)", _SMI, _HOST),
        _machine("gb10", 0, 128, 20, Peak(125, 273, 273, 273, 20),
                 "https://ai-infrastructure.net/dgx-spark/ (128 GB unified, 273 GB/s, 20 cores)",
                 "matrix rate: an eighth of the 1 PFLOP/s of sparse FP4", gpus_per_host=1, unified=True),
    )
}  # fmt: skip
"""By the name that --gpu takes."""


def find_machine(gpu: str, *, host_memory: str = "", link: str = "", cores: int = 0, gpu_memory: str = "") -> Machine:
    """A known machine, with what the caller knows better."""
    known = MACHINES.get(gpu.lower())
    if known is None:
        raise RecipeError("no such machine is known", where=f"--gpu {gpu}", remedy=did_you_mean(gpu, MACHINES))
    return adjusted(known, host_memory=host_memory, link=link, cores=cores, gpu_memory=gpu_memory)


def adjusted(
    machine: Machine, *, host_memory: str = "", link: str = "", cores: int = 0, gpu_memory: str = ""
) -> Machine:
    """The machine with another host memory, link (one-way peak), number of cores or GPU memory."""
    if host_memory:
        machine = dataclasses.replace(machine, host_bytes=parse_bytes(host_memory, "--host-memory"))
    if gpu_memory:
        if machine.unified:
            what, remedy = f"{machine.name} has one memory for GPU and host", "Set it with --host-memory."
            raise RecipeError(what, where="--gpu-memory", remedy=remedy)
        if not machine.has_gpu:
            what, remedy = "there is no GPU to limit", "Name a machine with --gpu, or leave it out."
            raise RecipeError(what, where=f"--gpu-memory {gpu_memory}", remedy=remedy)
        machine = dataclasses.replace(machine, gpu_bytes=parse_bytes(gpu_memory, "--gpu-memory"))
    if link:
        peak = parse_bytes(link.removesuffix("/s"), "--link")
        machine = dataclasses.replace(machine, link_bytes_per_s=peak * LINK_SHARE, measured=False)
    if cores:
        if cores < 0:
            raise RecipeError("must be positive", where=f"--cores {cores}", remedy="0, the default: as known.")
        memory, more = machine.all_links_bytes_per_s * HOST_MEMORY_SHARE / ALL_LINKS_SHARE, cores / machine.cores
        parameters, masters = machine.host_params_per_s * more, machine.masters_per_s * more
        if math.isfinite(memory):  # of a data sheet; of what was measured nobody knows where memory ends it
            parameters, masters = _update_rates(cores, memory)
        machine = dataclasses.replace(
            machine, cores=cores, host_params_per_s=parameters, masters_per_s=masters, measured=False
        )
    return machine


def parse_bytes(text: str, flag: str) -> int:
    """A size that a flag names."""
    found = parse_size(text)
    if found is None:
        remedy = "Such as 450GB/s." if flag == "--link" else "Such as 480GiB or 500MB; with its unit, and 1MB or more."
        raise RecipeError("is not a size", where=f"{flag} {text!r}", remedy=remedy)
    return found
