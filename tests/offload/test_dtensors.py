"""The optimizer on shards: given the same gradients, the number of ranks shows nowhere."""

import itertools

import pytest
import torch

from penstock.offload.dtensors import extents, local, local_start


def test_a_tensor_that_is_not_sharded_is_its_own_shard():
    tensor = torch.randn(3, 4, requires_grad=True)
    assert extents(tensor) == [(0, 12)]
    assert local_start(tensor) == 0
    assert local(tensor).data_ptr() == tensor.data_ptr()


def test_extents_are_those_that_fsdp2_cuts(ranks):
    """More ranks than rows, rows that do not divide, and one dimension only."""
    for result in ranks("cutting", 4, shapes=[[3, 5], [9, 2], [16], [1]]):
        for cut in result:
            assert cut["extent"] == cut["found"]
            assert sum(size for _, size in cut["all"]) == cut["total"]


def joined_parts(results):
    """All parts of every tensor, in order of rank; a tensor that every rank has counts once."""
    parts = [result["pieces"] for result in results]
    names = [name for name in parts[0] if name not in ("steps", "powers")]
    return {name: torch.cat([piece for part in parts for piece in part[name]]) for name in names}


@pytest.mark.parametrize(
    ("states", "home"),
    [
        pair if number % 4 == 0 else pytest.param(*pair, marks=pytest.mark.slow)
        for number, pair in enumerate(itertools.product(["fp32", "bf16", "int8"], ["gpu", "stream", "host"]))
    ],
)
def test_the_number_of_ranks_shows_in_no_bit_of_an_update(ranks, states, home):
    """Given the same gradients, unclipped: weights, remainders, moments and scales, stochastically rounded or not."""
    one, two, four = (joined_parts(ranks("updates", count, states=states, home=home)) for count in (1, 2, 4))
    for name, tensor in one.items():
        assert torch.equal(two[name], tensor), name
        assert torch.equal(four[name], tensor), name


@pytest.mark.parametrize("update", ["after-norm", "in-backward"])
def test_one_bad_shard_stops_the_step_on_all_ranks(ranks, update):
    results = ranks("updates", 2, states="fp32", home="gpu", update=update, bad_rank=1)
    for result in results:
        assert result["applied"] == [True, False, True, True]
        assert int(result["pieces"]["steps"][0]) == 3


def test_all_ranks_have_the_same_norm_to_the_bit(ranks):
    results = ranks("updates", 4, states="fp32", home="gpu")
    (one,) = ranks("updates", 1, states="fp32", home="gpu")
    assert len({float(result["norm"]) for result in results}) == 1
    assert float(results[0]["norm"]) == pytest.approx(float(one["norm"]), rel=1e-12)


def test_ranks_that_would_cut_a_block_of_int8_are_refused(ranks):
    message = ranks("updates", 2, states="int8", home="gpu", shapes=[[6, 100]])[1]
    assert "would cut a parameter of shape (6, 100)" in message
    assert "--states bf16" in message


@pytest.mark.parametrize("how", ["together", "prefetched", "unsharded"])
def test_weights_that_are_gathered_early_are_updated_ones(ranks, how):
    """With a module that they were sharded with, in the forward of another one, or by hand."""
    apart = ranks("gathered_early", 2, how="apart", homes="host")
    assert ranks("gathered_early", 2, how=how, homes="host") == apart


def test_weights_that_were_loaded_are_gathered_again(ranks):
    for losses in ranks("set_after_a_forward", 2):
        assert losses[-1] == losses[0] != losses[-2]
