import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from penstock.flow.lanes import Mark, Streams
from penstock.offload.giving import Giver
from penstock.offload.homes import Update
from penstock.offload.trained import TrainedUnit, Updates
from penstock.plan.layout import FORMATS, Chunk

CHUNKS = [Chunk(index, 0, 256, FORMATS["fp32"], 2) for index in range(3)]
STREAMS = Streams(torch.device("cpu"))


class Home:
    """Takes an update when it is let."""

    def __init__(self):
        self.told, self.let = [], threading.Event()

    def gradient_final(self, chunk, gradient, written):
        self.told.append(("gradient", chunk.parameter, written))

    def update(self, update):
        assert self.let.wait(20)
        if update.coefficients == "bad":
            raise ZeroDivisionError
        self.told.append(("update", update.chunk.parameter))
        future = Future()
        future.set_result(update.ready)
        return future


@pytest.fixture
def home():
    return Home()


def giver_of(home, *, in_backward=True):
    return Giver(dict.fromkeys(CHUNKS, home), STREAMS, in_backward=in_backward)


def update_of(number, coefficients=None):
    gradient = torch.zeros(256, dtype=torch.bfloat16)
    return Update(CHUNKS[number], gradient, gradient, coefficients, Mark())


def test_the_next_unit_is_computed_while_one_is_given_and_no_more(home):
    giver = giver_of(home)
    first = giver.give([update_of(0)], sent=False, ahead=True)  # comes back, though no place is free
    with ThreadPoolExecutor(1) as backward:
        second = backward.submit(giver.give, [update_of(1)], sent=False, ahead=True)
        assert not first.done()
        with pytest.raises(TimeoutError):
            second.result(0.2)  # or gradients of more and more units would lie on the device
        home.let.set()
        second.result(20).result(20)
    assert [name for name, *_ in home.told] == ["gradient", "update"] * 2
    giver.close()


@pytest.mark.parametrize("in_backward", [True, False])
def test_updates_of_resident_weights_are_with_their_homes_at_once(home, in_backward):
    home.let.set()
    giver = giver_of(home, in_backward=in_backward)
    update = update_of(0)
    given = giver.give([update], sent=False, ahead=False)
    assert given.done()
    assert home.told == [("gradient", 0, update.ready), ("update", 0)]
    assert [mark.result() for mark in given.result()] == [update.ready]
    giver.close()


def test_a_gradient_that_was_sent_is_not_sent_again(home):
    home.let.set()
    giver_of(home, in_backward=False).give([update_of(2)], sent=True, ahead=False)
    assert home.told == [("update", 2)]


def test_an_error_is_told_once_to_whoever_waits_for_the_unit(home):
    home.let.set()
    giver = giver_of(home)
    unit = TrainedUnit(torch.nn.Linear(1, 1), (0,))
    unit.updates = Updates(giver.give([update_of(0, "bad")], sent=False, ahead=True))
    giver.give([update_of(1)], sent=False, ahead=True)
    assert not unit.was_called
    with pytest.raises(ZeroDivisionError):
        unit.settle()
    with pytest.raises(ZeroDivisionError):
        unit.wait(STREAMS)
    unit.wait(STREAMS)
    with pytest.raises(ZeroDivisionError):
        giver.give([update_of(2, "bad")], sent=False, ahead=False)
    giver.close()


def test_an_error_is_told_of_when_those_given_before_it_have_ended(home):
    home.let.set()
    giver, before = giver_of(home), Future()
    home.update = lambda update: before if update.chunk is CHUNKS[0] else Home.update(home, update)
    given = giver.give([update_of(0), update_of(1, "bad")], sent=True, ahead=True)
    with pytest.raises(TimeoutError):
        given.exception(0.2)
    before.set_result(Mark())
    assert isinstance(given.exception(20), ZeroDivisionError)
    giver.close()
