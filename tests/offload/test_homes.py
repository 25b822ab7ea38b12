"""What every home promises, one at a time: the bits of the rule, and errors that reach whoever waits."""

import contextlib
import threading
import time
from concurrent.futures import TimeoutError as Late

import pytest
import torch
from torch import nn

from penstock.flow.lanes import Mark, Streams, ToHost
from penstock.flow.transfers import Link
from penstock.offload import optimizer as optimizer_module
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.homes import Coefficients, Surroundings, Update
from penstock.offload.host import HostHome
from penstock.offload.resident import ResidentHome
from penstock.offload.stream import StreamHome
from penstock.plan.layout import FORMATS, NUM_SLOTS, Chunk
from penstock.update.adamw import NUM_COEFFICIENTS, AdamW
from penstock.update.formats import view_state

CPU = torch.device("cpu")
NUM_CHUNKS = 2 * NUM_SLOTS + 1
MAKERS = {
    "gpu": ResidentHome,
    "stream": lambda chunks, around: StreamHome(chunks, around, cores=[0]),
    "host": lambda chunks, around: HostHome(chunks, around, cores=[0]),
    "masters first": lambda chunks, around: HostHome(chunks, around, cores=[0], masters_first=True),
}


class Apart(Streams):
    """A CPU whose host and device copy as if they had memories of their own."""

    separate_memory = True

    def to_host(self, tensor):
        return ToHost(tensor.clone(), Mark())


class Bench:
    """A home with chunks of one parameter each, and what its updates are made of."""

    def __init__(self, streams, make):
        self.link = Link(streams)
        self.chunks = [Chunk(i, 0, 700, FORMATS["int8"], weight_bytes=2) for i in range(NUM_CHUNKS)]
        self.home = make(self.chunks, Surroundings(AdamW(), self.link, range(NUM_CHUNKS)))
        generator = torch.Generator().manual_seed(0)
        self.weights, self.gradients = (
            [torch.randn(700, generator=generator).bfloat16() for _ in self.chunks] for _ in range(2)
        )
        for chunk, weight in zip(self.chunks, self.weights, strict=True):
            self.home.weight_was_set(chunk, weight)

    def update(self, number, row, weight=None):
        coefficients = Coefficients(row, self.link.streams.to_host(row[None]), 0)
        chunk, gradient = self.chunks[number], self.gradients[number]
        self.home.gradient_final(chunk, gradient, Mark())
        weight = self.weights[number] if weight is None else weight
        return self.home.update(Update(chunk, weight, gradient, coefficients, self.link.streams.main_mark()))


@pytest.mark.parametrize("streams", [Streams, Apart])
@pytest.mark.parametrize("name", MAKERS)
def test_a_home_makes_the_update_of_the_rule(name, streams):
    bench = Bench(streams(CPU), MAKERS[name])
    weights = [weight.clone() for weight in bench.weights]
    states = [view_state(c, torch.zeros(c.state_bytes, dtype=torch.uint8)) for c in bench.chunks]
    for step in range(3):
        row = torch.tensor([0.5, 1.0, 0.9, 0.1, 0.999, 0.001, 0.3, 1e-8, 0.99, 1e-3, step])
        updates = [bench.update(number, row) for number in range(NUM_CHUNKS)]
        bench.home.end_step()
        for update in updates:
            update.result(timeout=60).wait_on_host()
        for weight, gradient, state in zip(weights, bench.gradients, states, strict=True):
            AdamW().update_(weight, gradient, state, row)
    assert all(torch.equal(a, b) for a, b in zip(bench.weights, weights, strict=True))
    for chunk, wanted in zip(bench.chunks, states, strict=True):
        found = view_state(chunk, bench.home.state(chunk))
        assert all(torch.equal(found[part], tensor) for part, tensor in wanted.tensors.items())
    bench.home.close()


def test_moments_wait_for_the_master_of_the_same_chunk():
    """A core that is done with a chunk begins the next: with moments that another still needs for the master."""
    bench = Bench(Apart(CPU), MAKERS["masters first"])
    begin, updated = bench.home._threads.begin, []

    def slow(rule, weight, gradient, state, row, stage):
        wait = begin(rule, weight, gradient, state, row, stage)
        key = gradient.data_ptr()
        if stage == "moments":
            assert key in updated
            return wait

        def late():
            time.sleep(0.02)
            wait()
            updated.append(key)

        return late

    bench.home._threads.begin = slow
    row = torch.tensor([0.5, 1.0, 0.9, 0.1, 0.999, 0.001, 0.3, 1e-8, 0.99, 1e-3, 0])
    for number in range(NUM_CHUNKS):
        bench.update(number, row)
    bench.home.end_step()
    bench.home.settle()
    assert len(updated) == NUM_CHUNKS
    bench.home.close()


def test_a_step_that_breaks_off_leaves_nothing_to_the_next(monkeypatch):
    """What it had begun comes to its end; the moments of the next step are updated once."""
    monkeypatch.setattr(optimizer_module, "link_of", lambda device: Link(Apart(device)))
    found = []
    for breaks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
        optimizer = OffloadAdamW(model, lr=1e-2, homes="host", max_grad_norm=0.5)
        update_unit, count = OffloadAdamW._update_unit, 0

        def update(*args, update_unit=update_unit, breaks=breaks):
            nonlocal count
            count += 1
            update_unit(*args)
            if breaks and count == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(OffloadAdamW, "_update_unit", update)
        for _ in range(2):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step()
            optimizer.zero_grad()
        monkeypatch.setattr(OffloadAdamW, "_update_unit", update_unit)
        home = next(home for home, _ in optimizer._housing.homes)
        assert not home._owed
        found.append(optimizer.state_dict()["state"][0]["exp_avg"].clone())
        optimizer.close()
    assert torch.isfinite(found[1]).all()
    assert float(found[1].norm()) < 1.5 * float(found[0].norm()), "moments of a step count once"


@pytest.mark.parametrize("name", ["stream", "host"])
def test_a_copy_that_fails_reaches_whoever_waits_for_the_update(name, monkeypatch):
    """Nobody waits forever for an update whose copy was never made."""
    bench = Bench(Apart(CPU), MAKERS[name])
    monkeypatch.setattr(bench.link.to_device._lane, "mark", lambda: 1 / 0)
    update = bench.update(0, torch.ones(NUM_COEFFICIENTS))
    try:
        assert isinstance(update.exception(timeout=10), ZeroDivisionError)
    except Late:
        pytest.fail("the update is never told")
    finally:
        monkeypatch.undo()
        bench.home.close()


def test_a_stream_takes_no_more_updates_than_may_wait(monkeypatch):
    """In `in-backward`: the gradients of those that wait take memory beside the activations."""
    go, real = threading.Event(), StreamHome._update_now
    monkeypatch.setattr(StreamHome, "_update_now", lambda *args: (go.wait(60), real(*args))[1])
    bench = Bench(Streams(CPU), lambda chunks, around: StreamHome(chunks, around, cores=[0], most_waiting=2))
    row, taken = torch.ones(NUM_COEFFICIENTS), []

    def give():
        for number in range(4):
            update = bench.update(number, row)
            taken.append(update)

    giver = threading.Thread(target=give)
    giver.start()
    giver.join(0.2)
    assert len(taken) == 2
    assert giver.is_alive(), "the third waits for the first"
    go.set()
    giver.join(60)
    assert len(taken) == 4
    assert [update.exception(timeout=60) for update in taken] == [None] * 4
    bench.home.close()
