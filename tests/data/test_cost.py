"""What steps cost is what their micro-batches cost, and ranks wait for each other as little as rows allow."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.cost import TokenFlops, deal
from penstock.data.loader import EPOCHS_AHEAD, Position, prepare

MODEL = TokenFlops(products=50.0, pair=3.0, layers=3, windowed=1, window=20)


def attended_pairs(length, model):
    """By brute force: a full layer's square, and in a windowed one at most twice the window a token."""
    full = sum(1 for _ in itertools.product(range(length), repeat=2))
    near = sum(min(length, 2 * model.window) for _ in range(length))
    return (model.layers - model.windowed) * full + model.windowed * near


def test_pairs_are_the_square_of_an_example_and_within_a_window_the_band():
    lengths = np.array([[1, 7, 39], [40, 41, 90]])
    expected = [[attended_pairs(int(n), MODEL) for n in line] for line in lengths]
    assert MODEL.pairs(lengths).tolist() == expected


def test_pairs_of_long_rows_add_up_to_the_same_in_any_order():
    lengths = np.random.default_rng(0).integers(1, 500_000, 1000)
    pairs = TokenFlops(1.0, 1.0, layers=80, windowed=40, window=127).pairs(lengths)
    exact = sum(map(int, pairs.tolist()))
    assert all(value == int(value) for value in pairs.tolist())
    assert exact < 2**53, "or the sums would be rounded"
    assert pairs.sum() == pairs[::-1].cumsum()[-1] == exact


@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=23), ranks=st.integers(1, 5), at_once=st.integers(1, 4))
def test_every_row_goes_to_one_rank_and_all_run_the_same_number_of_micro_batches(costs, ranks, at_once):
    rows = np.random.default_rng(0).permutation(len(costs))
    (dealt,) = deal(rows[None], np.array(costs, dtype=float), ranks, at_once)
    assert dealt.shape == (-(-len(costs) // (ranks * at_once)), ranks, at_once)
    assert sorted(dealt[dealt >= 0].tolist()) == sorted(rows.tolist())
    assert (dealt >= 0).any(axis=(1, 2)).all(), "no micro-batch is empty on every rank"
    of_rank = [dealt[:, rank].flatten() for rank in range(ranks)]
    counts = [int((own >= 0).sum()) for own in of_rank]
    assert max(counts) - min(counts) <= 1
    if ranks == 1:
        assert of_rank[0][of_rank[0] >= 0].tolist() == rows.tolist(), "one rank keeps the order"


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=24), st.integers(2, 4))
def test_ranks_wait_as_little_as_rows_one_by_one_allow(costs, ranks):
    """The costliest row must run, and with it at best those that come next: no other grouping waits less."""
    padded = np.array([0, *costs], dtype=float)
    (dealt,) = deal(np.arange(1, len(padded))[None], padded, ranks, 1)
    by_rank = np.where(dealt >= 0, padded[dealt], 0.0)[:, :, 0]
    assert by_rank.max(axis=1).sum() == sum(sorted(costs, reverse=True)[::ranks])
    assert np.ptp(by_rank.sum(axis=0)) <= max(costs), "no rank has more than a row more to do"


def test_rows_go_to_ranks_forth_and_back():
    (dealt,) = deal(np.arange(6)[None], np.array([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]), 2, 3)
    assert dealt.tolist() == [[[0, 3, 4], [1, 2, 5]]], "11 beside 10, not 12 beside 9"


@pytest.fixture
def make(write, recipe_for, chatml, alpaca_rows):
    def prepared(**fields):
        recipe = recipe_for(write(alpaca_rows(37)), **{"max_length": 192, "batch_size": 5, "compile": False} | fields)
        return prepare(recipe, chatml, 10**6, lambda _: None, MODEL).train

    return prepared


def cost_of(batch):
    segments = np.diff(batch.boundaries)
    return MODEL.products * batch.input_ids.numel() + MODEL.pair * MODEL.pairs(segments).sum()


