"""Ranks on the CPU: two and four of them train what one trains, in every home, update and format."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from rank_jobs import silent
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.engine.fsdp import shard_over_ranks
from penstock.engine.packed import PackedModel
from penstock.engine.trial import full_batch
from penstock.machine.known import MACHINES
from penstock.model.load import load_config, load_model
from penstock.plan.job import Job
from penstock.plan.memory import CONTEXT_BYTES, work_of
from penstock.plan.on_ranks import StreamedRows
from penstock.plan.predict import _rank, _rates
from penstock.plan.solve import solve
from penstock.recipe.presets import ARCHITECTURES, PRESETS

HOMES = ["gpu", "stream", "host", "gpu=0.4,stream=0.3,host=0.3"]
CONFIGS = [
    *({"homes": homes, "max_grad_norm": 0.5, "micro_batch_size": 1} for homes in HOMES),
    *({"homes": homes, "max_grad_norm": 0.0, "update": "in-backward", "micro_batch_size": 2} for homes in HOMES),
    {"max_grad_norm": 0.0, "update": "after-norm"},
    {"mode": "zerooffload"},
    {"preset": "qwen3-30b-a3b", "homes": HOMES[3], "recompute": "full"},
    {"preset": "demo", "homes": HOMES[3]},
]


def assert_same(several, one, config):
    for ours, theirs in zip(several["rows"], one["rows"], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5), config
        assert ours[1] == pytest.approx(theirs[1], rel=1e-4), config
        assert ours[2:] == theirs[2:], "tokens of the whole step"
    assert several["eval"] == pytest.approx(one["eval"], rel=1e-5)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(several["weights"][name], weight, rtol=1e-4, atol=2e-5, msg=f"{config} {name}")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.slow
def test_ranks_train_what_one_rank_trains(ranks, count):
    """Steps of five rows: ranks have unlike numbers of them, and some run a micro-batch without any."""
    configs = [config for config in CONFIGS if count == 2 or config.get("homes") in (None, HOMES[3])]
    results, (alone,) = ranks("train", count, configs=configs), ranks("train", 1, configs=configs)
    for place, config in enumerate(configs):
        for result in results:
            assert result[place]["rows"] == results[0][place]["rows"], "all ranks know the same numbers"
        assert_same(results[0][place], alone[place], config)


@pytest.mark.parametrize(
    "used",
    [
        pytest.param([[(0, 1), (1, 2)]], id="as many others"),
        pytest.param([[(0, 1), (0,)]], id="fewer"),
        pytest.param([[(0, 1), (0, 1)], [(1, 2), (1, 2)]], id="others than before"),
    ],
)
def test_gradients_of_weights_that_some_ranks_did_not_use_are_refused(ranks, used):
    """FSDP2 would add up those of different weights."""
    for said in ranks("some_gradients", 2, used=used):
        assert "mlp.experts.0.weight: has a gradient on some ranks" in said or "mlp.experts.1.weight: " in said
        assert "one GPU" in said


def test_weights_that_no_rank_uses_have_no_gradient(ranks):
    for found in ranks("some_gradients", 2, used=[[(0, 2), (0, 2)]] * 2):
        assert found == [[True, False, True]] * len(found)


BLOCKS = (
    "num_hidden_layers=2,hidden_size=512,intermediate_size=512,vocab_size=2048,"
    "num_attention_heads=4,num_key_value_heads=2"
)
"""Of int8 state: two ranks cut none."""


@pytest.mark.parametrize(
    ("count", "homes", "config"),
    [
        (2, (HOMES[0], HOMES[3]), {"max_grad_norm": 0.5}),
        pytest.param(2, HOMES, {"max_grad_norm": 0.5}, marks=pytest.mark.slow),
        pytest.param(2, HOMES, {"max_grad_norm": 0.0, "update": "in-backward"}, marks=pytest.mark.slow),
        pytest.param(4, HOMES, {"max_grad_norm": 0.5, "dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param(2, HOMES, {"dtype": "bf16", "states": "bf16"}, marks=pytest.mark.slow),
        pytest.param(2, HOMES, {"dtype": "bf16", "states": "int8", "shape": BLOCKS}, marks=pytest.mark.slow),
    ],
)
def test_homes_change_no_bit_on_ranks_either(ranks, count, homes, config):
    first, *others = ranks("train", count, configs=[{**config, "homes": each} for each in homes])[0]
    for other in others:
        assert other["rows"] == first["rows"]
        assert all(torch.equal(other["weights"][name], weight) for name, weight in first["weights"].items())


STREAMED = [
    {"homes": "host", "max_grad_norm": 0.5, "micro_batch_size": 1},
    {"homes": "stream=0.5,host=0.5", "max_grad_norm": 0.5, "dtype": "bf16"},
    {"homes": "host", "max_grad_norm": 0.0, "update": "in-backward", "recompute": "full"},
    {"preset": "qwen3-30b-a3b", "homes": "host"},
    {"preset": "demo", "homes": "host", "dtype": "bf16"},  # tied, and loaded from files
]


@pytest.mark.slow
def test_weights_that_stream_change_no_bit_on_ranks(ranks):
    """Of three ranks the last has fewer rows, and of some parameters none."""
    configs = [{**config, "weights": weights} for config in STREAMED for weights in ("resident", "streamed", "1")]
    for results in ranks("train", 3, configs=configs):
        for place, config in enumerate(STREAMED):
            resident, *others = results[3 * place : 3 * place + 3]
            assert resident["streamed"] == 0
            assert others[0]["streamed"] > others[1]["streamed"] > 0
            for other in others:
                assert other["rows"] == resident["rows"], config
                assert other["eval"] == resident["eval"], config
                assert all(torch.equal(other["weights"][n], w) for n, w in resident["weights"].items()), config


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_gather_waits_for_the_update_of_its_unit(ranks, weights):
    """Each CPU update is made to take 20 ms: weights that are gathered before it would be old ones.

    Both in the same processes: on a GPU each chooses for itself how compiled kernels cut their sums.
    """
    configs = [{"homes": "host", "max_grad_norm": clip, "weights": weights} for clip in (0.5, 0.0)]
    results = ranks("train", 2, configs=[*configs, *configs], slow=2)[0]
    assert [result["rows"] for result in results[:2]] == [result["rows"] for result in results[2:]]


@pytest.mark.slow
def test_reduce_dtype_changes_the_sum_of_bf16_gradients(ranks):
    """Of three: the sum of two bf16 numbers is rounded once either way."""
    base = {"dtype": "bf16", "data_percent": 3.0, "batch_size": 3}
    configs = [{**base, "reduce_dtype": kind} for kind in ("bf16", "fp32")]
    rough, exact = ranks("train", 3, configs=configs, steps=1)[0]
    assert rough["rows"][0][1] != exact["rows"][0][1]
    assert rough["rows"][0][1] == pytest.approx(exact["rows"][0][1], rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "streamed"), [("h100", 0), ("rtx4090", 70)])
def test_what_is_planned_for_four_gpus_is_what_a_rank_chooses(ranks, machine, streamed):
    """llama-70b clipped with 1 TiB, on four 80 GB GPUs and on four of 24 GB: weights, state, and gradients that stay.

    Ranks choose for themselves, from the peaks and the rates that the plan predicts.
    """
    job = Job(ARCHITECTURES[PRESETS["llama-70b"].model], 4, 4096, compiled=True, weights="auto")
    known = replace(MACHINES[machine], host_bytes=2**40)
    plan = solve(job, known, 4)
    assert plan is not None
    assert plan.settings.streamed == streamed
    rank = _rank(job, work_of(job, plan.settings, 4), known, 4)
    peaks = StreamedRows.of(job, plan.settings, 4, 1, plan.format.bytes_per_element(2)).leave(rank.peaks)
    profile = {
        "activation_bytes": peaks.activation_bytes,
        "kept_bytes": peaks.kept_bytes,
        "forward_seconds": rank.one.forward_s - rank.one.head_s,
        "backward_seconds": rank.one.backward_s + rank.one.recompute_s,
    }
    planned = {(buffer.place, buffer.name): buffer.num_bytes for buffer in plan.buffers}
    taken = planned["gpu", "weights"], planned["host", "process"] + planned.get(("host", "streamed weights"), 0)
    found = ranks(
        "chosen_without_memory", 4, preset="llama-70b", streamed=streamed, profile=profile,
        rates=asdict(_rates(known, 4)), gpu_bytes=known.gpu_bytes,
        gpu_free=int(known.gpu_bytes - CONTEXT_BYTES - taken[0]), host_free=int(known.host_bytes - 4 * taken[1]),
    )  # fmt: skip
    del planned["gpu", "activations"], planned["gpu", "CUDA context"], planned["host", "process"]
    for chosen in found:
        assert chosen == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(("vocab", "whole"), [(20_000, "head"), (1_000, "layer")])
def test_what_a_rank_holds_whole_for_a_moment(vocab, whole):
    """What `plan.memory.peaks` counts: two tables at the loss, three layers in backward beside the own gradients."""
    shape = "hidden_size=256,intermediate_size=1024,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=4"
    recipe = replace(
        PRESETS["llama-8b"], init="random", shape=f"{shape},vocab_size={vocab}", tokenizer="demo", device="cpu",
        dtype="bf16", recompute="full", compile=False, max_length=64,
    )  # fmt: skip
    model = load_model(recipe, load_config(recipe), torch.device("cpu"), silent)
    modules = {"head": model.lm_head, "layer": model.model.layers[0]}
    sizes = {name: sum(p.nbytes for p in module.parameters()) for name, module in modules.items()}
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        shard_over_ranks(model, init_device_mesh("cpu", (4,)), None)
        packed, tracker = PackedModel(model, recipe, silent), FSDPMemTracker(model)
        with tracker:
            for _ in range(2):
                packed.loss_sum(full_batch(1, 64, vocab)).backward()
    finally:
        dist.destroy_process_group()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    gathered = sum(
        peak[kind] for kind in peak if str(kind).endswith(("UNSHARDED_PARAM", "ALL_GATHER", "REDUCE_SCATTER"))
    )
    assert gathered == pytest.approx({"head": 2, "layer": 3}[whole] * sizes[whole], rel=0.01)
