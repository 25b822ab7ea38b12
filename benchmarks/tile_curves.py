"""What tiles do to training: the same 200 steps in tiles and with whole rows, beside other choices that are as exact.

    python benchmarks/tile_curves.py DIR [--tile 48] [--tiny KIND] [field=value ...]   adds to DIR/tile_curves.jsonl

Fields are those of a recipe, and `preset`; without any, the demo. `--tiny` is for other architectures (gpt_oss,
qwen3_moe): a small model with random weights, made under build/tiny with the demo's tokenizer. Every run begins with
the same weights and sees the same rows in the same order, layer by layer, not compiled. Tiles compute the same in
another order of sums, so that what they change is to be held against what other such orders change: rows one by one
instead of together, and transformers' own attention with a mask (eager where a model has sinks). Another seed is
another order of the rows: of that only the end of the curve can be compared. Parked inputs must not change a bit. What
the file has is not run again; the table is of its lines, by precision.
"""

import argparse
import dataclasses
import json
import shutil
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import torch
from curves import losses_of, mean_end
from fp8_quality import add, recipe_of
from transformers import AutoConfig

import penstock.demo
from penstock.machine.hardware import describe, pick_device, pick_dtype

WHOLE, TILES, PARKED, OTHER_SEED = "whole rows", "tiles", "tiles, inputs parked:2", "another seed"
SETTINGS = ("model", "data", "dtype", "batch_size", "max_length", "max_steps", "lr", "seed")
TINY = {
    "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8, "num_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": 32, "vocab_size": 2048, "max_position_embeddings": 1024,
    "pad_token_id": 3, "eos_token_id": 2, "bos_token_id": None,
}  # fmt: skip


def tiny(kind):
    """The path of a small model of that architecture, for random weights."""
    path = Path("build/tiny") / kind
    path.mkdir(parents=True, exist_ok=True)
    AutoConfig.for_model(kind, **TINY).save_pretrained(path)
    for file in (Path(penstock.demo.__file__).parent / "model").glob("*tok*"):
        shutil.copy(file, path)
    shutil.copy(Path(penstock.demo.__file__).parent / "model" / "chat_template.jinja", path)
    return str(path)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def variants(recipe, tile):
    """(label, recipe) of every run."""
    masked = "eager" if "gpt_oss" in recipe.model else "sdpa"
    base = dataclasses.replace(recipe, order="layers", tile="none", deterministic=True, compile=False)
    changes = {
        WHOLE: {},
        TILES: {"tile": tile},
        PARKED: {"tile": tile, "inputs": "parked:2"},
        "rows one by one": {"micro_batch_size": 1},
        f"attention {masked}": {"attention": masked},
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
    parser.add_argument("--tiny", default="", metavar="KIND")
    parser.add_argument("fields", nargs="*", metavar="field=value")
    args = parser.parse_intermixed_args()
    path = args.directory / "tile_curves.jsonl"
    own = [f"model={tiny(args.tiny)}", "init=random"] if args.tiny else []
    measure(path, recipe_of([*own, *args.fields]), args.tile)
    found = "\n".join(table(lines(path)))
    (args.directory / "tile_curves.txt").write_text(found + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
