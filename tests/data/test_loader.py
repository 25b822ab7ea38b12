"""A position gives the same micro-batches for ever, and what is in them is exactly the examples."""

import itertools
import math

import numpy as np
import pytest
import torch

from penstock.data import loader
from penstock.data.loader import Position, prepare
from penstock.errors import DataError


@pytest.fixture
def make(write, recipe_for, chatml, alpaca_rows):
    """A data set of n rows of varying length."""

    def prepared(n=40, tokenizer=chatml, say=lambda _: None, vocab_size=10**6, **fields):
        fields = {"max_length": 256, "batch_size": 3, "compile": False} | fields
        return prepare(recipe_for(write(alpaca_rows(n)), **fields), tokenizer, vocab_size, say)

    return prepared


def steps(loader, epoch=0, **ranks):
    position = Position(epoch, 0)
    while position.epoch == epoch:
        batches, position = loader.step_at(position, **ranks)
        yield batches


def segments(batch):
    """(flat start, flat end) of the examples of a micro-batch, padding left out, by its own boundaries."""
    length = batch.input_ids.shape[1]
    used, result = 0, []
    for start, end in itertools.pairwise(batch.boundaries):
        assert start // length == (end - 1) // length, "a segment lies within a row"
        result.append((start, end))
        used += end - start
    assert used == batch.input_ids.numel()
    return result


def examples_of(batch, store):
    """The examples in a micro-batch as (ids, indices of trained tokens), found by its boundaries."""
    flat, trained = batch.input_ids.flatten().tolist(), set((batch.target_index + 1).tolist())
    known = {tuple(store.example(i)[0].tolist()) for i in range(len(store))}
    for start, end in segments(batch):
        ids = tuple(flat[start:end])
        if ids in known:
            yield ids, tuple(j - start for j in range(start, end) if j in trained)


def all_examples(store, indices=None):
    for i in range(len(store)) if indices is None else indices:
        ids, mask = store.example(i)
        yield tuple(ids.tolist()), tuple(np.flatnonzero(mask).tolist())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("micro", [0, 1, 2])
def test_an_epoch_is_every_example_once_with_its_own_targets(make, packing, shuffle, micro):
    data = make(packing=packing, shuffle=shuffle, micro_batch_size=micro)
    batches = list(itertools.chain.from_iterable(steps(data.train)))
    got = sorted(itertools.chain.from_iterable(examples_of(b, data.train.store) for b in batches))
    assert got == sorted(all_examples(data.train.store))
    assert sum(b.num_tokens for b in batches) == data.train.num_tokens == int(data.train.store.lengths.sum())
    assert sum(b.num_trained for b in batches) == data.train.num_trained == data.train.store.counts.trained_tokens


def test_targets_are_the_next_tokens_within_an_example(make):
    data = make()
    for batch in itertools.chain.from_iterable(steps(data.train)):
        flat = batch.input_ids.flatten()
        assert torch.equal(batch.targets, flat[batch.target_index + 1])
        starts = {start for start, _ in segments(batch)}
        assert not starts & set((batch.target_index + 1).tolist()), "no place predicts across a boundary"
        assert batch.num_trained == len(batch.targets) == len(batch.target_index)
        assert all(t.dtype == torch.int64 for t in (batch.input_ids, batch.position_ids, batch.targets))


def test_positions_restart_with_every_segment_and_padding_is_a_segment(make, chatml):
    data = make(packing=False)
    padded = 0
    for batch in itertools.chain.from_iterable(steps(data.train)):
        rows, length = batch.input_ids.shape
        positions, flat = batch.position_ids.flatten().tolist(), batch.input_ids.flatten()
        for start, end in segments(batch):
            padding = bool((flat[start:end] == chatml.pad_token_id).all())
            assert positions[start:end] == ([0] * (end - start) if padding else list(range(end - start)))
        assert set(range(0, rows * length + 1, length)) <= set(batch.boundaries)
        padding = [(s, e) for s, e in segments(batch) if (flat[s:e] == chatml.pad_token_id).all()]
        assert batch.num_tokens == rows * length - sum(e - s for s, e in padding)
        trained = set(batch.target_index.tolist()) | set((batch.target_index + 1).tolist())
        assert not any(s <= j < e for s, e in padding for j in trained), "padding is neither predicted nor predicts"
        padded += len(padding)
    assert padded


def test_rows_are_padded_only_to_the_longest_of_the_micro_batch(make):
    data = make(packing=False, micro_batch_size=1)
    assert all(b.num_tokens == b.input_ids.numel() for b in itertools.chain.from_iterable(steps(data.train)))


def test_the_most_examples_of_a_micro_batch(make):
    """As the trial makes room for them: no micro-batch has more segments, padding included."""
    data = make(micro_batch_size=2, batch_size=4)
    segments = [len(b.boundaries) - 1 for b in itertools.chain.from_iterable(steps(data.train))]
    assert max(segments) <= data.train.most_examples(2) <= 2 * (max(segments) + 1)
    assert make(packing=False).train.most_examples(3) == 6


