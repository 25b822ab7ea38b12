"""Copies wait for room and go by their deadlines. A lane whose marks are passed on command stands for the device."""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch

from penstock.flow.lanes import Mark, Streams
from penstock.flow.transfers import NOW, Link, Transfers, link_of

CPU = torch.device("cpu")
SIZE = 100
"""Bytes of every copy; the device is given four of them ahead."""


class Passed(Mark):
    """A mark that is passed when the test says so."""

    def __init__(self):
        super().__init__()
        self._passed = threading.Event()

    def go(self):
        self._passed.set()

    def ready(self):
        return self._passed.is_set()

    def wait_on_host(self):
        assert self._passed.wait(60), "a mark that is never passed"


class SlowLane:
    """Notes what it was given, in order, with a mark after each that the test passes."""

    name = "in"

    def __init__(self):
        self.waits, self.labels, self.used, self.marks = [], [], [], []

    def work(self, label=None):
        self.labels.append(label)
        return nullcontext()

    def current(self):
        return nullcontext()

    def wait(self, mark):
        self.waits.append(mark)

    def uses(self, tensor):
        self.used.append(tensor)

    def mark(self):
        self.marks.append(Passed())
        return self.marks[-1]


class SlowStreams(Streams):
    """One slow lane; notes what the model was told."""

    def __init__(self):
        super().__init__(CPU)
        self.slow, self.told = SlowLane(), []

    def lane(self, name, *, urgent=False):
        return self.slow if hasattr(self, "slow") else super().lane(name, urgent=urgent)

    def main_waits(self, mark):
        self.told.append(mark)

    def main_uses(self, tensor):
        self.told.append(tensor)


@pytest.fixture
def transfers(monkeypatch):
    monkeypatch.setattr("penstock.flow.transfers.UNDER_WAY_BYTES", 4 * SIZE)
    made = Transfers("in", SlowStreams())
    yield made
    for mark in made._lane.marks:
        mark.go()
    if made._thread is not None:
        made._thread.shutdown()


def source(number):
    return torch.full((SIZE,), number, dtype=torch.uint8)


def ask(transfers, deadline, number=0, **more):
    target = torch.zeros(SIZE, dtype=torch.uint8)
    return target, transfers.copy(target, source(number), deadline=deadline, **more)


def test_what_has_room_begins_at_once(transfers):
    asked = [ask(transfers, deadline, deadline + 1) for deadline in (3, 2, 1, 0)]
    assert [future.result(timeout=0) for _, future in asked] == transfers._lane.marks
    assert all(torch.equal(target, source(n)) for (target, _), n in zip(asked, (4, 3, 2, 1), strict=True))
    assert transfers._thread is None, "nothing waits, so nobody watches"


def test_of_those_that_wait_the_most_urgent_goes_first_once_there_is_room(transfers):
    for _ in range(4):
        ask(transfers, 0)
    late, first, second, early = (ask(transfers, deadline)[1] for deadline in (9, 5, 5, 1))
    assert not any(future.done() for future in (late, first, second, early))
    for number, future in enumerate((early, first, second, late)):  # of equals the first that was asked for
        transfers._lane.marks[number].go()
        assert future.result(timeout=60) is transfers._lane.marks[4 + number]
        others = (early, first, second, late)[number + 1 :]
        assert not any(other.done() for other in others), "one left, one began"


def test_a_copy_larger_than_what_may_be_under_way_goes_when_it_is_alone(transfers):
    ask(transfers, 0)
    large = transfers.copy(torch.zeros(1000), torch.ones(1000), deadline=0)
    assert not large.done()
    transfers._lane.marks[0].go()
    large.result(timeout=60)


def test_what_goes_now_overtakes_those_that_wait(transfers):
    for _ in range(4):
        ask(transfers, 0)
    waiting = ask(transfers, 0)[1]
    target, now = ask(transfers, NOW, 7)
    assert now.done()
    assert torch.equal(target, source(7))
    assert not waiting.done()


