"""Ranks on the CPU: two and four of them train what one trains, in every home, schedule and format."""

import itertools
import json

import pytest
import torch
from rank_jobs import CPU, silent, tiny

from penstock.model.load import load_config, load_model

HOMES = ["gpu", "stream", "host", "gpu=0.4,stream=0.3,host=0.3"]
CONFIGS = [
    *({"homes": homes, "max_grad_norm": 0.5, "micro_batch_size": 1} for homes in HOMES),
    *({"homes": homes, "max_grad_norm": 0.0, "update": "in-backward", "micro_batch_size": 2} for homes in HOMES),
    {"max_grad_norm": 0.0, "update": "after-norm"},
    {"mode": "zerooffload"},
    {"preset": "qwen3-30b-a3b", "homes": HOMES[3], "recompute": "full"},
    {"preset": "demo", "homes": HOMES[3]},
]


@pytest.fixture(scope="module")
def alone(ranks):
    return ranks("train", 1, configs=CONFIGS)[0]


def assert_same(several, one, config):
    for ours, theirs in zip(several["rows"], one["rows"], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5), config
        assert ours[1] == pytest.approx(theirs[1], rel=1e-4), config
        assert ours[2:] == theirs[2:], "tokens of the whole step"
    assert several["eval"] == pytest.approx(one["eval"], rel=1e-5)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(several["weights"][name], weight, rtol=1e-4, atol=2e-5, msg=f"{config} {name}")


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_train_what_one_rank_trains(ranks, alone, count):
    """Steps of five rows: ranks have unlike numbers of them, and some run a micro-batch without any."""
    chosen = [number for number, config in enumerate(CONFIGS) if count == 2 or config.get("homes") in (None, HOMES[3])]
    results = ranks("train", count, configs=[CONFIGS[number] for number in chosen])
    for place, number in enumerate(chosen):
        for result in results:
            assert result[place]["rows"] == results[0][place]["rows"], "all ranks know the same numbers"
        assert_same(results[0][place], alone[number], CONFIGS[number])


def test_homes_change_no_bit_on_ranks_either(ranks):
    configs = [{"homes": homes, "max_grad_norm": 0.5} for homes in (HOMES[0], HOMES[3])]
    first, *others = ranks("train", 2, configs=configs)[0]
    for other in others:
        assert other["rows"] == first["rows"]
        assert all(torch.equal(other["weights"][name], weight) for name, weight in first["weights"].items())


def test_a_gather_waits_for_the_update_of_its_unit(ranks):
    """Each CPU update is made to take 20 ms: weights that are gathered before it would be old ones."""
    configs = [{"homes": "host", "max_grad_norm": clip} for clip in (0.5, 0.0)]
    slow, fast = ranks("train", 2, configs=configs, slow=True)[0], ranks("train", 2, configs=configs)[0]
    assert [result["rows"] for result in slow] == [result["rows"] for result in fast]


def test_reduce_dtype_changes_the_sum_of_bf16_gradients(ranks):
    base = {"dtype": "bf16", "data_percent": 3.0}
    configs = [{**base, "reduce_dtype": kind} for kind in ("bf16", "fp32")]
    rough, exact = ranks("train", 2, configs=configs, steps=1)[0]
    assert rough["rows"][0][1] != exact["rows"][0][1]
    assert rough["rows"][0][1] == pytest.approx(exact["rows"][0][1], rel=2e-2)


# --- the optimizer on shards ------------------------------------------------------------------------------------------


def joined_parts(results):
    """All parts of every tensor, in order of rank; a tensor that every rank has counts once."""
    parts = [result["pieces"] for result in results]
    names = [name for name in parts[0] if name not in ("steps", "powers")]
    return {name: torch.cat([piece for part in parts for piece in part[name]]) for name in names}


@pytest.mark.parametrize(("states", "home"), [*itertools.product(["fp32", "bf16", "int8"], ["gpu", "stream", "host"])])
def test_the_number_of_ranks_shows_in_no_bit_of_an_update(ranks, states, home):
    """Given the same gradients, unclipped: weights, remainders, moments and scales, rounded by chance or not."""
    one, two, four = (joined_parts(ranks("updates", count, states=states, home=home)) for count in (1, 2, 4))
    for name, tensor in one.items():
        assert torch.equal(two[name], tensor), name
        assert torch.equal(four[name], tensor), name


@pytest.mark.parametrize("schedule", ["after-norm", "in-backward"])
def test_one_bad_shard_stops_the_step_on_all_ranks(ranks, schedule):
    results = ranks("updates", 2, states="fp32", home="gpu", schedule=schedule, bad_rank=1)
    for result in results:
        assert result["taken"] == [True, False, True, True]
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


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A model on disk in fp32, with experts that its file keeps one by one."""
    recipe = tiny("qwen3-30b-a3b")
    model = load_model(recipe, load_config(recipe), CPU, silent)
    directory = tmp_path_factory.mktemp("stored") / "model"
    model.save_pretrained(directory)
    names = json.loads((directory / "config.json").read_text())["architectures"]
    assert names == ["Qwen3MoeForCausalLM"]
    return directory, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rank_loads_its_rows_and_never_more(ranks, stored, dtype):
    directory, weights = stored
    (one,) = ranks("loading", 1, directory=str(directory), dtype=dtype)
    results = ranks("loading", 2, directory=str(directory), dtype=dtype)
    for result in results:
        assert result["own"] <= 0.55 * result["all"]
        assert result["largest"] <= max(w.nbytes for w in weights.values()) * 0.6, "half of the largest parameter"
        assert result["fingerprint"] == one["fingerprint"], "the same model, whoever loads it"
        for name, weight in weights.items():
            expected = weight if dtype == "fp32" else None
            if expected is not None:
                assert torch.equal(result["weights"][name], expected), name
    if dtype == "bf16":  # what rounding leaves is kept: together they are the fp32 weights
        from penstock.offload.kernels import join

        for name, weight in weights.items():
            remainder = torch.cat([result["remainders"][name] for result in results])
            assert torch.equal(join(results[0]["weights"][name].view(-1), remainder).view(weight.shape), weight), name


def test_random_weights_do_not_depend_on_the_number_of_ranks(ranks):
    presets = ["llama-8b", "qwen3-30b-a3b", "demo"]
    one, two, four = (ranks("drawing", count, presets=presets)[0] for count in (1, 2, 4))
    for number in range(len(presets)):
        for name, weight in one[number].items():
            assert torch.equal(two[number][name], weight), name
            assert torch.equal(four[number][name], weight), name
    matrices = [w for w in one[0].values() if w.ndim == 2]
    assert len({float(w.flatten()[0]) for w in matrices}) == len(matrices), "every module has a generator of its own"
