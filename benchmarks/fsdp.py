"""FSDP2 with one rank against the plain engine: what sharding costs where there is nothing to shard.

    python benchmarks/fsdp.py [PRESET] [--batch-size 4] [--micro-batch-size 4] [--steps 8]

Random weights, full rows, the same recipe twice in two processes, one after the other. Prints both step times and their
ratio as one JSON object. On an H200 with llama-8b it should be under 1.05.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time

WARM_UP = 3


def measure(kind: str, preset: str, batch_size: int, micro: int, steps: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from penstock.engine.fsdp import load_for_ranks
    from penstock.engine.native import NativeEngine
    from penstock.engine.trial import full_batch
    from penstock.machine.hardware import pick_device, pick_dtype
    from penstock.model.load import load_config, load_model
    from penstock.recipe.presets import PRESETS

    device = pick_device("auto")
    dtype = pick_dtype("auto", device)
    recipe = dataclasses.replace(
        PRESETS[preset], init="random", dtype=dtype, batch_size=batch_size, micro_batch_size=micro, recompute="full"
    )
    config, remainders = load_config(recipe), None
    if kind == "fsdp":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
        sharded = load_for_ranks(recipe, config, device, 1, print)
        model, remainders = sharded.model, sharded.remainders
    else:
        model = load_model(recipe, config, device, print)
    engine = NativeEngine(model, recipe, lambda text: print(text, file=sys.stderr), remainders=remainders)
    batch = full_batch(recipe.rows_at_once, recipe.max_length, config.get_text_config().vocab_size)
    count = batch_size // recipe.rows_at_once

    def step() -> float:
        engine.begin(1e-5)
        for number in range(count):
            engine.accumulate(batch, count * batch.num_trained, last=number == count - 1)
        return engine.step().loss  # reading it waits for this step

    losses, times = [step() for _ in range(WARM_UP)], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"step_s": statistics.median(times), "first_loss": losses[0], "last_loss": losses[-1], "peak_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="llama-8b")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kind", choices=["plain", "fsdp"], help="measure one in this process")
    args = parser.parse_args()
    if args.kind:
        found = measure(args.kind, args.preset, args.batch_size, args.micro_batch_size, args.steps)
        print(json.dumps(found))
        return
    results = {}
    for kind in ("plain", "fsdp"):
        command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[kind] = json.loads(output.splitlines()[-1])
    ratio = results["fsdp"]["step_s"] / results["plain"]["step_s"]
    print(json.dumps({"preset": args.preset, **results, "ratio": ratio}))


if __name__ == "__main__":
    main()
