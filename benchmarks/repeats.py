"""Whether training repeats to the bit with --deterministic: in one process, and in another one.

    OUT=out python benchmarks/repeats.py llama-8b shape=num_hidden_layers=2 homes=gpu

Each of two processes compiles anew, builds the model twice, and takes three steps with rows of one length and with
packed ones. Adds a row to $OUT/repeats.jsonl for each: weights that were others after them, losses and norms.
"""

import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
import xxhash
import yaml

from penstock.engine.native import NativeEngine
from penstock.engine.trial import full_batch
from penstock.machine.hardware import make_repeatable, pick_compile, pick_device, pick_dtype
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values

OUT = Path(os.environ.get("OUT", "."))
STEPS = 3
LENGTHS = (700, 1300, 90, 31, 512)
"""Of examples in packed rows, again and again."""


def parse(preset, settings):
    values = {key: yaml.safe_load(value) for key, value in (s.split("=", 1) for s in settings)}
    recipe = with_values(
        dataclasses.replace(PRESETS[preset], init="random", deterministic=True, recompute="none"), values, "arguments"
    )
    device = pick_device(recipe.device)
    recipe = dataclasses.replace(recipe, dtype=pick_dtype(recipe.dtype, device))
    return dataclasses.replace(recipe, compile=pick_compile(recipe, device, 10**9)), device


def packed_rows(batch, length):
    """The same tokens in examples of several lengths."""
    cuts = list(itertools.takewhile(lambda end: end < length, itertools.accumulate(itertools.cycle(LENGTHS))))
    tokens = batch.boundaries[-1]
    return dataclasses.replace(
        batch, boundaries=(0, *(row + cut for row in range(0, tokens, length) for cut in (*cuts, length)))
    )


def hashed(tensor):
    return xxhash.xxh3_64_hexdigest(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().data)


def steps(recipe, device, kind):
    """Hashes of the weights after them, and every step's loss and norm."""
    make_repeatable(recipe)
    config = load_config(recipe)
    model = load_model(recipe, config, device, print)
    engine = NativeEngine(model, recipe, print, device=device)
    batch = full_batch(recipe.batch_size, recipe.max_length, config.get_text_config().vocab_size)
    if kind == "packed":
        batch = packed_rows(batch, recipe.max_length)
    results = []
    for _ in range(STEPS):
        engine.begin(1e-4)
        engine.accumulate(batch, batch.num_trained, last=True)
        result = engine.step()
        results.append((result.loss, result.grad_norm))
    engine.saved_tensors()  # waits for the updates
    found = {name: hashed(parameter) for name, parameter in model.named_parameters()}
    del engine, model
    gc.collect()
    torch.cuda.empty_cache()
    return {"weights": found, "steps": results}


def process(preset, *settings):
    recipe, device = parse(preset, settings)
    for kind in ("rows", "packed"):
        for _ in range(2):
            print("RESULT", json.dumps(steps(recipe, device, kind)))


def main(*words):
    if words[0] == "process":
        process(*words[1:])
        return
    found = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as directory:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": directory}
            command = [sys.executable, __file__, "process", *words]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        lines = done.stdout.decode().splitlines()
        found.append([json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT")])
    for number, kind in enumerate(("rows", "packed")):
        first, again = found[0][2 * number : 2 * number + 2]
        other = found[1][2 * number]
        row = {"date": datetime.now(UTC).date().isoformat(), "recipe": " ".join(words), "kind": kind}
        for name, compared in (("in one process", again), ("in another", other)):
            others = [key for key, value in first["weights"].items() if compared["weights"][key] != value]
            row[name] = {
                "same": compared == first,
                "weights that differ": len(others),
                "of": len(first["weights"]),
                "such as": others[:4],
            }
        row["steps"] = [first["steps"], again["steps"], other["steps"]]
        with (OUT / "repeats.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
