"""What this machine can do at most, each thing measured alone, in a few seconds.

A step is judged by how near it comes to these. Data sheets were rejected: what a link or a memory really gives depends
on the machine around it. `offload/rates.py` measures some of it again with everything running at once, which is what
the placement needs; here each stands alone, because a ceiling is what nothing else takes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.bench.timing import median_seconds, rate
from penstock.flow.arena import Arena
from penstock.flow.lanes import Streams
from penstock.machine.hardware import available_host_bytes, near_cores, usable_cores
from penstock.model.matmul import has_fp8
from penstock.plan.layout import FORMATS, Chunk
from penstock.update.adamw import AdamW
from penstock.update.formats import view_state
from penstock.update.host_threads import HostThreads

CPU = torch.device("cpu")
SECONDS = 0.3
"""For each measurement; nine of them and their buffers stay under eight seconds."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates of this machine. What it has not, such as a link, is None."""

    cores: int
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    both_ways_bytes_per_s: float | None
    """Each way, while both ways are busy."""
    host_memory_bytes_per_s: float
    """Two streams read and one written by all cores; the write's own read is not counted."""
    device_memory_bytes_per_s: float | None
    """A copy, read and write counted."""
    matrix_flops_per_s: float
    cpu_adamw_params_per_s: float
    """Our kernel: bf16 gradient in, bf16 weight out, exact fp32 state."""
    torch_adamw_params_per_s: float
    """torch.optim.AdamW(fused=True), all fp32, on the same cores."""
    fp8_flops_per_s: float | None = None
    """The same product of fp8 numbers, without the casts."""

    def lines(self) -> list[str]:
        """For people."""
        link = "link: none"
        if self.h2d_bytes_per_s and self.d2h_bytes_per_s and self.both_ways_bytes_per_s:
            link = (
                f"link: {self.h2d_bytes_per_s / 1e9:.1f} GB/s to the GPU, {self.d2h_bytes_per_s / 1e9:.1f} back, "
                f"{self.both_ways_bytes_per_s / 1e9:.1f} each way at once"
            )
        memory = f"memory: host {self.host_memory_bytes_per_s / 1e9:.1f} GB/s ({self.cores} cores)"
        if self.device_memory_bytes_per_s:
            memory += f", GPU {self.device_memory_bytes_per_s / 1e9:,.0f} GB/s"
        return [
            link,
            memory,
            f"matrix product: {self.matrix_flops_per_s / 1e12:.4g} TFLOP/s"
            + (f", of fp8 numbers {self.fp8_flops_per_s / 1e12:.4g}" if self.fp8_flops_per_s else ""),
            f"CPU AdamW: {self.cpu_adamw_params_per_s / 1e9:.2f} G parameters/s, "
            f"torch's fused one {self.torch_adamw_params_per_s / 1e9:.2f}",
        ]


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """All of them. `dtype` is what matrix products run in; a CPU without bf16 is measured in fp32."""
    cores = usable_cores()
    large = device.type == "cuda" and available_host_bytes() > 16 * 2**30
    h2d, d2h, both = _link(device) if device.type == "cuda" else (None, None, None)
    with _all_cores(cores):
        host = _host_memory(2**26 if large else 2**23)
        fused = _torch_adamw(2**26 if large else 2**22)
    return Ceilings(
        cores=len(cores),
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        both_ways_bytes_per_s=both,
        host_memory_bytes_per_s=host,
        device_memory_bytes_per_s=_device_memory(device) if device.type == "cuda" else None,
        matrix_flops_per_s=_matrix(device, dtype),
        cpu_adamw_params_per_s=_cpu_adamw(cores, 2**26 if large else 2**22),
        torch_adamw_params_per_s=fused,
        fp8_flops_per_s=_fp8_matrix(device) if has_fp8(device) else None,
    )


@contextmanager
def _all_cores(cores: Sequence[int]) -> Iterator[None]:
    """Every usable core for torch's CPU operators, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _link(device: torch.device) -> tuple[float, float, float]:
    size = 512 * 2**20
    arena = Arena(2 * size, pinned=True, cores=near_cores(device))
    up, down = arena.cut(size), arena.cut(size)
    on_device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = Streams(device)
    lanes = (streams.lane("in"), streams.lane("out"))
    for lane in lanes:
        lane.wait(streams.main_mark())

    def copy_up() -> None:
        with lanes[0].work():
            on_device[0].copy_(up, non_blocking=True)

    def copy_down() -> None:
        with lanes[1].work():
            down.copy_(on_device[1], non_blocking=True)

    def copy_both() -> None:
        copy_up()
        copy_down()

    ways: tuple[Callable[[], None], ...] = (copy_up, copy_down, copy_both)
    h2d, d2h, both = (rate(way, size, device, SECONDS) for way in ways)
    arena.close()
    return h2d, d2h, both


def _device_memory(device: torch.device) -> float:
    a, b = (torch.empty(2**30, dtype=torch.uint8, device=device) for _ in range(2))
    return rate(lambda: [a.copy_(b) for _ in range(10)], 10 * 2 * 2**30, device, SECONDS)


def _host_memory(n: int) -> float:
    a, b, c = (torch.ones(n) for _ in range(3))
    return rate(lambda: torch.add(b, c, alpha=3.0, out=a), 12 * n, CPU, SECONDS)


def _matrix(device: torch.device, dtype: torch.dtype) -> float:
    size, times = (8192, 20) if device.type == "cuda" else (512, 3)
    a = torch.randn(size, size, device=device).to(dtype)
    return float(2.0 * size**3 / median_seconds(lambda: torch.mm(a, a), device, times))


def _fp8_matrix(device: torch.device) -> float:
    size, one = 8192, torch.ones((), device=device)
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)

    def multiply() -> object:
        return torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return float(2.0 * size**3 / median_seconds(multiply, device, 20))


def _cpu_adamw(cores: Sequence[int], n: int) -> float:
    chunk, rule = Chunk(0, 0, n, FORMATS["fp32"], weight_bytes=2), AdamW()
    weight, gradient = (torch.full((n,), value, dtype=torch.bfloat16) for value in (0.5, 1e-3))
    state = view_state(chunk, torch.zeros(chunk.state_bytes, dtype=torch.uint8))
    coefficients = torch.full((rule.num_coefficients,), 0.5)
    threads = HostThreads(cores)
    found = rate(lambda: threads.update_(rule, weight, gradient, state, coefficients), n, CPU, SECONDS)
    threads.close()
    return found


def _torch_adamw(n: int) -> float:
    parameter = torch.nn.Parameter(torch.full((n,), 0.5))
    parameter.grad = torch.full((n,), 1e-3)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return rate(optimizer.step, n, CPU, SECONDS)
