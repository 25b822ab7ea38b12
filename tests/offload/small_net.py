"""A small model with everything that is odd, and a loop that trains it."""

import functools
from dataclasses import fields

import torch
from torch import nn

from penstock.offload.adamw import OffloadAdamW
from penstock.offload.behaviour import Behaviour, update_time
from penstock.offload.placing import CPU_ADAM_CORES, place
from penstock.offload.trained import find_trained
from penstock.plan.layout import FORMATS
from penstock.plan.split import Manner, Profile

HOMES = ["gpu", "stream", "host", {"gpu": 0.4, "stream": 0.3, "host": 0.3}]


class Net(nn.Module):
    """Odd sizes, a list of layers, tied weights, a frozen weight, and a weight without gradient."""

    def __init__(self, dtype=torch.bfloat16, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(37, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 41), nn.GELU(), nn.Linear(41, 24)) for _ in range(3))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.to(dtype)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def batches(steps, device="cpu", rows=8):
    gen = torch.Generator().manual_seed(7)
    return [torch.randint(0, 37, (rows, 9), generator=gen).to(device) for _ in range(steps)]


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def offload(model, *, homes="auto", chunk_size=None, cpu_adam_cores=CPU_ADAM_CORES, profile=None, **options):
    """The optimizer with the placement that it would make itself, but for chunk, cores and what a trial measured."""
    behaviour = Behaviour(**{f.name: options[f.name] for f in fields(Behaviour) if f.name in options})
    trained = find_trained(model, options.get("params"), options.get("units"))
    manner = Manner(
        update_time(behaviour) == "in-backward", behaviour.overlap, trained.sharded, behaviour.accumulate_dtype
    )
    profile = profile or Profile(micro_batches=behaviour.micro_batches)
    placement = place(trained, FORMATS[behaviour.states], homes, profile, manner, chunk_size, cpu_adam_cores)
    return OffloadAdamW(model, homes=placement, **options)


def run(steps=6, dtype=torch.bfloat16, device="cpu", model=None, data=None, before_step=None, **options):
    model = model or Net(dtype).to(device)
    options = {"lr": 3e-3, "max_grad_norm": 0.5, **options}
    optimizer = offload(model, **options)
    losses = []
    for number, ids in enumerate(data or batches(steps, device)):
        loss = loss_of(model, ids)
        loss.backward()
        if before_step:
            before_step(number, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    optimizer.synchronize()
    return model, optimizer, losses


@functools.cache
def plain_run(**options):
    """The same, once for all tests of a process that compare with it and change nothing of it."""
    return run(homes="gpu", **options)


def assert_same(a, b):
    (model_a, optimizer_a, _), (model_b, optimizer_b, _) = a, b
    for (name, p), q in zip(model_a.named_parameters(), model_b.parameters(), strict=True):
        assert torch.equal(p, q), name
    state_a, state_b = optimizer_a.state_dict(), optimizer_b.state_dict()
    assert torch.equal(state_a["steps"], state_b["steps"])
    for entry_a, entry_b in zip(state_a["state"].values(), state_b["state"].values(), strict=True):
        assert all(torch.equal(entry_a[k], entry_b[k]) for k in entry_a)
