"""How fast this machine moves and updates state, measured in two seconds with the homes themselves, both at once.

Measuring one thing at a time was rejected: the link, the CPU threads and host memory share the same channels, and a
split that is right for each alone is wrong for all together. So were plain copies beside the threads: they fill both
ways of the link, which a step does not, and leave too little to the threads. The split then had the link go on alone
for a third of the time (phi-4, the third line of benchmarks/results/2026-11-15-h200/timelines.jsonl).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from penstock.flow.lanes import Mark
from penstock.flow.transfers import link_of
from penstock.offload.homes import Coefficients, Home, Surroundings, Update
from penstock.offload.host import HostHome
from penstock.offload.stream import StreamHome
from penstock.plan.layout import FORMATS, Chunk, StateFormat
from penstock.plan.split import Rates
from penstock.update.adamw import AdamW

SAMPLE_PARAMS = 1 << 24
NUM_SAMPLES = 8
"""Chunks in each home: several times what the largest cache holds; a step goes over far more."""
SECONDS = 0.8


def measure_rates(
    device: torch.device, cores: Sequence[int], format: StateFormat = FORMATS["fp32"], *, masters_first: bool = False
) -> Rates:
    """Link and CPU AdamW rates with both directions of the link and all `cores` busy.

    `masters_first`: only those of the masters, which a forward waits for.
    """
    chunks = [Chunk(i, 0, SAMPLE_PARAMS, format, weight_bytes=2) for i in range(NUM_SAMPLES)]
    link = link_of(device)
    around = Surroundings(AdamW(), link, deadlines=range(NUM_SAMPLES))
    stream = StreamHome(chunks, around, cores=cores)
    host = HostHome(chunks, around, cores=cores, masters_first=masters_first)
    row = torch.ones(AdamW.num_coefficients, device=device)
    coefficients = Coefficients(row, link.streams.to_host(row[None]), 0)
    gradient = torch.zeros(SAMPLE_PARAMS, dtype=torch.bfloat16, device=device)
    ready = link.streams.main_mark()
    for chunk in chunks:  # once: in `after-norm` gradients are down before updates begin
        host.gradient_final(chunk, gradient, ready)
    updates: dict[Home, list[Update]] = {
        home: [Update(chunk, torch.zeros_like(gradient), gradient, coefficients, ready) for chunk in chunks]
        for home in (stream, host)
    }

    def keep_busy(home: Home, seconds: float) -> int:
        """Chunks that were updated in that time. As in a step, the home always has the next ones."""
        going: deque[Future[Mark]] = deque()
        done, last, deadline = 0, Mark(), time.perf_counter() + seconds
        while time.perf_counter() < deadline or going:
            if len(going) == NUM_SAMPLES or time.perf_counter() >= deadline:
                last = going.popleft().result()
                done += 1
            else:
                going.append(home.update(updates[home][(done + len(going)) % NUM_SAMPLES]))
        last.wait_on_host()
        return done

    homes: tuple[Home, Home] = (stream, host)
    threads = [link.streams.thread(f"penstock-rates-{home.name}") for home in homes]
    for seconds in (0.05, SECONDS):  # first to compile the kernel and to wake everything
        start = time.perf_counter()
        both = [thread.submit(keep_busy, home, seconds) for thread, home in zip(threads, homes, strict=True)]
        streamed, updated = (busy.result() for busy in both)
        took = time.perf_counter() - start
    start = time.perf_counter()
    alone = keep_busy(host, SECONDS / 2) / (time.perf_counter() - start)
    for thread in threads:
        thread.shutdown()
    stream.close()
    host.close()
    crossed = streamed * chunks[0].state_bytes + updated * gradient.nbytes  # state, and the weights of the other home
    return Rates(crossed / took, updated * SAMPLE_PARAMS / took, alone * SAMPLE_PARAMS)
