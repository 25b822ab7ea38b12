"""The engine `deepspeed` where only a GPU can show it; each command in a process of its own, one JSON line each.

    python benchmarks/deepspeed_engine.py step MODE RATIO [field=value ...]   five steps of llama-8b, random weights
    python benchmarks/deepspeed_engine.py curve ENGINE MODE RATIO STEPS       losses of the demo model, in bf16
    python benchmarks/deepspeed_engine.py resume RATIO                        saved and restored, against not stopped

A small bucket makes several sub-groups of the demo's state, so that a ratio puts some of them on the GPU.
"""

import dataclasses
import json
import os
import sys
import time

import torch
import yaml

from penstock.data.loader import Position
from penstock.engine.deepspeed import DeepSpeedEngine
from penstock.engine.native import NativeEngine
from penstock.engine.trial import full_batch
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values
from penstock.report.console import Console
from penstock.run.preparation import prepare_run
from penstock.run.train import lr_at


def say(text):
    print(text, file=sys.stderr, flush=True)


def build(recipe, device):
    model = load_model(recipe, load_config(recipe), device, say)
    return (DeepSpeedEngine if recipe.engine == "deepspeed" else NativeEngine)(model, recipe, say)


def step(mode, ratio, *settings):
    values = {name: yaml.safe_load(value) for name, value in (setting.split("=", 1) for setting in settings)}
    base = dataclasses.replace(PRESETS["llama-8b"], init="random", dtype="bf16", keep=0, recompute="full")
    recipe = with_values(base, {"engine": "deepspeed", "mode": mode, "offload_ratio": float(ratio), **values}, "flags")
    engine = build(recipe, torch.device("cuda"))
    vocab_size = engine.model.config.get_text_config().vocab_size
    micro_batches = [full_batch(recipe.rows_at_once, recipe.max_length, vocab_size)]
    micro_batches *= recipe.batch_size // recipe.rows_at_once
    trained, seconds, losses = sum(batch.num_trained for batch in micro_batches), [], []
    for number in range(1, 6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.begin(recipe.lr)
        for index, batch in enumerate(micro_batches, start=1):
            engine.accumulate(batch, trained, last=index == len(micro_batches))
        losses.append(engine.step().loss)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        say(f"step {number}: {seconds[-1]:.2f} s, loss {losses[-1]:.4f}")
    return {"mode": mode, "ratio": float(ratio), "step_s": seconds, "losses": losses,
            "gpu_gb": torch.cuda.max_memory_allocated() / 1e9}  # fmt: skip


def demo(engine, mode, ratio, steps):
    return dataclasses.replace(
        PRESETS["demo"], engine=engine, mode=mode, offload_ratio=float(ratio), bucket_size=500_000, dtype="bf16",
        batch_size=2, max_length=128, max_steps=int(steps), keep=0, compile=False,
    )  # fmt: skip


def train(engine, run, first, last):
    position, losses = Position(), []
    for number in range(1, last + 1):
        batches, position = run.data.train.step_at(position)
        if number < first:
            continue
        engine.begin(lr_at(run.recipe, number, run.total_steps))
        for index, batch in enumerate(batches, start=1):
            engine.accumulate(batch, sum(b.num_trained for b in batches), last=index == len(batches))
        losses.append(engine.step().loss)
    return losses


def curve(engine, mode, ratio, steps):
    run = prepare_run(demo(engine, mode, ratio, steps), Console(quiet=True))
    built = build(run.recipe, run.device)
    losses = train(built, run, 1, int(steps))
    built.release()
    return {"engine": engine, "mode": mode, "ratio": float(ratio), "losses": losses}


def bits(engine):
    tensors = (tensor for group in engine.saved_tensors().values() for tensor in group)
    return {tensor.name: torch.cat([piece.cpu().clone() for piece in tensor.pieces]) for tensor in tensors}


def resume(ratio):
    recipe = demo("deepspeed", "zerooffload", ratio, 8)
    run = prepare_run(recipe, Console(quiet=True))
    straight, first, second = (build(run.recipe, run.device) for _ in range(3))
    train(straight, run, 1, 8)
    train(first, run, 1, 4)
    saved = bits(first)
    for tensor in (tensor for group in second.saved_tensors().values() for tensor in group):
        flat = saved[tensor.name]
        for piece in tensor.pieces:
            piece.copy_(flat[: len(piece)])
            flat = flat[len(piece) :]
    second.restored()
    train(second, run, 5, 8)
    ours, theirs = bits(straight), bits(second)
    return {"ratio": float(ratio), "tensors": len(ours), "same": all(torch.equal(ours[n], theirs[n]) for n in ours)}


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    result = {"step": step, "curve": curve, "resume": resume}[command](*words)
    print(json.dumps({"command": command, **result}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # DeepSpeed's worker and its queues must not keep the process
