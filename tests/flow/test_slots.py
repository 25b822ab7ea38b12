"""Slots come in turn, and whoever takes one waits until nobody works with it any more."""

import torch

from penstock.flow.lanes import Mark, Streams
from penstock.flow.slots import SlotRing


class Counted(Mark):
    def __init__(self):
        super().__init__()
        self.waited = 0

    def wait_on_host(self):
        self.waited += 1


def test_slots_come_in_turn_and_apart():
    ring = SlotRing(3, 100, Streams(torch.device("cpu")))
    taken = [ring.take() for _ in range(7)]
    numbers = [id(slot) for slot in taken]
    assert [numbers.index(number) for number in numbers] == [0, 1, 2, 0, 1, 2, 0]
    assert {slot.memory.nbytes for slot in taken} == {100}
    assert len({slot.memory.data_ptr() for slot in taken}) == 3


def test_a_slot_is_waited_for_before_it_is_handed_out_again():
    ring, free = SlotRing(2, 8, Streams(torch.device("cpu"))), [Counted() for _ in range(4)]
    for number, mark in enumerate(free):
        slot = ring.take()
        assert [other.waited for other in free] == [1] * max(0, number - 1) + [0] * (4 - max(0, number - 1))
        slot.free = mark


def test_fresh_slots_wait_for_what_their_memory_was_before():
    class Busy(Streams):
        before = Counted()

        def main_mark(self):
            return self.before

    ring = SlotRing(2, 8, Busy(torch.device("cpu")))
    ring.take()
    ring.take()
    assert Busy.before.waited == 2


def test_closing_gives_the_memory_back():
    ring = SlotRing(2, 8, Streams(torch.device("cpu")))
    ring.close()
    assert ring._slots == []
