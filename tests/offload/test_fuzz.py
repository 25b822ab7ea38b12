"""Random scenarios, each in some placement and with all state on the device: no bit may differ.

Threads are held up at random, steps are skipped, accumulated, not finite; state and weights are saved and loaded in
between. FUZZ_SECONDS sets how long it looks: five seconds in the suite, ten minutes at night.
"""

import os
import random
import time

import pytest
import torch
from small_net import offload
from torch import nn

from penstock.flow.lanes import Mark, Streams, ToHost
from penstock.flow.transfers import Link
from penstock.offload import optimizer as optimizer_module
from penstock.offload.host import HostHome
from penstock.offload.stream import StreamHome
from penstock.plan import layout
from penstock.plan.split import Profile

SECONDS = float(os.environ.get("FUZZ_SECONDS", "5"))
PLACEMENTS = ["stream", "host", {"gpu": 0.3, "stream": 0.4, "host": 0.3}, {"stream": 0.5, "host": 0.5}]
LATE = ((StreamHome, "_update_now"), (StreamHome, "_prefetch_now"), (HostHome, "_begin"), (HostHome, "_send_up"))


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, and a module that is not always called."""

    def __init__(self, size=24, vocab=40):
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocab, size), nn.ModuleList(Block(size) for _ in range(4))
        self.extra, self.head = nn.Linear(size, size), nn.Linear(size, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, use):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.extra(x) if use else x)


def train(seed, dtype, homes, chunk_size, room=0.0, **options):
    """Eight steps as the seed has them: weights, state and norms."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = Net().to(dtype)
    after = dict.fromkeys(model.parameters(), 10.0) if room else {}
    profile = Profile(room, room, after) if room else None
    optimizer = offload(model, lr=1e-2, homes=homes, chunk_size=chunk_size, profile=profile, **options)
    norms, after_norm = [], optimizer.update == "after-norm"
    for step in range(8):
        parts = [(torch.randint(40, (2, 5)), chance.random() < 0.5) for _ in range(chance.choice([1, 1, 2, 3]))]
        given_up, bad = (chance.random() < 0.1 and after_norm for _ in range(2))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + step) / 8
        for number, (ids, use) in enumerate(parts, start=1):
            loss = model(ids, use).float().square().mean() / len(parts)
            if number < len(parts):
                with optimizer.accumulate():
                    loss.backward()
            else:
                (loss * float("inf") if bad else loss).backward()
        if given_up:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.report.grad_norm.clone())
        saves, loads, other, looks = (chance.random() for _ in range(4))
        if saves < 0.15:
            saved = optimizer.state_dict()
            if loads < 0.5:
                optimizer.load_state_dict(saved)
        if other < 0.15:
            model.layers[1].load_state_dict(model.layers[2].state_dict())
        if looks < 0.2:
            with torch.no_grad():
                model(parts[0][0], True)
    saved = optimizer.state_dict()
    optimizer.close()
    weights = {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    state = {f"state {i} {k}": tensor for i, entry in saved["state"].items() for k, tensor in entry.items()}
    return weights | state | {f"norm {i}": norm for i, norm in enumerate(norms)}


@pytest.fixture
def jitter(monkeypatch):
    """Threads that come late at random."""
    chance = random.Random(1)

    def late(function):
        def wrapped(*args):
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.004)
            return function(*args)

        return wrapped

    for home, name in LATE:
        monkeypatch.setattr(home, name, late(getattr(home, name)))


class Apart(Streams):
    """A CPU whose host and device copy as if they had memories of their own: gradients land, and masters go first."""

    separate_memory = True

    def to_host(self, tensor):
        return ToHost(tensor.clone(), Mark())


def test_no_scenario_shows_its_homes(jitter, monkeypatch):
    monkeypatch.setattr(layout, "LANDING_BYTES", 0)  # so that landings are used again within a step
    first = random.randrange(10**6)
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or number < 3:
        seed, chance = first + number, random.Random(first + number)
        in_backward = chance.random() < 0.5
        options = {
            "update": "in-backward" if in_backward else "after-norm",
            "max_grad_norm": 0.0 if in_backward else chance.choice([0.0, 0.5]),
            "states": chance.choice(["fp32", "bf16", "int8"]),
            "accumulate_dtype": chance.choice(["fp32", "fp32", "bf16"]),
        }
        dtype = chance.choice([torch.bfloat16, torch.float32])
        expected = train(seed, dtype, "gpu", None, **options)
        homes, chunk_size = chance.choice(PLACEMENTS), chance.choice([256, 512, 1024])
        room = 1e9 if chance.random() < 0.7 and not in_backward else 0.0
        apart = chance.random() < 0.6
        with monkeypatch.context() as patch:
            if apart:
                patch.setattr(optimizer_module, "link_of", lambda device: Link(Apart(device)))
            found = train(seed, dtype, homes, chunk_size, room, **options)
        same = [name for name in expected if torch.allclose(expected[name], found[name], 0, 0, equal_nan=True)]
        wrong = [name for name in expected if name not in same]
        assert not wrong, (
            f"seed {seed}, {dtype}, {options}, {homes}, chunks of {chunk_size}, room {room}, {apart}: {wrong}"
        )
        number += 1
