"""Trained tokens a second: rows packed by us against one example a row, padded to the full length.

    OUT=out python benchmarks/packing.py DATA TOKENIZER RECIPE [FIELD=VALUE]...

Padding to the full length is how the reference prepares its data; it also computes the loss of the padding. Both ways
run the same rows at once through the same engine, and only tokens of responses count. Appends to $OUT/packing.jsonl.
"""

import dataclasses
import itertools
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from penstock.bench.timing import median_seconds
from penstock.data.loader import Position, prepare
from penstock.engine.native import NativeEngine
from penstock.engine.trial import full_batch
from penstock.machine.hardware import describe, pick_device, pick_dtype
from penstock.model.load import load_config, load_model, load_tokenizer
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values

STEPS = 4


def padded(batches, rows, length):
    """One example a row and padding behind it: full rows of one segment, with the loss of every place."""
    full = full_batch(rows, length, 100)
    for batch in batches:
        yield dataclasses.replace(full, num_tokens=batch.num_tokens, num_trained=batch.num_trained)


def measure(engine, recipe, steps, device):
    """Trained tokens a second over steps that follow one another."""
    source = itertools.cycle(steps)
    trained = []

    def step():
        batches = next(source)
        engine.begin(recipe.lr)
        trained.append(sum(b.num_trained for b in batches))
        for number, batch in enumerate(batches, start=1):
            engine.accumulate(batch, trained[-1], last=number == len(batches))
        engine.step()

    seconds = median_seconds(step, device, STEPS)
    return sum(sum(b.num_trained for b in batches) for batches in steps) / len(steps) / seconds, seconds


def main(data, tokenizer, preset, *settings):
    typed = {"init": "random", "data": data, "tokenizer": tokenizer, "data_percent": 100}
    for setting in settings:
        key, value = setting.split("=", 1)
        typed[key] = json.loads(value) if value[0] in "0123456789tf" else value
    recipe = with_values(dataclasses.replace(PRESETS[preset], recompute="full"), typed, "command line")
    device = pick_device(recipe.device)
    recipe = dataclasses.replace(recipe, dtype=pick_dtype(recipe.dtype, device))
    config = load_config(recipe)
    words = load_tokenizer(recipe)
    model = load_model(recipe, config, device, print)
    engine = NativeEngine(model, recipe, print)
    found = {}
    for packing in (True, False):
        loader = prepare(dataclasses.replace(recipe, packing=packing), words, config.vocab_size, print).train
        every, position = [], Position()
        for _ in range(min(12, loader.num_rows // recipe.batch_size)):
            batches, position = loader.step_at(position)
            every.append(batches)
        if not packing:
            every = [list(padded(batches, recipe.rows_at_once, recipe.max_length)) for batches in every]
        rate, seconds = measure(engine, recipe, every, device)
        name = "packed" if packing else "padded"
        found |= {f"{name}_trained_tokens_per_s": rate, f"{name}_step_s": seconds}
    row = {
        "date": datetime.now(UTC).date().isoformat(), "machine": describe(device), "recipe": preset,
        "settings": " ".join(settings), "data": Path(data).name, **found,
        "ratio": found["packed_trained_tokens_per_s"] / found["padded_trained_tokens_per_s"],
        "versions": f"torch {torch.__version__}",
    }  # fmt: skip
    out = Path(os.environ.get("OUT", "."))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "packing.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
