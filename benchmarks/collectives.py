"""What of a step on several ranks is arithmetic, collectives, copies of FSDP2, traffic with the host, kernels of ours.

    torchrun --standalone --nproc-per-node=2 benchmarks/collectives.py OUT RECIPE [field=value ...]
    python benchmarks/collectives.py TRACE...

Full rows, `batch_size` of them for all ranks together. After two steps to warm up, the median of four; one more is
watched on the first rank: seconds in which its GPU works for each kind, and in which it does nothing else. A kernel of
NCCL also takes the time that it waits for other ranks. Writes OUT/collectives.jsonl and a trace for chrome://tracing.

Of traces (`*.json.gz`), one object each: the same seconds, and how the main stream fares while gradients are exchanged.
Where ranks share a GPU, its pauses are also those in which another rank computes: the trace of one rank cannot tell the
causes apart.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from penstock.engine.fsdp import load_for_ranks
from penstock.engine.meeting import joined
from penstock.engine.native import NativeEngine
from penstock.engine.ranks import bind, find_world
from penstock.engine.trial import full_batch
from penstock.engine.weights import load_to_stream, streams
from penstock.machine.gpu_memory import limit_gpu
from penstock.machine.hardware import pick_compile, pick_device, pick_dtype
from penstock.model.load import load_config, load_model
from penstock.plan.report import with_recompute
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values

WARM_UP, MEASURED = 2, 4
KINDS = ("arithmetic", "collectives", "fsdp_copies", "traffic", "ours")
OURS = ("_adamw", "_span_sums", "_turn")
"""Kernels of `update/gpu_kernels.py` and `model/turned_kernel.py`. Those that the compiler makes are arithmetic."""
FSDP_COPIES = re.compile(r"split_with_sizes_copy_out|chunk_cat|multi_tensor_apply_kernel.*::Copy<")
"""Into the memory that is gathered from, out of what was gathered, and into what is reduced."""
PAUSE_S = 0.001
Span = tuple[float, float]


def kind_of(name: str) -> str:
    if "nccl" in name.lower():
        return "collectives"
    if "HtoD" in name or "DtoH" in name:
        return "traffic"
    if name in OURS:
        return "ours"
    return "fsdp_copies" if FSDP_COPIES.search(name) else "arithmetic"


def seconds(spans: list[Span]) -> float:
    """Of all of them together: what overlaps counts once."""
    found, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        found += max(0.0, end - max(start, until))
        until = max(until, end)
    return found


def shares(by_kind: dict[str, list[Span]]) -> dict[str, dict[str, float]]:
    """Of each kind its seconds, and those in which nothing of another kind runs."""
    everything = seconds([span for spans in by_kind.values() for span in spans])
    alone = {
        kind: everything - seconds([span for other, spans in by_kind.items() if other != kind for span in spans])
        for kind in by_kind
    }
    return {
        kind: {"busy_s": round(seconds(spans), 4), "alone_s": round(alone[kind], 4)} for kind, spans in by_kind.items()
    }


def main(out: str, preset: str, *words: str) -> None:
    world = find_world()
    base = dataclasses.replace(PRESETS[preset], init="random")
    device = world.pick(pick_device(base.device))
    values = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in words)}
    recipe = with_values(dataclasses.replace(base, dtype=pick_dtype(base.dtype, device)), values, "arguments")
    recipe = dataclasses.replace(recipe, compile=pick_compile(recipe, device, 10**9))
    if streams(recipe):
        recipe = with_recompute(recipe, None, world.size)  # one rank computes layer by layer then, in an order
    limit_gpu(device, recipe.gpu_memory)
    say = print if world.first else (lambda _: None)
    with joined(world, device):
        bind(world, device)
        config = load_config(recipe)
        if world.many:
            loaded = load_for_ranks(recipe, config, device, world.size, say)
            model, remainders = loaded.model, loaded.remainders
        else:
            load = load_to_stream if streams(recipe) else load_model
            model, remainders = load(recipe, config, device, say), {}
        engine = NativeEngine(model, recipe, say, world, remainders, device)
        rows = recipe.micro_batch_size or 1
        count = recipe.batch_size // world.size // rows
        batch = full_batch(rows, recipe.max_length, config.get_text_config().vocab_size)

        def step() -> float:
            start = time.perf_counter()
            engine.begin(1e-5)
            for number in range(1, count + 1):
                engine.accumulate(batch, batch.num_trained * count * world.size, last=number == count)
            _ = engine.step().loss  # which waits for forward and backward; updates go on under the next step
            return time.perf_counter() - start

        for _ in range(WARM_UP):
            step()
        step_s = statistics.median(step() for _ in range(MEASURED))
        if world.first:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
                watched_s = step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
            timed = {"step_s": round(step_s, 4), "watched_s": round(watched_s, 4)}
            report(Path(out), {"ranks": world.size, "settings": values, **timed}, watched)
        else:
            step()
        engine.release()


def operations(trace: Path) -> list[dict[str, Any]]:
    """What the GPU did, in the order in which it began it."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(
        (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: event["ts"],
    )


