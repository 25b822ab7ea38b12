"""How fast this machine moves and updates state, measured in about a second while everything runs at once.

Measuring one thing at a time was rejected: the link, the CPU threads and host memory share the same channels, and a
split that is right for each alone is wrong for all together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from penstock.offload.arena import Arena, padded
from penstock.offload.formats import FORMATS, StateFormat, StateView
from penstock.offload.homes import HOST_PART, Chunk
from penstock.offload.kernels import NUM_COEFFICIENTS, adamw_
from penstock.offload.lanes import Lane
from penstock.plan.place import Rates

SAMPLE_BYTES = 256 * 2**20
SECONDS = 0.4


def measure_rates(device: torch.device, cores: Sequence[int], states: StateFormat = FORMATS["fp32"]) -> Rates:
    """Link and CPU AdamW rates with both directions of the link and all `cores` busy."""
    chunks = [Chunk(i, 0, HOST_PART, torch.bfloat16, states) for i in range(4 * len(cores))]
    weights = [padded(2 * c.size) for c in chunks]
    total = 2 * SAMPLE_BYTES + sum(padded(c.state_bytes) for c in chunks) + 2 * sum(weights)
    arena = Arena(total, pinned=device.type == "cuda")
    down, up = arena.cut(SAMPLE_BYTES), arena.cut(SAMPLE_BYTES)
    work: list[tuple[Tensor, Tensor, StateView]] = []
    for c in chunks:
        weight, gradient = (arena.cut(2 * c.size).view(c.dtype) for _ in range(2))
        work.append((weight, gradient, c.view(arena.cut(c.state_bytes))))
    coefficients = torch.ones(NUM_COEFFICIENTS)
    on_device = [torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    lanes = (Lane(device), Lane(device))
    deadline = time.perf_counter() + SECONDS

    def update(number: int) -> int:
        done = 0
        while time.perf_counter() < deadline:
            weight, gradient, state = work[(number + done) % len(work)]
            adamw_(weight, gradient, state, coefficients)
            done += 1
        return done

    def copy() -> int:
        done = 0
        while time.perf_counter() < deadline:
            with lanes[0]:
                on_device[0].copy_(up, non_blocking=True)
            with lanes[1]:
                down.copy_(on_device[1], non_blocking=True)
            for lane in lanes:
                lane.mark().wait_on_host()
            done += 1
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(len(cores) + 1) as pool:
        copies = pool.submit(copy)
        updates = sum(pool.map(update, range(0, 4 * len(cores), 4)))
        copied = copies.result()
    seconds = time.perf_counter() - start
    arena.close()
    return Rates(copied * SAMPLE_BYTES / seconds, updates * HOST_PART / seconds)
