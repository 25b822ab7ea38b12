"""A run of 200 steps under every home, update and state format, beside torch's own AdamW.

    python benchmarks/curves.py measure DIR [field=value ...]    adds to DIR/curves.jsonl; fields of the recipe
    python benchmarks/curves.py roundings DIR [field=value ...]  the same for layers that round in another order
    python benchmarks/curves.py plot DIR                         writes DIR/curves.svg and DIR/curves.txt

Every run starts from the demo model and sees the same rows in the same order. Needs matplotlib to plot. Compiled layers
need a GPU; how far they may be off is what another exact attention (sdpa) gives on the same steps.
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path

import torch
import yaml

from penstock.data.loader import Position
from penstock.engine.native import NativeEngine, decay_groups
from penstock.engine.packed import PackedModel
from penstock.machine.hardware import describe, pick_device
from penstock.model.load import load_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values
from penstock.report.console import Console
from penstock.run.preparation import prepare_run
from penstock.run.train import lr_at

MIX = "gpu=0.4,stream=0.3,host=0.3"
HOMES = ("gpu", "stream", "host", MIX)
BASE = dataclasses.replace(
    PRESETS["demo"], batch_size=2, max_length=128, max_steps=200, deterministic=True, compile=False
)


def variants():
    """(group, label, changes of the recipe). Within a group all but torch's must agree in every bit."""
    for homes in HOMES:
        yield "clipped, fp32", f"after-norm, {homes}", {"homes": homes}
    yield "clipped, fp32", "torch.optim.AdamW", None
    for update in ("after-norm", "in-backward"):
        for homes in HOMES:
            yield "not clipped, fp32", f"{update}, {homes}", {"homes": homes, "update": update, "max_grad_norm": 0.0}
    yield "not clipped, fp32", "torch.optim.AdamW", None
    for states in ("bf16", "int8"):
        for homes in ("gpu", MIX):
            yield f"clipped, {states}", f"after-norm, {homes}", {"homes": homes, "states": states}


def roundings():
    """The same steps with layers that compute the same in another order."""
    yield "clipped, fp32", f"after-norm, {HOMES[0]}", {"homes": HOMES[0]}
    yield "clipped, sdpa", f"after-norm, {HOMES[0]}", {"homes": HOMES[0], "attention": "sdpa"}
    for homes in (HOMES[0], MIX):
        yield "clipped, compiled", f"after-norm, {homes}", {"homes": homes, "compile": True}
    yield "clipped, compiled, selected", f"after-norm, {MIX}", {"homes": MIX, "compile": True, "recompute": "selected"}


class TorchEngine:
    """The same steps with torch's AdamW on fp32 masters."""

    def __init__(self, model, recipe):
        self.packed, self.clip = PackedModel(model, recipe, lambda _: None), recipe.max_grad_norm
        groups = decay_groups(model, recipe.weight_decay)
        self.weights = [p for group in groups for p in group["params"]]
        masters = {p: torch.nn.Parameter(p.detach().float().clone()) for p in self.weights}
        self.masters = [masters[p] for p in self.weights]
        groups = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups]
        self.adamw = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps)

    def step(self, batches, trained, lr):
        """One step; its loss."""
        total = 0.0
        for batch in batches:
            loss = self.packed.loss_sum(batch) / trained
            loss.backward()
            total += float(loss.detach())
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
        return total


def our_step(engine, batches, trained, lr):
    engine.begin(lr)
    for number, batch in enumerate(batches, start=1):
        engine.accumulate(batch, trained, last=number == len(batches))
    return engine.step().loss


def losses_of(recipe, *, torchs_own):
    run = prepare_run(recipe, Console(quiet=True))
    model = load_model(run.recipe, run.config, run.device, lambda _: None)
    if torchs_own and run.recipe.dtype == "bf16":
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay as they are
            parameter.data = parameter.data.bfloat16()
    engine = TorchEngine(model, run.recipe) if torchs_own else NativeEngine(model, run.recipe, lambda _: None)
    position, losses = Position(), []
    for step in range(1, recipe.max_steps + 1):
        batches, position = run.data.train.step_at(position)
        trained = sum(batch.num_trained for batch in batches)
        lr = lr_at(recipe, step, recipe.max_steps)
        losses.append(engine.step(batches, trained, lr) if torchs_own else our_step(engine, batches, trained, lr))
    if not torchs_own:
        engine.release()
    return losses


def measure(directory, settings, wanted):
    values = {name: yaml.safe_load(value) for name, value in (setting.split("=", 1) for setting in settings)}
    base = with_values(BASE, values, "command line")
    torch.use_deterministic_algorithms(True)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "curves.jsonl").open("a") as file:
        for group, label, changes in wanted:
            start = time.perf_counter()
            torchs_own = changes is None
            clip = 0.0 if group.startswith("not") else base.max_grad_norm
            recipe = dataclasses.replace(base, **(changes or {"max_grad_norm": clip}))
            losses = losses_of(recipe, torchs_own=torchs_own)
            row = {"group": group, "label": label, "machine": describe(pick_device(base.device)), "losses": losses}
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                f"{group}: {label}: {losses[0]:.4f} -> {losses[-1]:.4f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )


def plot(directory):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (directory / "curves.jsonl").read_text().splitlines()]
    groups = {
        group: [row for row in rows if row["group"] == group] for group in dict.fromkeys(r["group"] for r in rows)
    }
    lines = [rows[0]["machine"], ""]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for group, own in groups.items():
        ours = [row for row in own if not row["label"].startswith("torch")]
        same = all(row["losses"] == ours[0]["losses"] for row in ours)
        lines.append(f"{group}: {len(ours)} runs, {'every bit the same' if same else 'NOT the same'}")
        axes[0].plot(smooth(ours[0]["losses"]), label=group)
        for theirs in (row for row in own if row not in ours):
            gap = [abs(a - b) for a, b in zip(ours[0]["losses"], theirs["losses"], strict=True)]
            lines.append(f"  against torch.optim.AdamW: largest difference of a step's loss {max(gap):.2e}")
            line = ":" if group.startswith("not") else "--"
            axes[0].plot(smooth(theirs["losses"]), line, color="black", label=f"{group.split(',')[0]}, torch")
            axes[1].semilogy(smooth(gap), line, color="black", label=f"torch - {group}")
    exact = groups["clipped, fp32"][0]["losses"]
    for group in (name for name in groups if not name.endswith("fp32")):
        gap = [abs(a - b) for a, b in zip(groups[group][0]["losses"], exact, strict=True)]
        lines.append(f"{group} against fp32: mean difference of a step's loss {sum(gap) / len(gap):.2e}, largest "
                     f"{max(gap):.2e}, at the end {mean_end(groups[group][0]['losses']):.4f} against "
                     f"{mean_end(exact):.4f}")  # fmt: skip
        axes[1].semilogy(smooth(gap), label=f"{group} - fp32")
    axes[0].set(xlabel="step", ylabel="loss, mean of ten steps", title="All homes and updates of a group are one line")
    axes[1].set(xlabel="step", ylabel="difference of losses", title="Difference, mean of ten steps")
    for axis in axes:
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(directory / "curves.svg")
    (directory / "curves.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def smooth(values):
    return [math.fsum(values[max(0, i - 9) : i + 1]) / len(values[max(0, i - 9) : i + 1]) for i in range(len(values))]


def mean_end(losses):
    return math.fsum(losses[-20:]) / 20


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    wanted = {"measure": variants, "roundings": roundings}.get(command)
    measure(Path(place), rest, wanted()) if wanted else plot(Path(place))
