"""Whole runs on several ranks, from the data to the exported model: on the CPU, or on a GPU that they share."""

import json
import os

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
SHARED_GPU = os.environ.get("PENSTOCK_SHARE_GPU") == "1"
MIXED = "gpu=0.4,stream=0.3,host=0.3"
IN_BF16 = {"dtype": "bf16", "reduce_dtype": "fp32"}
SAVED = {
    **IN_BF16, "save_every": 2, "keep": 3, "validation": 0.2, "eval_every": 3, "max_grad_norm": 0.5, "homes": MIXED,
}  # fmt: skip


def rows(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def curve(run):
    """Losses and norms, to the last bit."""
    return [(row["loss"], row["grad_norm"]) for row in rows(run)]


def weights(run):
    """Of the exported model."""
    files = sorted((run / "model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def start(run, ranks, count, **changes):
    summary = ranks("whole_run", count, directory=str(run), **changes)[0]
    assert not isinstance(summary, tuple), summary
    return summary


def checkpoint(run, step):
    return str(run / "checkpoints" / f"step-{step:08}")


@pytest.fixture(scope="module")
def two(ranks, tmp_path_factory):
    """A run of two ranks with checkpoints, an evaluation and an answer."""
    run = tmp_path_factory.mktemp("two") / "run"
    return run, start(run, ranks, 2, prompt="What is the capital of Italy?", **SAVED)


def test_what_only_another_machine_was_told_does_not_hold(ranks, two, tmp_path):
    """Of what is asked before anything is shared, too: whether ranks bind themselves, and the seed of new weights."""
    run, others = two[0], {"bind_cores": False, "seed": 77, "deterministic": True, "lr": 0.5}
    prompt = "What is the capital of Italy?"
    start(tmp_path / "run", ranks, 2, prompt=prompt, of_others=others, **SAVED)
    assert curve(tmp_path / "run") == curve(run)


def test_two_ranks_evaluate_answer_and_export(two):
    run, summary = two
    assert summary.steps == 6
    assert [row["step"] for row in rows(run, "eval.jsonl")] == [3, 6]
    assert summary.eval_loss == rows(run, "eval.jsonl")[-1]["eval_loss"]
    assert summary.answer.after, "the model of two ranks was asked"
    assert weights(run), "it was exported"
    assert json.loads((run / "ranks.json").read_text())["ranks"] == 2
    (other,) = json.loads((run / "facts" / "memory_of_other_ranks.json").read_text())
    assert {use["part"] for use in other} >= {"weights"}


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(two, ranks, tmp_path):
    again = tmp_path / "run"
    start(again, ranks, 2, resume=checkpoint(two[0], 2), prompt="What is the capital of Italy?", **SAVED)
    assert curve(again) == curve(two[0])
    assert rows(again, "eval.jsonl")[-1]["eval_loss"] == rows(two[0], "eval.jsonl")[-1]["eval_loss"]
    ours, theirs = weights(again), weights(two[0])
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_run_goes_from_two_ranks_to_one_and_on_to_four(two, ranks, tmp_path):
    one, four = tmp_path / "one", tmp_path / "four"
    flags = {**SAVED, "prompt": "What is the capital of Italy?"}
    start(one, ranks, 1, resume=checkpoint(two[0], 2), **flags)
    summary = start(four, ranks, 4, resume=checkpoint(one, 4), **flags)
    assert [(speed.ranks, speed.steps) for speed in summary.speeds] == [(2, 2), (1, 2), (4, 2)]
    assert [row["ranks"] for row in rows(four)] == [2, 2, 1, 1, 4, 4]
    for run in (one, four):
        assert [row["tokens"] for row in rows(run)] == [row["tokens"] for row in rows(two[0])]
        for ours, theirs in zip(curve(run), curve(two[0]), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3)
    ours, theirs = weights(four), weights(two[0])
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-2, atol=1e-4)


VARIANTS = {
    "experts": {"preset": "qwen3-30b-a3b", "homes": MIXED},
    "tied": {"preset": "demo", "homes": MIXED},
    "packed, in backward": {"packing": True, "max_grad_norm": 0.0, "update": "in-backward"},
    "bf16 state": {"states": "bf16", "homes": MIXED, "dtype": "bf16"},
    "bf16, reduced in fp32": {"dtype": "bf16", "reduce_dtype": "fp32", "homes": MIXED},
    "bf16, reduced in fp32, accumulated": {"dtype": "bf16", "reduce_dtype": "fp32", "micro_batch_size": 1},
    "accumulated": {"micro_batch_size": 1, "homes": MIXED},
    "recomputed": {"recompute": "full", "homes": "host"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_train_what_one_trains(name, ranks, tmp_path):
    """To rounding. Sums over ranks are in fp32; those of bf16 gradients only if the variant says so."""
    changes = {"batch_size": 4, "max_steps": 3, "keep": 0, **VARIANTS[name]}
    for count in (1, 2):
        start(tmp_path / str(count), ranks, count, **changes)
    of_losses, of_norms = (1e-4, 3e-3) if changes.get("dtype") == "bf16" else (1e-5, 1e-4)
    for ours, theirs in zip(curve(tmp_path / "2"), curve(tmp_path / "1"), strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=of_losses)
        assert ours[1] == pytest.approx(theirs[1], rel=of_norms)


def test_weights_stream_on_two_ranks_and_a_run_goes_on_with_resident_ones(two, ranks, tmp_path):
    """To the bit, with what is evaluated, answered and exported."""
    there, back = tmp_path / "there", tmp_path / "back"
    flags = {**SAVED, "prompt": "What is the capital of Italy?", "homes": "host"}
    start(there, ranks, 2, weights="streamed", **flags)
    assert "stream" in (there / "facts" / "memory.json").read_text()
    start(back, ranks, 2, resume=checkpoint(there, 4), weights="resident", **flags)
    for run in (there, back):
        assert curve(run) == curve(two[0])
        assert rows(run, "eval.jsonl")[-1]["eval_loss"] == rows(two[0], "eval.jsonl")[-1]["eval_loss"]
        ours, theirs = weights(run), weights(two[0])
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.gpu
@pytest.mark.skipif(not SHARED_GPU, reason="layers are compiled on a GPU, and ranks share none here")
def test_compiled_layers_on_two_ranks(ranks, tmp_path):
    """As uncompiled ones to rounding, and so when they are resumed: a process may choose other kernels for its sums."""
    flags = {**SAVED, "max_steps": 4}
    for compiled in (True, False):
        start(tmp_path / str(compiled), ranks, 2, compile=compiled, **flags)
        settings = yaml.safe_load((tmp_path / str(compiled) / "recipe.yaml").read_text())
        assert settings["compile"] is compiled
    start(tmp_path / "resumed", ranks, 2, compile=True, resume=checkpoint(tmp_path / "True", 2), **flags)
    whole = curve(tmp_path / "True")
    assert whole != curve(tmp_path / "False"), "compiled code rounds otherwise"
    for name in ("False", "resumed"):
        for ours, theirs in zip(curve(tmp_path / name), whole, strict=True):
            assert ours == pytest.approx(theirs, rel=5e-3)
    assert curve(tmp_path / "resumed")[:2] == whole[:2]


def test_data_with_fewer_rows_than_ranks(ranks, tmp_path):
    """Three examples are one row: the other ranks take part in the step with none."""
    data = tmp_path / "three.jsonl"
    data.write_text("".join(json.dumps({"instruction": f"{n}?", "output": f"{n}."}) + "\n" for n in range(3)))
    for count in (1, 4):
        run = tmp_path / str(count)
        start(run, ranks, count, data=str(data), data_percent=100.0, batch_size=4, keep=0, homes=MIXED)
    for ours, theirs in zip(curve(tmp_path / "4"), curve(tmp_path / "1"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_facts_that_one_rank_cannot_write_hold_up_no_other(ranks, tmp_path):
    """The others would wait for it, and then take what it says next for what it had to say here."""
    start(tmp_path / "run", ranks, 2, forgets=1, max_steps=1, keep=0)
    assert weights(tmp_path / "run"), "the model was exported all the same"


def test_ranks_that_compute_otherwise_give_one_answer(ranks):
    """As GPUs of two kinds may: one that ended its answer alone would leave the others waiting."""
    first, second, third = ranks("answering", 3)
    assert first == second == third
