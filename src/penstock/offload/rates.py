"""How fast this machine moves and updates state, measured in two seconds while everything runs at once.

Measuring one thing at a time was rejected: the link, the CPU threads and host memory share the same channels, and a
split that is right for each alone is wrong for all together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from penstock.layout import padded
from penstock.offload.arena import Arena
from penstock.offload.formats import FORMATS, StateFormat, StateView
from penstock.offload.homes import Chunk
from penstock.offload.kernels import NUM_COEFFICIENTS
from penstock.offload.lanes import Lane, Tape
from penstock.offload.pool import Pool
from penstock.plan.place import Rates

SAMPLE_BYTES = 2**30
SAMPLE_PARAMS = 1 << 24
NUM_SAMPLES = 8
"""Copies and updates each go over several times what the largest cache holds; a step goes over far more."""
SECONDS = 0.4


def measure_rates(device: torch.device, cores: Sequence[int], states: StateFormat = FORMATS["fp32"]) -> Rates:
    """Link and CPU AdamW rates with both directions of the link and all `cores` busy: the better of two rounds."""
    chunks = [Chunk(i, 0, SAMPLE_PARAMS, torch.bfloat16, states) for i in range(NUM_SAMPLES)]
    weights = [padded(2 * c.size) for c in chunks]
    total = 2 * SAMPLE_BYTES + sum(padded(c.state_bytes) for c in chunks) + 2 * sum(weights)
    arena = Arena(total, pinned=device.type == "cuda", cores=cores)
    down, up = arena.cut(SAMPLE_BYTES), arena.cut(SAMPLE_BYTES)
    work: list[tuple[Tensor, Tensor, StateView]] = []
    for c in chunks:
        weight, gradient = (arena.cut(2 * c.size).view(c.dtype) for _ in range(2))
        work.append((weight, gradient, c.view(arena.cut(c.state_bytes))))
    coefficients = torch.ones(NUM_COEFFICIENTS)
    on_device = [torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    tape = Tape(device)
    lanes = (Lane("in", device, tape), Lane("out", device, tape))
    pool = Pool(cores)

    def update(deadline: float) -> int:
        done, last = 0, pool.begin(*work[0], coefficients)
        while time.perf_counter() < deadline:  # the cores have the next before they are done, as in a step
            last, wait = pool.begin(*work[(done + 1) % len(work)], coefficients), last
            wait()
            done += 1
        last()
        return done + 1

    def copy(deadline: float) -> int:
        done = 0
        while time.perf_counter() < deadline:
            with lanes[0].work():
                on_device[0].copy_(up, non_blocking=True)
            with lanes[1].work():
                down.copy_(on_device[1], non_blocking=True)
            for lane in lanes:
                lane.mark().wait_on_host()
            done += 1
        return done

    found = []
    with ThreadPoolExecutor(2) as both:
        for _ in range(2):
            start = time.perf_counter()
            copies, updates = (both.submit(job, start + SECONDS) for job in (copy, update))
            done = copies.result(), updates.result()
            seconds = time.perf_counter() - start
            found.append(Rates(done[0] * SAMPLE_BYTES / seconds, done[1] * SAMPLE_PARAMS / seconds))
    pool.close()
    arena.close()
    return Rates(max(r.link_bytes_per_s for r in found), max(r.host_params_per_s for r in found))