def made(loader, position, steps, ranks):
    """Costs of steps by the micro-batches that each rank is given."""
    for _ in range(steps):
        by_rank, after = [], position
        for rank in range(ranks):
            batches, after = loader.step_at(position, rank, ranks)
            by_rank.append([cost_of(batch) for batch in batches])
        yield sum(max(together) for together in zip(*by_rank, strict=True))
        position = after


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "fields",
    [{}, {"packing": False}, {"packing": False, "micro_batch_size": 2}, {"compile": True, "micro_batch_size": 2},
     {"compile": True, "packing": False}, {"shuffle": False, "micro_batch_size": 1}],
)  # fmt: skip
def test_costs_are_those_of_the_micro_batches(make, fields, ranks):
    loader = make(**fields)
    steps = 2 * loader.steps_per_epoch() + 1
    found = loader.costs_from(Position(), steps, ranks)
    assert found.tolist() == pytest.approx(list(made(loader, Position(), steps, ranks)), rel=1e-12)
    assert len(set(found.tolist())) > 1, "steps differ"
    middle = Position(1, 3)  # as after a resume with another batch size
    assert loader.costs_from(middle, 4, ranks).tolist() == pytest.approx(list(made(loader, middle, 4, ranks)))
    assert loader.costs_from(middle, 0).tolist() == []
    epochs = (EPOCHS_AHEAD + 1) * loader.steps_per_epoch()
    distant = loader.costs_from(Position(), 100_000 * loader.steps_per_epoch(), ranks)  # one by one, minutes
    assert distant[:epochs].tolist() == loader.costs_from(Position(), epochs, ranks).tolist()
    assert set(distant[epochs:]) == {distant[:epochs].mean()}


def test_padding_counts_where_every_row_has_it(make):
    """Of rows of one shape the shortest may cost most: attention of its padding is a square too."""
    loader = make(compile=True, packing=False, micro_batch_size=1, batch_size=4)
    shortest_first = 0
    for step in range(9):
        shares = [loader.step_at(Position(0, 4 * step), rank, 2)[0] for rank in (0, 1)]
        together = [[cost_of(batch) for batch in pair] for pair in zip(*shares, strict=True)]
        costs = sorted(itertools.chain.from_iterable(together), reverse=True)
        assert [max(pair) for pair in together] == costs[::2]
        tokens = [batch.num_tokens for batch in (*shares[0], *shares[1])]
        shortest_first += shares[0][0].num_tokens == min(tokens)
    assert shortest_first


def test_row_flops_add_up_to_those_of_full_steps(make):
    loader = make(micro_batch_size=1)
    products, attention = loader.row_flops()
    lengths = loader.store.lengths[loader.packing.examples]
    assert products.sum() == MODEL.products * lengths.sum()
    assert attention.sum() == MODEL.pair * sum(attended_pairs(int(n), MODEL) for n in lengths)
    assert loader.costs_from(Position(), loader.steps_per_epoch()).sum() == pytest.approx((products + attention).sum())


def test_a_long_example_makes_ranks_wait_once_and_not_for_every_row(write, recipe_for, chatml):
    """Two long examples in a step of four rows: both ranks run one at the same time, wherever they stood."""
    row = {"instruction": "q", "input": ""}
    rows = [{**row, "output": "long " * n} for n in (200, 200, 2, 2)]
    recipe = recipe_for(write(rows), batch_size=4, micro_batch_size=1, packing=False, max_length=512, shuffle=False)
    loader = prepare(recipe, chatml, 10**6, lambda _: None, MODEL).train
    tokens = [[batch.num_tokens for batch in loader.step_at(Position(), rank, 2)[0]] for rank in (0, 1)]
    assert tokens[0][0] == tokens[1][0] > 10 * tokens[0][1] == 10 * tokens[1][1]


def test_a_step_knows_how_long_a_tokens_example_is(make):
    loader, position = make(packing=False, micro_batch_size=1), Position()
    while position.epoch == 0:
        tokens, _, example = loader.counts_at(position)
        batches, position = loader.step_at(position)
        lengths = [batch.num_tokens for batch in batches]
        assert tokens == sum(lengths)
        assert example == pytest.approx(np.mean([n for n in lengths for _ in range(n)]))
