"""A grid of homes, formats, updates and accumulations whose bits are written down in `golden.json`.

Every gradient is an elementwise function of its weight, so no bit depends on how a machine orders the sums of a matrix
product, and the hashes hold on every machine. A change that moves one says why, in the changelog too, and writes them
anew: `python tests/offload/golden.py`.
"""

import hashlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

FILE = Path(__file__).with_name("golden.json")
HOMES = ("gpu", "stream", "host", {"gpu": 0.4, "stream": 0.3, "host": 0.3})
STEPS, BAD_STEP = 8, 5
ACCUMULATIONS = ("one", "accumulate()", "micro_batches")


def whole_numbers(shape, generator):
    """Random numbers of 16 bits over 2^14. Those of `randn` differ between machines in the last bit."""
    return torch.randint(-(2**15), 2**15, tuple(shape), generator=generator).float() / 2**14


class Elementwise(nn.Module):
    """Returns a number whose gradient is an elementwise function of the weights."""

    def __init__(self, *shapes, dtype, generator):
        super().__init__()
        for number, shape in enumerate(shapes):
            values = whole_numbers(shape, generator).to(dtype)
            self.register_parameter(f"p{number}", nn.Parameter(values))

    def forward(self, scale):
        return sum((p * p * scale + p).sum().float() for p in self.parameters())


class Model(nn.Module):
    """Parameters of both types, of sizes that chunks and blocks do not divide."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.first = Elementwise((53, 41), dtype=torch.bfloat16, generator=generator)
        shapes = ((64, 96), (96,), (37, 30))
        self.layers = nn.ModuleList(Elementwise(*shapes, dtype=torch.bfloat16, generator=generator) for _ in range(3))
        self.last = Elementwise((29, 31), (7,), dtype=torch.float32, generator=generator)

    def forward(self, scale):
        return self.first(scale) + sum(layer(scale) for layer in self.layers) + self.last(scale)


def cases():
    """Name and settings of every line of the file; homes are not among them, as none may show."""
    for states in ("fp32", "bf16", "int8"):
        for update in ("after-norm", "in-backward"):
            for accumulation in ACCUMULATIONS:
                yield f"{states} {update} {accumulation}", (states, update, accumulation)


def groups(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def train(make, update, accumulation):
    """The digest of all norms, weights and states. `make(model, groups, micro_batches)` makes the optimizer."""
    model = Model()
    several = 1 if accumulation == "one" else 3
    optimizer = make(model, groups(model), several if accumulation == "micro_batches" else 1)
    norms = []
    for step in range(STEPS):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 1e-2 / (1 + step + number)
        for micro in range(several):
            held = accumulation == "accumulate()" and micro < several - 1
            scale = torch.tensor(float("nan") if step == BAD_STEP else 0.25 + step / 8 + micro / 16)
            with optimizer.accumulate() if held else nullcontext():
                model(scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.report.grad_norm)
    saved = optimizer.state_dict()
    entries = [tensor for entry in saved["state"].values() for name, tensor in sorted(entry.items()) if name != "step"]
    found = digest([*norms, *model.parameters(), *entries, saved["steps"]])
    optimizer.close()
    return found


def expect(found):
    """What was found is what is written down; with WRITE_GOLDEN it is written down instead."""
    written = json.loads(FILE.read_text())
    if os.environ.get("WRITE_GOLDEN"):
        FILE.write_text(json.dumps({**written, **found}, indent=2) + "\n")
    else:
        assert found == {name: written.get(name) for name in found}


if __name__ == "__main__":
    os.environ["WRITE_GOLDEN"] = "yes"
    pytest.main([str(Path(__file__).with_name("test_golden.py"))])
    del os.environ["WRITE_GOLDEN"]
    sys.exit(pytest.main([str(Path(__file__).with_name("test_golden.py"))]))
