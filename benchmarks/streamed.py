"""Steps with weights that stream, one setting after another in one process, beside the floor with resident weights.

    python benchmarks/streamed.py RECIPE DIR "field=value ..." ["field=value ..."]... [--no-floor]

The first settings are for all; each further argument is one run. `--no-floor` leaves out the floor, for models whose
weights do not fit the GPU or where minutes count. Rows are added to DIR/rows.jsonl as `penstock bench`
adds them, and the spans of three steps to DIR/timeline.jsonl.
"""

import dataclasses
import sys
import time
from pathlib import Path

import torch
import yaml

from penstock.bench.rows import Results, table
from penstock.bench.run import Case, flops_of_step, our_rows, reference_flops_of_step, show
from penstock.machine.hardware import pick_compile, pick_device, pick_dtype
from penstock.model.load import load_config
from penstock.model.load_rows import build_on_meta
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values

STEPS = 3
START = time.monotonic()


def values(text):
    return {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in text.split())}


def say(text):
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


def main(preset, directory, shared, *runs):
    floor = "--no-floor" not in runs
    runs = [run for run in runs if run != "--no-floor"]
    device = pick_device("auto")
    base = with_values(dataclasses.replace(PRESETS[preset], init="random"), values(shared), "arguments")
    base = dataclasses.replace(base, dtype=pick_dtype(base.dtype, device), recompute="full")
    base = dataclasses.replace(base, compile=pick_compile(base, device, 10**9))
    wanted = [with_values(base, values(run), "arguments") for run in runs]
    model = build_on_meta(base, load_config(base), torch.bfloat16, lambda model: model.tie_weights())
    flops, reference = flops_of_step(model, base), reference_flops_of_step(model, base)
    results = Results(Path(directory))
    case = Case(wanted[0], device, 0.0, flops, timeline=results.directory / "timeline.jsonl", reference_flops=reference)
    rows = []
    for row in our_rows(case, wanted, STEPS, say, floor=floor):
        rows.append(row)
        results.add(row)
        say(f"{show(row)} {row.tokens_per_s or 0:,.0f} tokens/s")
    print(table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
