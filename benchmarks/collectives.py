"""What of a step on several ranks is arithmetic, what collectives, what traffic with the host.

    torchrun --standalone --nproc-per-node=2 benchmarks/collectives.py OUT RECIPE [field=value ...]

Full rows, `batch_size` of them for all ranks together. After two steps to warm up, the median of four; one more is
watched on the first rank: seconds in which its GPU works for each kind, and in which it does nothing else. A kernel of
NCCL also takes the time that it waits for other ranks. Writes OUT/collectives.jsonl and a trace for chrome://tracing.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from penstock.engine.fsdp import load_for_ranks
from penstock.engine.meeting import joined
from penstock.engine.native import NativeEngine
from penstock.engine.ranks import bind, find_world
from penstock.engine.trial import full_batch
from penstock.machine.gpu_memory import limit_gpu
from penstock.machine.hardware import pick_compile, pick_device, pick_dtype
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values

WARM_UP, MEASURED = 2, 4
Span = tuple[float, float]


def kind_of(name: str) -> str:
    if "nccl" in name.lower():
        return "collectives"
    return "traffic" if "HtoD" in name or "DtoH" in name else "arithmetic"


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
    return {kind: {"busy_s": seconds(spans), "alone_s": alone[kind]} for kind, spans in by_kind.items()}


def main(out: str, preset: str, *words: str) -> None:
    world = find_world()
    base = dataclasses.replace(PRESETS[preset], init="random")
    device = world.pick(pick_device(base.device))
    values = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in words)}
    recipe = with_values(dataclasses.replace(base, dtype=pick_dtype(base.dtype, device)), values, "arguments")
    recipe = dataclasses.replace(recipe, compile=pick_compile(recipe, device, 10**9))
    limit_gpu(device, recipe.gpu_memory)
    say = print if world.first else (lambda _: None)
    with joined(world, device):
        bind(world, device)
        config = load_config(recipe)
        if world.many:
            loaded = load_for_ranks(recipe, config, device, world.size, say)
            model, remainders = loaded.model, loaded.remainders
        else:
            model, remainders = load_model(recipe, config, device, say), {}
        engine = NativeEngine(model, recipe, say, world, remainders)
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
            report(Path(out), world.size, step_s, watched_s, watched)
        else:
            step()
        engine.release()


def spans_of(trace: Path) -> dict[str, list[Span]]:
    """When the GPU worked for each kind."""
    by_kind: dict[str, list[Span]] = {"arithmetic": [], "collectives": [], "traffic": []}
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            by_kind[kind_of(event["name"])].append(span)
    return by_kind


def report(out: Path, ranks: int, step_s: float, watched_s: float, watched: profile) -> None:
    out.mkdir(parents=True, exist_ok=True)
    trace = out / f"collectives-{ranks}.json.gz"
    watched.export_chrome_trace(str(trace))
    by_kind = spans_of(trace)
    row = {"ranks": ranks, "step_s": step_s, "watched_s": watched_s, **shares(by_kind)}
    with open(out / "collectives.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    words = [f"{kind} {row[kind]['busy_s']:.3f} s (alone {row[kind]['alone_s']:.3f})" for kind in by_kind]
    print(f"{ranks} ranks: {step_s:.3f} s a step, watched {watched_s:.3f} s: {', '.join(words)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