def test_padding_stays_within_the_embedding(make, make_tokenizer):
    """A padding token that was added to the tokenizer has no row in the model's embedding."""
    tokenizer = make_tokenizer("chatml")
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id == rows
    for vocab_size, filler in ((rows, 0), (rows + 1, rows)):
        data = make(n=5, tokenizer=tokenizer, vocab_size=vocab_size, packing=False, compile=True)
        padding = torch.cat([b.input_ids[:, -1] for b in itertools.chain.from_iterable(steps(data.train))])
        assert set(padding.tolist()) == {filler}


def test_compiled_layers_get_one_shape(make):
    plain, fixed = (make(n=11, batch_size=4, micro_batch_size=3, compile=on).train for on in (False, True))
    for a, b in zip(plain, fixed, strict=True):
        assert b.input_ids.shape == (3, 256)
        assert (a.num_tokens, a.num_trained) == (b.num_tokens, b.num_trained)
        assert torch.equal(a.targets, b.targets)
        assert torch.equal(a.input_ids.flatten()[a.target_index], b.input_ids.flatten()[b.target_index])
        assert b.boundaries[-1] == 3 * 256


def test_packed_rows_respect_max_length(make):
    data = make(max_length=128)
    lengths = [b.input_ids.shape[1] for b in itertools.chain.from_iterable(steps(data.train))]
    assert max(lengths) <= 128
    assert data.train.num_rows < data.train.num_examples


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x.input_ids, y.input_ids) and x.boundaries == y.boundaries and torch.equal(x.targets, y.targets)
        for x, y in zip(a, b, strict=True)
    )


def test_a_step_is_a_function_of_its_position_alone(make):
    data = make()
    sequence, position = [], Position()
    for _ in range(3 * data.train.steps_per_epoch()):
        batches, after = data.train.step_at(position)
        sequence.append((position, batches))
        position = after
    assert position == Position(3, 0)
    fresh = make()
    for position, batches in reversed(sequence):
        assert same(fresh.train.step_at(position)[0], batches)


def test_order_follows_seed_and_epoch(make):
    data, again, other = make(), make(), make(seed=7)

    def order(d, epoch):
        return d.train._rows(epoch).tolist()

    assert order(data, 0) == order(again, 0)
    assert order(data, 0) != order(data, 1)
    assert order(data, 0) != order(other, 0)
    assert sorted(order(data, 1)) == list(range(data.train.num_rows))
    assert order(make(shuffle=False), 5) == list(range(make(shuffle=False).train.num_rows))


def test_without_shuffle_the_file_order_is_kept(make):
    for packing in (True, False):
        data = make(shuffle=False, packing=packing)
        batches = itertools.chain.from_iterable(steps(data.train, epoch=3))
        got = list(itertools.chain.from_iterable(examples_of(b, data.train.store) for b in batches))
        assert got == list(all_examples(data.train.store))


def test_steps_and_the_smaller_last_one(make):
    data = make(packing=False, n=10, batch_size=4, micro_batch_size=3)
    assert data.train.steps_per_epoch() == 3
    shapes = [[b.input_ids.shape[0] for b in batches] for batches in steps(data.train)]
    assert shapes == [[3, 1], [3, 1], [2]]
    assert data.train.step_at(Position(0, 8))[1] == Position(1, 0)


def test_a_position_out_of_the_epoch_is_caught(make):
    data = make(n=10)
    with pytest.raises(AssertionError, match="is not in an epoch"):
        data.train.step_at(Position(0, data.train.num_rows))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_share_a_step_and_run_the_same_number_of_micro_batches(make, ranks):
    data = make(packing=False, n=10, batch_size=4, micro_batch_size=1)
    whole = list(steps(data.train))
    shares = [list(steps(data.train, rank=r, ranks=ranks)) for r in range(ranks)]
    for step, parts in zip(whole, zip(*shares, strict=True), strict=True):
        assert len({len(part) for part in parts}) == 1
        assert len(parts[0]) == math.ceil(len(step) / ranks)
        of_ranks = [b for part in parts for b in part]
        got = sorted(e for b in of_ranks for e in examples_of(b, data.train.store))
        assert got == sorted(e for b in step for e in examples_of(b, data.train.store))
        assert sum(b.num_trained for b in of_ranks) == sum(b.num_trained for b in step)


@pytest.mark.parametrize(("ranks", "at_once", "rows"), [(1, 0, 6), (2, 0, 3), (4, 0, 2), (2, 2, 2), (3, 6, 2)])
def test_micro_batches_of_one_shape_have_no_more_rows_than_a_rank_has(make, ranks, at_once, rows):
    data = make(packing=False, n=12, batch_size=6, micro_batch_size=at_once, compile=True)
    for rank in range(ranks):
        batches, _ = data.train.step_at(Position(), rank=rank, ranks=ranks)
        assert {b.input_ids.shape for b in batches} == {(rows, 256)}
        assert len(batches) == math.ceil(math.ceil(6 / ranks) / rows)


