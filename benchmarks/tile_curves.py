"""What tiles do to training: the same 200 steps in tiles and with whole rows, beside other choices that are as exact.

    python benchmarks/tile_curves.py DIR [--tile 48] [field=value ...]   adds to DIR/tile_curves.jsonl

Fields are those of a recipe, and `preset`; without any, the demo. Every run begins with the same weights and sees the
same rows in the same order, layer by layer, not compiled. Tiles compute the same in another order of sums, so that what
they change is to be held against what other such orders change: rows one by one instead of together, and torch's own
attention with a mask. Another seed is another order of the rows: of that only the end of the curve can be compared.
Parked inputs must not change a bit. What the file has is not run again; the table is of its lines, by precision.
"""

import argparse
import dataclasses
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import torch
from curves import losses_of, mean_end
from fp8_quality import add, lines, recipe_of

from penstock.machine.hardware import describe, pick_device, pick_dtype

WHOLE, TILES, PARKED, OTHER_SEED = "whole rows", "tiles", "tiles, inputs parked:2", "another seed"
SETTINGS = ("model", "data", "dtype", "batch_size", "max_length", "max_steps", "lr", "seed")


def variants(recipe, tile):
    """(label, recipe) of every run."""
    base = dataclasses.replace(recipe, order="layers", tile="none", deterministic=True, compile=False)
    changes = {
        WHOLE: {},
        TILES: {"tile": tile},
        PARKED: {"tile": tile, "inputs": "parked:2"},
        "rows one by one": {"micro_batch_size": 1},
        "attention sdpa": {"attention": "sdpa"},
        OTHER_SEED: {"seed": base.seed + 1},
    }
    for label, change in changes.items():
        yield label, dataclasses.replace(base, **change)


def measure(path, recipe, tile):
    torch.use_deterministic_algorithms(True)
    device = pick_device(recipe.device)
    recipe = dataclasses.replace(recipe, dtype=pick_dtype(recipe.dtype, device))
    settings = {name: getattr(recipe, name) for name in SETTINGS} | {"tile": tile}
    known = [(row["label"], row["settings"]) for row in lines(path)]
    for label, one in variants(recipe, tile):
        if (label, settings) in known:
            continue
        start = time.perf_counter()
        losses = losses_of(one, torchs_own=False)
        machine = {"machine": describe(device), "torch": version("torch")}
        add(path, {"label": label, "settings": settings, **machine, "losses": losses})
        print(f"{label}: {losses[0]:.4f} -> {losses[-1]:.4f}, {time.perf_counter() - start:.0f} s", flush=True)


def table(rows):
    """A block for every precision and tile: how far each run is from that of whole rows."""
    blocks = {}
    for row in rows:
        blocks.setdefault(tuple(row["settings"].items()), {})[row["label"]] = row["losses"]
    found = []
    for settings, runs in blocks.items():
        named = dict(settings)
        whole = runs[WHOLE]
        found.append(
            f"{named['model']}, {named['dtype']}, {named['max_steps']} steps of {named['batch_size']} x "
            f"{named['max_length']} tokens, tiles of {named['tile']}; mean of the last 20 losses {mean_end(whole):.5f}"
        )
        for label, losses in runs.items():
            apart = [abs(a - b) for a, b in zip(losses, whole, strict=True)]
            end = f"last 20 {mean_end(losses) - mean_end(whole):+.1e}"
            if label not in (WHOLE, OTHER_SEED):
                largest, mean = max(apart), statistics.mean(apart)
                found.append(f"  {label:<24}largest difference {largest:.2e}, mean {mean:.2e}, {end}")
            elif label == OTHER_SEED:
                found.append(f"  {label:<24}{end}")
        same = runs[PARKED] == runs[TILES]
        found.append(f"  parked inputs: {'every bit of tiles' if same else 'NOT the bits of tiles'}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tile", default="48")
    parser.add_argument("fields", nargs="*", metavar="field=value")
    args = parser.parse_intermixed_args()
    path = args.directory / "tile_curves.jsonl"
    measure(path, recipe_of(args.fields), args.tile)
    found = "\n".join(table(lines(path)))
    (args.directory / "tile_curves.txt").write_text(found + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