def test_its_mark_is_after_everything_that_was_asked_for(transfers):
    for _ in range(4):
        ask(transfers, 0)
    targets = [ask(transfers, deadline, deadline) for deadline in (3, 1, 2)]
    mark = transfers.mark()
    assert all(future.done() for _, future in targets), "those that waited have begun"
    assert [future.result() for _, future in sorted(targets, key=lambda asked: int(asked[0][0]))] == (
        transfers._lane.marks[4:7]
    ), "by their deadlines"
    assert mark is transfers._lane.marks[-1]


def test_a_copy_is_after_what_it_was_told_and_keeps_its_memory(transfers):
    before, target, given = Passed(), torch.zeros(SIZE), torch.ones(SIZE)
    transfers.copy(target, given, deadline=NOW, after=before, label="down")
    lane = transfers._lane
    assert lane.waits == [before]
    assert lane.labels == ["down"]
    assert [id(tensor) for tensor in lane.used] == [id(target), id(given)]
    ask(transfers, NOW)
    assert lane.waits == [before], "nothing to wait for"


@pytest.mark.parametrize("deadline", [NOW, 0])
def test_an_error_in_a_copy_reaches_whoever_asked_and_nobody_else(transfers, deadline):
    failed = transfers.copy(torch.zeros(3), torch.zeros(4), deadline=deadline)
    assert isinstance(failed.exception(timeout=0), RuntimeError)
    target, fine = ask(transfers, deadline, 5)
    assert fine.exception(timeout=0) is None
    assert torch.equal(target, source(5))


def test_an_error_in_one_that_waited_stops_no_other(transfers):
    for _ in range(4):
        ask(transfers, 0)
    failed = transfers.copy(torch.zeros(3), torch.zeros(4), deadline=1)
    fine = ask(transfers, 2)[1]
    transfers._lane.marks[0].go()
    assert isinstance(failed.exception(timeout=60), RuntimeError)
    assert fine.exception(timeout=60) is None


@pytest.mark.parametrize("asked", ["wait_on_host", "ready"])
def test_an_error_of_the_device_reaches_those_that_wait_and_the_next_ones_go(transfers, asked):
    for _ in range(4):
        ask(transfers, 0)

    def fault():
        raise RuntimeError("unspecified launch failure")

    setattr(transfers._lane.marks[0 if asked == "wait_on_host" else 1], asked, fault)
    waiting = ask(transfers, 1)[1]
    transfers._lane.marks[0].go()
    assert "launch failure" in str(waiting.exception(timeout=60))
    assert ask(transfers, 1)[1].exception(timeout=60) is None, "nobody believes that somebody is still pumping"


def test_the_model_waits_for_what_is_copied_for_it(transfers):
    @contextmanager
    def noted():
        entered.append(True)
        yield
        entered.pop()

    entered = []
    transfers._lane.current = noted
    with transfers.for_the_model() as made:
        assert entered, "on the lane"
        made.append(source(1))
    assert not entered
    told = transfers._streams.told
    assert told[0] is transfers._lane.marks[-1]
    assert told[1] is made[0], "or its memory would be given away while the model reads it"


def test_both_ways_of_a_device_are_shared_by_everybody():
    link = link_of(CPU)
    assert link_of(torch.device("cpu")) is link
    assert isinstance(link, Link)
    assert link.to_device is not link.to_host


def test_many_threads_may_ask_at_once(device):
    """Values arrive whole and in whatever order, on a real lane."""
    link, wanted = Link(Streams(torch.device(device))), {}
    targets = {n: torch.zeros(1000, device=device) for n in range(64)}
    made = link.streams.main_mark()

    def give(start):
        for number in range(start, 64, 4):
            given = torch.full((1000,), float(number))
            wanted[number] = link.to_device.copy(targets[number], given, deadline=number % 7, after=made)

    threads = [threading.Thread(target=give, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    link.to_device.mark().wait_on_host()
    assert all(future.done() for future in wanted.values())
    assert all(targets[n].unique().tolist() == [n] for n in wanted)


def test_what_has_arrived_is_forgotten_though_nothing_waits(transfers):
    for _ in range(20):
        ask(transfers, NOW)
        transfers._lane.marks[-1].go()
    assert len(transfers._under_way) == 1