def test_a_rank_without_rows_gets_a_filler(make):
    data = make(packing=False, n=5, batch_size=4, micro_batch_size=1)
    batches, after = data.train.step_at(Position(0, 4), rank=3, ranks=4)
    (filler,) = batches
    assert (filler.input_ids.shape, filler.num_tokens, filler.num_trained) == ((1, 1), 0, 0)
    assert filler.boundaries == (0, 1)
    assert after == Position(1, 0)


def test_to_moves_every_tensor(make):
    (batch,) = make(batch_size=1).train.step_at(Position())[0]
    moved = batch.to("meta")
    tensors = (moved.input_ids, moved.position_ids, moved.target_index, moved.targets)
    assert {t.device.type for t in tensors} == {"meta"}
    assert (moved.boundaries, moved.num_tokens, moved.num_trained) == (
        batch.boundaries,
        batch.num_tokens,
        batch.num_trained,
    )


# --- choosing examples ------------------------------------------------------------------------------------------------


def indices(loader):
    return sorted(loader.packing.examples.tolist())


def test_held_out_examples_are_not_trained_on(make):
    data = make(n=40, validation=0.1)
    held, train = indices(data.evaluation), indices(data.train)
    assert (len(held), len(train)) == (4, 36)
    assert sorted(held + train) == list(range(40))
    assert indices(make(n=40, validation=0.1).evaluation) == held
    assert indices(make(n=40, validation=0.1, seed=1).evaluation) != held
    assert held != list(range(4)) != held[-4:]


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_goes_through_every_held_out_example_in_a_fixed_order(make, packing):
    data = make(n=40, validation=0.2, packing=packing)
    first, second = list(data.evaluation), list(data.evaluation)
    assert same(first, second)
    got = sorted(itertools.chain.from_iterable(examples_of(b, data.train.store) for b in first))
    assert got == sorted(all_examples(data.train.store, indices(data.evaluation)))
    assert sum(b.num_trained for b in first) == data.evaluation.num_trained


def test_evaluation_data_of_its_own(make, write, alpaca_rows):
    path = write(alpaca_rows(50)[40:], "eval.jsonl")
    data = make(n=40, eval_data=str(path))
    assert (data.train.num_examples, data.evaluation.num_examples) == (40, 10)
    assert data.evaluation.store.where(0) == f"{path}:1"
    assert make(n=40).evaluation is None


def test_a_hub_set_is_trained_and_evaluated_on_its_splits(make, monkeypatch):
    asked = []
    local = loader.open_source

    def open_source(name, split, say, reading):
        asked.append((name.rpartition("/")[2], split))
        return local(name, split, say, reading)

    monkeypatch.setattr(loader, "open_source", open_source)
    make(n=20, data_split="part", eval_data="demo", eval_split="held")
    assert [split for _, split in asked] == ["part", "held"]
    assert asked[1][0] == "demo"


@pytest.mark.parametrize(("n", "share"), [(4, 0.1), (1, 0.5)])
def test_too_few_examples_to_hold_out(make, n, share):
    with pytest.raises(DataError, match=f"of {n} examples leaves none to evaluate on") as caught:
        make(n=n, validation=share)
    assert "--eval-data" in caught.value.remedy


def test_data_percent(make):
    data = make(n=40, data_percent=25.0)
    chosen = indices(data.train)
    assert len(chosen) == 10
    assert chosen != list(range(10))
    assert indices(make(n=40, data_percent=25.0).train) == chosen
    assert indices(make(n=40, data_percent=25.0, seed=1).train) != chosen
    assert indices(make(n=40, data_percent=25.0, shuffle=False).train) == list(range(10))
    assert len(indices(make(n=40, data_percent=0.1).train)) == 1
    said = []
    make(n=40, say=said.append, data_percent=2.5)
    assert said[-1] == "data_percent 2.5: 1 of 40 examples"
    make(n=40, say=said.append, data_percent=100.0)
    assert sum("data_percent" in line for line in said) == 1
    both = make(n=40, data_percent=50.0, validation=0.5)
    assert (both.train.num_examples, both.evaluation.num_examples) == (10, 10)


def test_fingerprint_changes_with_what_a_step_holds(make):
    first = make().fingerprint
    assert make().fingerprint == first
    assert make(lr=1.0, batch_size=2).fingerprint == first, "the batch size may change in a resumed run"
    changes = [{"seed": 1}, {"shuffle": False}, {"packing": False}, {"validation": 0.1}, {"data_percent": 50.0}]
    changes += [{"max_length": 128}, {"train_on_prompt": True}, {"n": 39}]
    assert len({first, *(make(**change).fingerprint for change in changes)}) == 1 + len(changes)


def test_what_was_cut_or_dropped_is_said(make):
    said = []
    make(n=40, max_length=64, say=said.append)
    assert any("truncated" in line and "my.jsonl:" in line for line in said)
    assert any("without a trained end token" in line for line in said)


def test_every_rank_knows_the_counts_of_the_whole_step(make):
    data = make(batch_size=4, micro_batch_size=1)
    position = Position()
    while position.epoch == 0:
        counts = data.train.counts_at(position)
        batches, position = data.train.step_at(position)
        assert counts[:2] == (sum(b.num_tokens for b in batches), sum(b.num_trained for b in batches))
