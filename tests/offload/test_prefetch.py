"""State that comes before its update changes no bit, takes no more than is free, and is forgotten where it is void."""

from types import SimpleNamespace

import pytest
import torch
from small_net import Net, assert_same, batches, loss_of, run

from penstock.flow.lanes import Lane, Mark, Tape, ToHost
from penstock.offload.homes import Chunk, Coefficients, StreamHome, Update
from penstock.offload.optimizer import OffloadAdamW
from penstock.offload.prefetch import MOST_GOING, Ahead
from penstock.plan.layout import NUM_SLOTS
from penstock.plan.split import EARLY_SHARE
from penstock.update.formats import FORMATS
from penstock.update.kernels import NUM_COEFFICIENTS

CPU = torch.device("cpu")
HOMES = ["stream", {"gpu": 0.4, "stream": 0.3, "host": 0.3}]


@pytest.fixture
def came(monkeypatch):
    """Chunks that came early."""
    found, real = [], StreamHome._bring_now
    monkeypatch.setattr(
        StreamHome, "_bring_now", lambda self, chunk, *rest: (found.append(chunk), real(self, chunk, *rest))
    )
    return found


def early(room, device="cpu", **options):
    model = Net().to(device)
    most = (1000 + room) / EARLY_SHARE
    return {
        "model": model,
        "activation_bytes": most,  # so that it does not go by the gradients that leave, on a GPU
        "kept_bytes": most,
        "taken_after": dict.fromkeys(model.parameters(), 1000),
        "device": device,
        **options,
    }


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("room", [0, 3000, 10**9])
@pytest.mark.parametrize("homes", HOMES)
def test_it_changes_no_bit(homes, room, states, device, came):
    ours = run(**early(room, device, homes=homes, chunk_size=100, states=states))
    assert bool(came) == bool(room)
    stream = ours[1]._housing.stream
    assert stream._order.submit(lambda: dict(stream._there)).result() == {}, "of a weight without gradient, too"
    assert_same(run(homes="gpu", states=states, device=device), ours)


def test_no_more_comes_than_there_is_room_for(came):
    _, optimizer, _ = run(steps=1, **early(3000, homes="stream", chunk_size=100))
    assert 1000 < sum(chunk.state_bytes for chunk in came) <= 3000
    stream = optimizer._housing.stream
    assert came == stream._early[: len(came)], "next in forward first"
    places = [stream._chunks.index(chunk) for chunk in stream._early]
    assert places == sorted(places)
    assert min(places) < len(stream._chunks) / 3
    assert max(places) > len(stream._chunks) * 2 / 3, "spread over forward"


def test_after_accumulation_it_comes_in_the_last_backward_only(came):
    options = early(10**9, homes="stream", chunk_size=100)
    model = options.pop("model")
    del options["device"]
    optimizer = OffloadAdamW(model, **options)
    first, last = batches(2)
    with optimizer.accumulate():
        loss_of(model, first).backward()
    assert not came
    loss_of(model, last).backward()
    optimizer.step()
    optimizer.synchronize()
    assert came


@pytest.mark.parametrize("void", ["weights", "state", "forgotten"])
def test_what_came_is_void_once_state_is_written_or_the_step_forgotten(void, device):
    def train(**options):
        def between(number, model, optimizer):
            if number == 3 and void == "weights":
                model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
            if number == 3 and void == "state":
                saved = optimizer.state_dict()
                optimizer.load_state_dict({**saved, "state": [
                    {key: 0.5 * value for key, value in entry.items()} for entry in saved["state"]]})  # fmt: skip
            if number == 3 and void != "weights":
                optimizer.zero_grad()
                loss_of(model, batches(1, device)[0]).backward()

        return run(before_step=between, chunk_size=100, device=device, **options)

    options = early(10**9, device)
    del options["device"]
    assert_same(train(model=Net().to(device), homes="gpu"), train(homes="stream", **options))


