"""Every wait is needed: with any one of them left out, some access races. See `tests/flow/checked.py`."""

import linecache
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from checked import SOURCE, Race, checked

from penstock.flow import transfers
from penstock.offload import optimizer as optimizer_module
from penstock.offload import prefetch
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.placing import find_trained, place
from penstock.plan.layout import FORMATS
from penstock.plan.split import Manner, Profile

MIX = {"gpu": 0.4, "stream": 0.3, "host": 0.3}
REDUNDANT = {
    "flow/transfers.py: first.wait_on_host()": "so that the most urgent copy is chosen late, not for order",
    "offload/stream.py: self._prefetched_out.popleft().wait_on_host()": "for memory, not for order",
    "offload/prefetch.py: first.wait_on_host()": "for memory, not for order",
}
CALLS = re.compile(r"(lane|_numbers)\.wait\(|\.uses\(|\.wait_on_host\(|\.main_waits\(|\.main_uses\(")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.to(torch.bfloat16)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(homes, checker, *, clip=0.5, chunk_size=10, room=0.0, then=None):
    """Three steps, the second of two micro-batches; `then` is done after each."""
    model = Net()
    after = dict.fromkeys(model.parameters(), 10.0) if room else {}
    trained, manner = find_trained(model, None, None), Manner(in_backward=not clip)
    placement = place(trained, FORMATS["fp32"], homes, Profile(room, room, after), manner, chunk_size)
    optimizer = OffloadAdamW(model, lr=1e-2, max_grad_norm=clip, homes=placement)
    for step in range(3):
        with optimizer._link.to_device.for_the_model() as made:
            x = torch.full((2, 4), 0.1 * (step + 1), dtype=torch.bfloat16)
            made.append(x)
        if step == 1:
            with optimizer.accumulate():
                model(x).float().square().sum().backward()
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if then:
            then(checker, step, model, optimizer)
    if optimizer._housing.homes:
        optimizer.state_dict()
        optimizer.close()
    del optimizer, trained, placement
    torch.ones(1)  # what was given back is looked at with the next operation


def load(checker, step, model, optimizer):
    if step == 1:
        model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def read_on_host(checker, step, model, optimizer):
    optimizer.synchronize()
    with checker.running(stream=None):
        for p in model.parameters():
            p.detach().float()


def write_state(checker, step, model, optimizer):
    """A gradient is there, and with it what was prefetched, when state is written by another thread than the lanes."""
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    states = [state for _, views in optimizer.chunk_states() for state in views]
    with checker.running(stream=None):
        for state in states:
            for tensor in state.tensors.values():
                tensor.zero_()
    optimizer.restored()
    optimizer.zero_grad()


def replace_weights(checker, step, model, optimizer):
    for p in model.parameters() if step == 2 else ():
        p.data = torch.zeros(p.shape, dtype=p.dtype)


def give_up(checker, step, model, optimizer):
    """An update that failed: nobody waits for the others but the homes themselves."""
    if step == 2:
        optimizer._housing.close()


SCENARIOS = {
    "mix": ({"homes": MIX}, {}),
    "in backward": ({"homes": MIX, "clip": 0.0}, {"ready": False}),
    "few chunks": ({"homes": "stream", "chunk_size": 1000}, {}),
    "stream": ({"homes": "stream"}, {"ready": False}),
    "host": ({"homes": "host"}, {"late": True}),
    "prefetch": ({"homes": "stream", "room": 1e6}, {}),
    "prefetch, late": ({"homes": MIX, "room": 1e6}, {"late": True, "ready": False}),
    "loaded": ({"homes": MIX, "then": load}, {"late": True}),
    "read": ({"homes": MIX, "then": read_on_host}, {"late": True}),
    "written": ({"homes": MIX, "room": 1e6, "then": write_state}, {"late": True}),
    "replaced": ({"homes": MIX, "then": replace_weights}, {}),
    "given up": ({"homes": MIX, "then": give_up}, {}),
    "given up, stream": ({"homes": "stream", "then": give_up}, {}),
    "given up, host": ({"homes": "host", "then": give_up}, {}),
}


def run(monkeypatch, name, left_out=None):
    what, how = SCENARIOS[name]
    monkeypatch.setattr(prefetch, "MOST_GOING", 20)
    monkeypatch.setattr(optimizer_module, "when_dropped", lambda *_: lambda: None)  # threads that raced have stopped
    monkeypatch.setattr(transfers, "UNDER_WAY_BYTES", 100)
    with checked(monkeypatch, left_out=left_out, **how) as checker:
        train(checker=checker, **what)
    return checker.sites


def source_line(site):
    """`file: code` of the nearest line."""
    file, number = site[1].split(":")
    return f"{file}: {linecache.getline(f'{SOURCE}/{file}', int(number)).split('  #')[0].strip()}"


@pytest.fixture(scope="module")
def reached():
    """The waits that each scenario calls; none of them races."""
    with pytest.MonkeyPatch.context() as patch:
        return {name: run(patch, name) for name in SCENARIOS}


@pytest.mark.slow
def test_nothing_races_and_every_wait_is_reached(reached):
    called = {source_line(site) for sites in reached.values() for site in sites if site[0] != "synchronize"}
    written = {
        f"{path.relative_to(SOURCE)}: {line.split('  #')[0].strip()}"
        for folder in ("flow", "offload")
        for path in (Path(SOURCE) / folder).glob("*.py")
        if path.name != "rates.py"  # which measures, outside of any step
        for line in path.read_text().splitlines()
        if CALLS.search(line) and not line.strip().startswith(("def ", '"""', "#"))
    }
    assert called == written


@pytest.mark.slow
def test_any_wait_that_is_left_out_is_a_race(reached, monkeypatch):
    sites = sorted(set().union(*reached.values()))
    silent = []
    for site in sites:
        try:
            for name in SCENARIOS:
                if site in reached[name]:
                    run(monkeypatch, name, left_out=site)
        except Race:
            continue
        silent.append(site)
    assert {source_line(site) for site in silent} == set(REDUNDANT), silent
