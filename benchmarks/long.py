"""One recipe on long rows, step by step, beside its plan: no floor, since a step takes minutes.

    python benchmarks/long.py RECIPE FILE STEPS "field=value ..." [--no-trial] [--document SHARE]

Adds one line of JSON to FILE: settings, seconds of every step, tokens a second, memory planned and taken. Without a
trial, which takes some passes, the settings have to say where state lives, and the first step compiles: for comparing
two versions step by step. With a share, a document of so much of the row is in it, and others of 2,048 tokens after it.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import psutil
import torch
import yaml

import penstock
from penstock.bench.this_machine import this_machine
from penstock.engine import native
from penstock.engine.trial import full_batch
from penstock.engine.weights import load_to_stream, streams
from penstock.machine.gpu_memory import limit_gpu
from penstock.machine.hardware import pick_compile, pick_device, pick_dtype
from penstock.model.load import load_config, load_model
from penstock.plan.report import headline, make_plan, with_recompute
from penstock.plan.split import Profile
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values


def say(text):
    print(text, flush=True)


def with_document(batch, share):
    """The row with one long example, and short ones after it."""
    length = batch.boundaries[-1]
    document = round(share * length)
    return dataclasses.replace(batch, boundaries=(0, *range(document, length, 2048), length))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("preset", "file", "steps", "settings"):
        parser.add_argument(name)
    parser.add_argument("--no-trial", action="store_true")
    parser.add_argument("--document", type=float, default=1.0, metavar="SHARE")
    args = parser.parse_args()
    preset, file, steps, settings = args.preset, args.file, args.steps, args.settings
    device = pick_device("auto")
    values = {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in settings.split())}
    values = {key: str(value) if key in ("tile", "weights", "inputs") else value for key, value in values.items()}
    recipe = with_values(dataclasses.replace(PRESETS[preset], init="random"), values, "arguments")
    recipe = dataclasses.replace(recipe, dtype=pick_dtype(recipe.dtype, device))
    recipe = dataclasses.replace(recipe, compile=pick_compile(recipe, device, 10**9))
    machine = this_machine(remeasure=False, say=say)
    recipe = with_recompute(recipe, machine)
    plan = make_plan(recipe, machine)
    say(f"planned: {plan.peak_bytes('gpu') / 1e9:.1f} GB GPU, {plan.seconds.step:.1f} s; {headline(plan)}")
    limit_gpu(device, recipe.gpu_memory)
    config = load_config(recipe)
    model = (load_to_stream if streams(recipe) else load_model)(recipe, config, device, say)
    if args.no_trial:
        native.try_once = lambda *_, **__: Profile(0, 0)
    engine = native.NativeEngine(model, recipe, say, device=device)
    batch = full_batch(1, recipe.max_length, config.get_text_config().vocab_size)
    if args.document < 1:
        batch = with_document(batch, args.document)
    torch.cuda.reset_peak_memory_stats()
    seconds, losses, norms = [], [], []
    for _ in range(int(steps)):
        start = time.perf_counter()
        engine.begin(1e-5)
        engine.accumulate(batch, batch.num_trained, last=True)
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        assert not result.skipped, "the gradients are not finite"
        seconds.append(time.perf_counter() - start)
        taken = torch.cuda.max_memory_allocated()
        say(f"step {len(seconds)}: {seconds[-1]:.1f} s, {recipe.max_length / seconds[-1]:,.0f} tokens/s, "
            f"{taken / 1e9:.1f} GB GPU, loss {losses[-1]:.4f}, norm {norms[-1]:.3f}")  # fmt: skip
    start = time.perf_counter()
    engine.optimizer.synchronize()
    torch.cuda.synchronize()
    updates = time.perf_counter() - start  # what the next forward would hide, as far as it can
    row = {
        "recipe": preset, "settings": values, "document": args.document,
        "source": str(Path(penstock.__file__).parents[1]),
        "planned": headline(plan), "seconds": seconds, "losses": losses, "norms": norms,
        "updates_seconds": updates, "tokens_per_s": recipe.max_length / min(seconds), "gpu_bytes": taken,
        "planned_gpu_bytes": plan.peak_bytes("gpu"), "planned_seconds": plan.seconds.step,
        "host_bytes": psutil.Process().memory_info().rss,
        "planned_host_bytes": plan.peak_bytes("host"), "torch": torch.__version__,
    }  # fmt: skip
    with Path(file).open("a") as rows:
        rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
