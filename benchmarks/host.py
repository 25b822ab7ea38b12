"""Host side: how fast an arena is ready, and the C kernel beside torch's fused CPU AdamW on the same cores."""

import json
import os
import time
from pathlib import Path

import torch

from penstock.flow.arena import Arena
from penstock.machine.hardware import available_host_bytes, usable_cores
from penstock.offload.rates import measure_rates
from penstock.plan.layout import FORMATS, Chunk
from penstock.update.adamw import AdamW
from penstock.update.formats import view_state
from penstock.update.host_threads import HostThreads


def arena_rate() -> dict[str, float]:
    num_bytes = min(70 * 10**9, int(available_host_bytes() * 0.7))
    start = time.perf_counter()
    arena = Arena(num_bytes, pinned=torch.cuda.is_available(), cores=usable_cores())
    seconds = time.perf_counter() - start
    arena.close()
    return {"arena_gb": num_bytes / 1e9, "arena_ready_s": seconds, "arena_gb_per_s": num_bytes / 1e9 / seconds}


def best_seconds(run, times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def kernel_rates(n: int) -> dict[str, float]:
    cores = usable_cores()
    torch.set_num_threads(len(cores))
    parameter = torch.nn.Parameter(torch.randn(n))
    parameter.grad = torch.randn(n)
    fused = torch.optim.AdamW([parameter], fused=True)
    fused.step()
    theirs = best_seconds(fused.step)
    weight, gradient = torch.randn(n).bfloat16(), torch.randn(n).bfloat16()
    chunk, rule = Chunk(0, 0, n, FORMATS["fp32"], weight_bytes=2), AdamW()
    state = view_state(chunk, torch.zeros(chunk.state_bytes, dtype=torch.uint8))
    coefficients = torch.full((rule.num_coefficients,), 0.5)

    threads = HostThreads(cores)
    ours = best_seconds(lambda: threads.update_(rule, weight, gradient, state, coefficients))
    threads.close()
    return {
        "cores": len(cores),
        "torch_fused_params_per_s": n / theirs,
        "c_kernel_params_per_s": n / ours,
        "ratio": theirs / ours,
    }


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = measure_rates(device, usable_cores())
    together = {"link_bytes_per_s": rates.link_bytes_per_s, "host_params_per_s": rates.host_params_per_s}
    n = 2**28 if device.type == "cuda" else 2**24
    row = {**arena_rate(), **kernel_rates(n), "both_at_once": together}
    print(json.dumps(row))
    with (Path(os.environ.get("OUT", ".")) / "host.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
