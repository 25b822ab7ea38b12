"""Every wait is needed: with any one of them left out, some access races. See `tests/flow/checked.py`."""

import functools
import gc
import linecache
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from checked import SOURCE, Race, checked

from penstock.engine import parked
from penstock.engine.layerwise import LayerByLayer
from penstock.engine.parked import ParkedInputs
from penstock.engine.weights import StreamedWeights
from penstock.flow import transfers
from penstock.offload import optimizer as optimizer_module
from penstock.offload import prefetch
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.landings import Landings
from penstock.offload.placing import find_trained, place
from penstock.plan import layout
from penstock.plan.layout import FORMATS
from penstock.plan.split import Manner, Profile
from penstock.update import adamw

MIX = {"gpu": 0.4, "stream": 0.3, "host": 0.3}
REDUNDANT = {
    "flow/transfers.py: first.wait_on_host()": "so that the most urgent copy is chosen late, not for order",
    "offload/stream.py: self._prefetched_out.popleft().wait_on_host()": "for memory, not for order",
    "offload/prefetch.py: first.wait_on_host()": "for memory, not for order",
    "engine/parked.py: self._leaving.popleft().arrived.wait_on_host()": "for memory, not for order",
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


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Deep(nn.Module):
    """Two layers that are resident and five that stream."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(7))
        self.to(torch.bfloat16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Packed:
    """What `LayerByLayer` needs of a model."""

    def __init__(self, model):
        self.decoder = SimpleNamespace(layers=tuple(model.layers), backbone=model, tied={})
        self.model = model

    def rows(self, x):
        if self.fails == "at once":
            raise ZeroDivisionError
        return SimpleNamespace(x=x, batch=SimpleNamespace(targets=torch.zeros(len(x))))

    def hidden_states(self, rows):
        return self.model(rows.x)

    def chosen(self, hidden, rows):
        return hidden

    def head_loss(self, chosen, targets):
        if self.fails == "in the loss":
            raise ZeroDivisionError
        return chosen.float().square().sum()

    fails = ""


def stream(homes, checker, *, clip=0.5, chunk_size=10, fails="", then=None):
    """Three steps with weights that stream and inputs that are parked, the second of two micro-batches.

    `fails`: one more does not come to its end.
    """
    model, link = Deep(), optimizer_module.link_of(None)
    weights = StreamedWeights(model.layers[2:], link)
    inputs = ParkedInputs(2 * len(model.layers) * 256, link, [0])
    packed = Packed(model)
    layerwise = LayerByLayer(packed, weights, inputs, link.streams.timeline)
    trained, manner = find_trained(model, None, model.layers), Manner(in_backward=not clip)
    placement = place(trained, FORMATS["fp32"], homes, Profile(), manner, chunk_size)
    optimizer = OffloadAdamW(model, lr=1e-2, max_grad_norm=clip, homes=placement, units=model.layers)
    weights.updated = functools.partial(lambda optimizer, layer: optimizer.unit_of(layer).settle(), optimizer)
    for step in range(3):
        with link.to_device.for_the_model() as made:
            batches = [torch.full((2, 4), 0.1 * (step + n), dtype=torch.bfloat16) for n in range(1 + (step == 1))]
            made += batches
        layerwise.run(batches, 1, optimizer.accumulate)
        optimizer.step()
        optimizer.zero_grad()
        if then:
            then(checker, step, model, optimizer)
    if fails:
        packed.fails = fails
        with torch.no_grad():
            model(batches[0])
        if fails == "in a layer":
            model.layers[2].register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            layerwise.run(batches, 1, optimizer.accumulate)
        torch.ones(1)  # what was given back is looked at with the next operation
        inputs.close()
        return
    inputs.close()
    del layerwise, inputs
    torch.ones(1)
    if optimizer._housing.homes:
        optimizer.close()
    weights.updated = lambda layer: None
    with torch.no_grad():
        model(batches[0])
        model(batches[0])
    weights.close()
    del optimizer, trained, placement, weights, packed, model
    gc.collect()
    torch.ones(1)


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


FAILS = ("at once", "in a layer", "in the loss")
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
    "written, stream": ({"homes": "stream", "room": 1e6, "then": write_state}, {"late": True}),
    "replaced": ({"homes": MIX, "then": replace_weights}, {}),
    "given up": ({"homes": MIX, "then": give_up}, {}),
    "given up, stream": ({"homes": "stream", "then": give_up}, {}),
    "given up, host": ({"homes": "host", "then": give_up}, {}),
    "weights": ({"homes": "host", "train": stream}, {"ready": False}),
    "weights, late": ({"homes": MIX, "train": stream}, {"late": True, "ready": False}),
    "weights, mix": ({"homes": MIX, "train": stream}, {}),
    "weights, in backward": ({"homes": MIX, "train": stream, "clip": 0.0}, {"ready": False}),
    "weights and state": ({"homes": "stream", "train": stream}, {"late": True}),
    "weights and few chunks": ({"homes": "stream", "train": stream, "chunk_size": 1000}, {}),
    "weights, at once": ({"homes": "stream", "train": stream}, {"under_way": 2**29}),
    **{f"weights, failed {where}": ({"homes": "host", "train": stream, "fails": where}, {}) for where in FAILS},
    "weights, given up": ({"homes": MIX, "train": stream, "then": give_up}, {}),
}


def touch_(weight, gradient, state, coefficients, stage="whole"):
    """What an update reads and what it writes, without its arithmetic, which would be two of three operations."""
    gradient + coefficients[0]
    moments = [state["first"], state["second"]]
    for tensor in moments if stage == "master" else ():
        tensor + 0
    for tensor in moments if stage != "master" else ():
        tensor.add_(0)
    for tensor in (weight, state["remainder"]) if stage != "moments" else ():
        tensor.add_(0)


def run(monkeypatch, name, left_out=None):
    what, how = SCENARIOS[name]
    monkeypatch.setattr(adamw, "adamw_reference_", touch_)
    monkeypatch.setattr(prefetch, "MOST_GOING", 20)
    monkeypatch.setattr(parked, "AHEAD_BYTES", 0)
    monkeypatch.setattr(layout, "LANDING_BYTES", 0)  # so that landings are used again within a step
    monkeypatch.setattr(optimizer_module, "when_dropped", lambda *_: lambda: None)  # threads that raced have stopped
    what, how = dict(what), dict(how)
    monkeypatch.setattr(transfers, "UNDER_WAY_BYTES", how.pop("under_way", 100))
    with checked(monkeypatch, left_out=left_out, **how) as checker:
        what.pop("train", train)(checker=checker, **what)
    return checker.sites


def source_line(site):
    """`file: code` of the nearest line."""
    file, number = site[1].split(":")
    return f"{file}: {linecache.getline(f'{SOURCE}/{file}', int(number)).split('  #')[0].strip()}"


@pytest.fixture(scope="module", autouse=True)
def keep_what_is_imported():
    """The scenarios look for garbage, each of them: not among all that tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def reached():
    """The waits that each scenario calls, the quickest first; none of them races."""
    found, seconds = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        for name in SCENARIOS:
            start = time.perf_counter()
            found[name] = run(patch, name)
            seconds[name] = time.perf_counter() - start
    return {name: found[name] for name in sorted(found, key=seconds.get)}


@pytest.mark.slow
def test_nothing_races_and_every_wait_is_reached(reached):
    called = {source_line(site) for sites in reached.values() for site in sites if site[0] != "synchronize"}
    written = {
        f"{path.relative_to(SOURCE)}: {line.split('  #')[0].strip()}"
        for folder in ("flow", "offload", "engine")
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
        slots = site[0] == "uses" and site[-1].startswith("engine/weights.py")  # which `close` alone gives back
        # Work of a thread of flow/ that runs where somebody waits for another has sites of its own elsewhere.
        in_passing = len(site) == 3 and (
            site[-1].startswith("offload/trained.py") or "fetched.result()" in source_line((None, site[-1]))
        )
        if slots or in_passing:
            continue
        try:
            for name in reached:
                if site in reached[name]:
                    run(monkeypatch, name, left_out=site)
        except Race:
            continue
        silent.append(site)
    assert {source_line(site) for site in silent} == set(REDUNDANT), silent


@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("how", [{}, {"late": True}])
def test_a_gradient_that_is_still_read_must_not_be_overwritten(monkeypatch, clip, how):
    monkeypatch.setitem(SCENARIOS, "read", ({"homes": "host", "clip": clip}, how))
    run(monkeypatch, "read")
    monkeypatch.setattr(Landings, "in_use", lambda *_: None)
    with pytest.raises(Race):
        run(monkeypatch, "read")
