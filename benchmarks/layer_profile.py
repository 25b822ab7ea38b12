"""Where the time of one decoder layer goes: its kernels, forward and backward, the longest first.

    python benchmarks/layer_profile.py RECIPE [field=value ...]

Random weights, full rows, `rows_at_once` of them; four layers, since some models have two kinds and fp8 leaves out the
first and the last, compiled as the recipe says. The head and the loss are in it, once.
"""

import dataclasses
import sys

import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from penstock.engine.packed import PackedModel
from penstock.engine.trial import full_batch
from penstock.machine.hardware import pick_compile, pick_device, pick_dtype
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values

SHOWN = 28


def main(preset: str, *words: str) -> None:
    values = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in words)}
    values = {"shape": "num_hidden_layers=4", **values}
    base = dataclasses.replace(PRESETS[preset], init="random")
    device = pick_device(base.device)
    recipe = with_values(dataclasses.replace(base, dtype=pick_dtype(base.dtype, device)), values, "arguments")
    recipe = dataclasses.replace(recipe, compile=pick_compile(recipe, device, 10**9))
    config = load_config(recipe)
    packed = PackedModel(load_model(recipe, config, device, print), recipe, print)
    batch = full_batch(recipe.rows_at_once, recipe.max_length, config.get_text_config().vocab_size)
    for _ in range(3):
        packed.loss_sum(batch).backward()
        packed.model.zero_grad()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as watched:
        packed.loss_sum(batch).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
    by_time = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(watched.key_averages(), key=lambda event: -getattr(event, by_time))
    total = sum(getattr(event, by_time) for event in events)
    print(f"{recipe.name}: {batch.num_tokens:,} tokens, {total / 1e3:.2f} ms of kernels")
    for event in events[:SHOWN]:
        print(f"{getattr(event, by_time) / 1e3:9.3f} ms {event.count:5d} x  {event.key[:110]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
