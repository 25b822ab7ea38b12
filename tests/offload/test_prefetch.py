"""State that comes before its update changes no bit, takes no more than is free, and is forgotten where it is void."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from small_net import Net, assert_same, batches, loss_of, offload, plain_run, run

from penstock.flow.lanes import Mark, Streams
from penstock.offload.prefetch import Prefetcher
from penstock.offload.stream import StreamHome
from penstock.plan.layout import FORMATS, Chunk
from penstock.plan.placement import PrefetchRoom
from penstock.plan.split import PREFETCH_SHARE, Profile

HOMES = ["stream", {"gpu": 0.4, "stream": 0.3, "host": 0.3}]


@pytest.fixture
def came(monkeypatch):
    """Chunks that came early."""
    found, real = [], StreamHome._prefetch_now
    monkeypatch.setattr(
        StreamHome, "_prefetch_now", lambda self, chunk, *rest: (found.append(chunk), real(self, chunk, *rest))
    )
    return found


def early(room, device="cpu", **options):
    model = Net().to(device)
    most = (1000 + room) / PREFETCH_SHARE
    profile = Profile(
        activation_bytes=most,  # so that it does not go by the gradients that leave, on a GPU
        kept_bytes=most,
        bytes_after=dict.fromkeys(model.parameters(), 1000),
    )
    return {"model": model, "profile": profile, "device": device, **options}


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("room", [0, 3000, 10**9])
@pytest.mark.parametrize("homes", HOMES)
def test_it_changes_no_bit(homes, room, states, device, came):
    ours = run(**early(room, device, homes=homes, chunk_size=100, states=states))
    assert bool(came) == bool(room)
    stream = ours[1]._housing.stream
    assert stream._thread.submit(lambda: dict(stream._prefetched)).result() == {}, "of a weight without gradient, too"
    assert_same(plain_run(states=states, device=device), ours)


def test_no_more_comes_than_there_is_room_for(came):
    _, optimizer, _ = run(steps=1, **early(3000, homes="stream", chunk_size=100))
    assert 1000 < sum(chunk.state_bytes for chunk in came) <= 3000
    stream, chosen = optimizer._housing.stream, optimizer._prefetcher._chosen
    assert came == chosen[: len(came)], "next in forward first"
    places = [stream.chunks.index(chunk) for chunk in chosen]
    assert places == sorted(places)
    assert min(places) < len(stream.chunks) / 3
    assert max(places) > len(stream.chunks) * 2 / 3, "spread over forward"


def test_after_accumulation_it_comes_in_the_last_backward_only(came):
    options = early(10**9, homes="stream", chunk_size=100)
    model = options.pop("model")
    del options["device"]
    optimizer = offload(model, **options)
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
                halved = {i: {key: 0.5 * value for key, value in entry.items()} for i, entry in saved["state"].items()}
                optimizer.load_state_dict({**saved, "state": halved})
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
    real, asked = torch.empty, []

    def empty(*size, **kinds):
        asked.append(size)
        if len(asked) > 3:
            raise torch.OutOfMemoryError("in pieces")
        return real(*size, **kinds)

    monkeypatch.setattr("penstock.offload.prefetch.torch", SimpleNamespace(**{**vars(torch), "empty": empty}))
    with pytest.warns(UserWarning, match="GPU memory is in pieces"):
        ours = run(**options)
    assert len(came) == 3
    assert len(asked) == 4, "none is tried again"
    assert_same(plain, ours)


def test_an_error_of_what_comes_early_reaches_the_caller_once(monkeypatch):
    options = early(10**9, homes="stream", chunk_size=100)
    model, failed = options.pop("model"), []
    del options["device"]
    optimizer = offload(model, **options)
    real = StreamHome._prefetch_now

    def fail_once(self, chunk, *rest):
        if not failed:
            failed.append(chunk)
            raise RuntimeError("lost")
        real(self, chunk, *rest)

    monkeypatch.setattr(StreamHome, "_prefetch_now", fail_once)
    first, second = batches(2)
    loss_of(model, first).backward()
    optimizer._housing.stream._thread.submit(lambda: None).result()
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


class Home:
    """Chunks of a hundred bytes."""

    def __init__(self):
        self.chunks = [Chunk(0, start, 10, FORMATS["fp32"], weight_bytes=2) for start in range(0, 1000, 10)]
        self.fetched = []

    def prefetch(self, chunk, memory, free):
        assert memory.nbytes == chunk.state_bytes == 100
        self.fetched.append(chunk)
        done = Future()
        done.set_result(None)
        return done

    def forget_prefetched(self):
        self.fetched.clear()


def test_gradients_that_left_are_room_once_the_device_is_as_far(monkeypatch):
    monkeypatch.setattr("penstock.offload.prefetch.MOST_GOING", 2000)
    home, marks = Home(), [Counted() for _ in range(3)]
    room = PrefetchRoom(free_after=(1000, 2000, -float("inf")), sent_bytes=3000)
    prefetcher = Prefetcher(home, Streams(torch.device("cpu")), room)
    assert len(prefetcher._chosen) == 50
    prefetcher.gradient_sent(marks[0], 2000)
    prefetcher.gradient_final(0)
    assert len(home.fetched) == 10
    prefetcher.gradient_sent(marks[1], 1000)
    prefetcher.gradient_final(1)
    assert len(home.fetched) == 40
    prefetcher.gradient_final(2)
    assert [mark.waited for mark in marks] == [1, 0, 0]
    assert home.fetched == prefetcher._chosen[:40], "each once, and next in forward first"
    prefetcher.step_ended()
    prefetcher.gradient_final(1)
    assert len(home.fetched) == 20, "the next backward begins with nothing"
