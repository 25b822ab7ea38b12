"""Every example once, no row too long, and few rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.packing import one_a_row, pack_best_fit, pack_in_order


@st.composite
def cases(draw):
    max_length = draw(st.integers(2, 60))
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=60))
    order = draw(st.permutations(range(len(lengths))))
    chosen = order[: draw(st.integers(1, len(order)))]
    return np.array(lengths, dtype=np.int64), np.array(chosen, dtype=np.int64), max_length


def rows_of(packing):
    return [packing.row(r).tolist() for r in range(len(packing))]


def reference_best_fit(lengths, order, max_length):
    """Best fit decreasing, one example at a time: into the fullest row with room, the latest of equals."""
    rows, rooms, stamps = [], [], []
    for clock, i in enumerate(sorted(order, key=lambda i: -lengths[i])):
        fitting = [r for r, room in enumerate(rooms) if room >= lengths[i]]
        if fitting:
            r = min(fitting, key=lambda r: (rooms[r], -stamps[r]))
        else:
            rows.append([])
            rooms.append(max_length)
            stamps.append(0)
            r = len(rows) - 1
        rows[r].append(int(i))
        rooms[r] -= lengths[i]
        stamps[r] = clock
    return rows


@settings(max_examples=150, deadline=None)
@given(cases())
def test_best_fit_is_best_fit(case):
    lengths, order, max_length = case
    packing = pack_best_fit(lengths, order, max_length)
    assert rows_of(packing) == reference_best_fit(lengths, order, max_length)


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([pack_best_fit, pack_in_order]))
def test_every_example_once_and_no_row_too_long(case, pack):
    lengths, order, max_length = case
    packing = pack(lengths, order, max_length)
    assert sorted(packing.examples.tolist()) == sorted(order.tolist())
    assert all(len(row) for row in rows_of(packing))
    assert packing.row_lengths(lengths).tolist() == [int(lengths[row].sum()) for row in rows_of(packing)]
    assert packing.row_lengths(lengths).max() <= max_length
    again = pack(lengths.copy(), order.copy(), max_length)
    assert rows_of(again) == rows_of(packing)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_best_fit_is_within_its_proven_bound(case):
    lengths, order, max_length = case
    at_least = -(-int(lengths[order].sum()) // max_length)
    rows = len(pack_best_fit(lengths, order, max_length))
    assert at_least <= rows <= max(2 * at_least, 1)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_in_order_keeps_the_order_and_closes_a_row_only_when_it_must(case):
    lengths, order, max_length = case
    packing = pack_in_order(lengths, order, max_length)
    assert packing.examples.tolist() == order.tolist()
    rows = rows_of(packing)
    for row, following in itertools.pairwise(rows):
        assert lengths[row].sum() + lengths[following[0]] > max_length


def test_equal_lengths_keep_the_given_order():
    order = np.array([3, 1, 0, 2])
    assert rows_of(pack_best_fit(np.full(4, 5), order, 10)) == [[3, 1], [0, 2]]
    many = np.random.default_rng(0).permutation(1000)
    assert pack_best_fit(np.full(1000, 5), many, 10).examples.tolist() == many.tolist()


def test_one_a_row():
    assert rows_of(one_a_row(np.array([4, 2]))) == [[4], [2]]


def test_too_long_is_caught():
    with pytest.raises(AssertionError, match="does not fit"):
        pack_best_fit(np.array([5, 11]), np.arange(2), 10)


def test_realistic_lengths_waste_next_to_nothing_and_take_no_time():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 0.9, 100_000).astype(np.int64), 2, 4096)
    packing = pack_best_fit(lengths, rng.permutation(len(lengths)), 4096)
    assert lengths.sum() / (len(packing) * 4096) > 0.995
    assert packing.row_lengths(lengths).max() <= 4096