def span_of(event: dict[str, Any]) -> Span:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def spans_of(events: list[dict[str, Any]]) -> dict[str, list[Span]]:
    """When the GPU worked for each kind."""
    by_kind: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for event in events:
        by_kind[kind_of(event["name"])].append(span_of(event))
    return by_kind


def waits(events: list[dict[str, Any]]) -> dict[str, object]:
    """How the main stream fares from the first reduce-scatter to the end of the last.

    Of each reduce-scatter its seconds, how many operations of the main stream begin during it, and for how long that
    stream stands still where it does so longest, which may begin earlier and end later. Of all pauses over PAUSE_S, how
    many there are, and how many during which no collective of this rank runs.
    """
    computing = [event["args"]["stream"] for event in events if kind_of(event["name"]) == "arithmetic"]
    scatters = [span_of(event) for event in events if "ReduceScatter" in event["name"]]
    if not computing or not scatters:
        return {}
    main = statistics.mode(computing)
    works = [span_of(event) for event in events if event["args"]["stream"] == main]
    works = [work for work in works if work[1] > scatters[0][0]]
    pauses, until = [], works[0][1]
    for start, end in works[1:]:
        if until < start:
            pauses.append((until, start))
        until = max(until, end)
    found = []
    for start, end in scatters:
        still = [after - before for before, after in pauses if before < end and after > start]
        begun = sum(start <= work[0] < end for work in works)
        found.append({"s": round(end - start, 5), "begun": begun, "still_s": round(max(still, default=0.0), 5)})
    long = [pause for pause in pauses if pause[1] - pause[0] > PAUSE_S and pause[0] < scatters[-1][1]]
    collectives = [span_of(event) for event in events if kind_of(event["name"]) == "collectives"]
    free = [pause for pause in long if not any(start < pause[1] and end > pause[0] for start, end in collectives)]
    return {"reduce_scatters": found, "pauses": counted(long), "pauses_without_collectives": counted(free)}


def counted(pauses: list[Span]) -> dict[str, float]:
    lengths = [end - start for start, end in pauses]
    return {"count": len(pauses), "s": round(sum(lengths), 4), "longest_s": round(max(lengths, default=0.0), 4)}


def report(out: Path, row: dict[str, Any], watched: profile) -> None:
    out.mkdir(parents=True, exist_ok=True)
    trace = out / f"collectives-{row['ranks']}.json.gz"
    watched.export_chrome_trace(str(trace))
    kinds = shares(spans_of(operations(trace)))
    with open(out / "collectives.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row | kinds) + "\n")
    words = [f"{kind} {kinds[kind]['busy_s']:.3f} s (alone {kinds[kind]['alone_s']:.3f})" for kind in KINDS]
    print(f"{row['ranks']} ranks: {row['step_s']:.3f} s a step, watched {row['watched_s']:.3f} s: {', '.join(words)}")


def reread(trace: Path) -> dict[str, object]:
    """A trace's row again, without the step."""
    events = operations(trace)
    return {"trace": trace.name, **shares(spans_of(events)), **waits(events)}


if __name__ == "__main__":
    if all(word.endswith(".json.gz") for word in sys.argv[1:]):
        for name in sys.argv[1:]:
            print(json.dumps(reread(Path(name))))
    else:
        main(*sys.argv[1:])