def test_memory_in_pieces_is_no_error(monkeypatch, came):
    plain = run(homes="gpu")
    options = early(10**9, homes="stream", chunk_size=100)
    real, slots = torch.empty, []

    def empty(*size, **kinds):
        slots.append(size)
        if len(slots) > NUM_SLOTS + 3:
            raise torch.OutOfMemoryError("in pieces")
        return real(*size, **kinds)

    monkeypatch.setattr("penstock.offload.homes.torch", SimpleNamespace(**{**vars(torch), "empty": empty}))
    with pytest.warns(UserWarning, match="GPU memory is in pieces"):
        ours = run(**options)
    assert len(came) == 3
    assert len(slots) == NUM_SLOTS + 4, "none is tried again"
    assert_same(plain, ours)


def test_an_error_of_what_comes_early_reaches_the_caller_once(monkeypatch):
    options = early(10**9, homes="stream", chunk_size=100)
    model, failed = options.pop("model"), []
    del options["device"]
    optimizer = OffloadAdamW(model, **options)
    real = StreamHome._bring_now

    def fail_once(self, chunk, *rest):
        if not failed:
            failed.append(chunk)
            raise RuntimeError("lost")
        real(self, chunk, *rest)

    monkeypatch.setattr(StreamHome, "_bring_now", fail_once)
    first, second = batches(2)
    loss_of(model, first).backward()
    optimizer._housing.stream._order.submit(lambda: None).result()
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, second).backward()
    optimizer.step()
    optimizer.close()


class Counted(Mark):
    def __init__(self):
        super().__init__()
        self.waited = 0

    def wait_on_host(self):
        self.waited += 1


class Stream:
    def __init__(self):
        self.asked = []

    def choose_early(self, num_bytes):
        self.chosen = num_bytes

    def bring(self, room):
        self.asked.append(room)

    def new_step(self):
        self.asked.clear()


def test_gradients_that_left_are_room_once_the_device_is_as_far():
    stream = Stream()
    ahead = Ahead(stream, 10e9, [9e9, 8e9, float("inf")], 3e9)
    assert stream.chosen == 5e9
    marks = [Counted() for _ in range(3)]
    ahead.leaves(marks[0], MOST_GOING)
    ahead.final(0)
    ahead.leaves(marks[1], MOST_GOING // 2)
    ahead.final(1)
    ahead.final(2)
    assert [mark.waited for mark in marks] == [1, 0, 0]
    assert stream.asked == [1e9, 2e9 + MOST_GOING, -float("inf")]
    ahead.new_step()
    ahead.final(1)
    assert stream.asked == [2e9]


def test_the_order_of_its_lanes(monkeypatch):
    """On a CPU copies are made at once, so the marks themselves are watched."""
    log = []

    class Named(Mark):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def wait_on_host(self):
            log.append(f"host waits for {self.name}")

    monkeypatch.setattr(Lane, "mark", lambda lane: Named(f"{lane.name} {len(log)}"))
    monkeypatch.setattr(Lane, "wait", lambda lane, mark: log.append(f"{lane.name} waits for {mark.name}"))
    used = {8: "gradient", NUM_COEFFICIENTS: "scalars", 8 * 8: "slot"}  # by elements
    monkeypatch.setattr(Lane, "uses", lambda lane, tensor: log.append(f"{lane.name} uses {used[tensor.numel()]}"))
    monkeypatch.setattr("penstock.offload.homes.main_mark", lambda _: Named("free"))
    chunk = Chunk(0, 0, 8, torch.float32, FORMATS["fp32"])
    home = StreamHome([chunk], CPU, Tape(CPU), cores=[0])
    home.choose_early(1e9)
    row = torch.ones(NUM_COEFFICIENTS)
    update = Update(chunk, torch.zeros(8), torch.ones(8), Coefficients(row, ToHost.of(row[None]), 0), Named("norm"))
    home.bring(1e9)
    home.bring(1e9)
    home.update(update).result()
    home.new_step()
    home.bring(1e9)
    home._order.submit(lambda: None).result()
    home.close()
    assert log[:10] == [
        "in waits for free", "in uses slot",
        "update waits for in 1", "update waits for norm", "update uses gradient", "update uses scalars",
        "out waits for update 6", "update uses slot", "out uses slot",
        "in waits for free",
    ]  # fmt: skip
    assert log[10] == "host waits for out 7", "state that has not come home does not set out"
