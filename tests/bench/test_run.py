"""The benchmark on tiny models: what it counts, what it varies, what a row says."""

import dataclasses
import json
import math

import pytest
import torch

from penstock.bench.run import Asked, Case, bench, default_directory, flops_of_step, split_batch, variants
from penstock.errors import RecipeError
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS

SHAPE = "num_hidden_layers=2,hidden_size=32,intermediate_size=48,vocab_size=300,num_attention_heads=4"
TINY = dataclasses.replace(
    PRESETS["llama-8b"], init="random", shape=SHAPE + ",num_key_value_heads=2,head_dim=16", dtype="fp32", device="cpu",
    batch_size=3, micro_batch_size=2, max_length=16, recompute="none",
)  # fmt: skip


def build(recipe):
    return load_model(recipe, load_config(recipe), torch.device("cpu"), lambda _: None)


def test_a_batch_that_is_no_multiple_ends_with_a_smaller_micro_batch():
    assert split_batch(TINY) == [2, 1]
    assert split_batch(dataclasses.replace(TINY, batch_size=4)) == [2, 2]
    assert split_batch(dataclasses.replace(TINY, micro_batch_size=0)) == [3]


def test_flops_are_those_of_the_products():
    """Counted by torch itself as it runs, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    recipe = dataclasses.replace(TINY, attention="eager", batch_size=1, micro_batch_size=1, max_length=64)
    model = build(recipe)
    model.set_attn_implementation("eager")
    ids = torch.randint(300, (1, 64))
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert flops_of_step(model, recipe) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_tied_embedding_counts_once_as_the_head():
    tied = build(dataclasses.replace(TINY, shape=TINY.shape + ",tie_word_embeddings=true"))
    assert flops_of_step(tied, TINY) == flops_of_step(build(TINY), TINY)


def test_only_the_experts_a_token_passes_count():
    moe = dataclasses.replace(
        TINY, model=PRESETS["qwen3-30b-a3b"].model,
        shape=SHAPE + ",num_key_value_heads=2,head_dim=16,num_experts=8,num_experts_per_tok=2,moe_intermediate_size=16",
    )  # fmt: skip
    every = dataclasses.replace(moe, shape=moe.shape.replace("num_experts_per_tok=2", "num_experts_per_tok=8"))
    model, all_of_them = build(moe), build(every)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    saved = flops_of_step(all_of_them, every) - flops_of_step(model, moe)
    assert saved == pytest.approx(6 * experts * 6 / 8 * 3 * 16)


def test_in_backward_does_not_clip_and_zerooffload_updates_after_backward():
    clipped, plain = variants(TINY, (), ("after-norm", "in-backward"), ())
    assert (clipped.max_grad_norm, plain.max_grad_norm) == (1.0, 0.0)
    both = variants(TINY, ("superoffload", "zerooffload"), ("after-norm", "in-backward"), ())
    assert [(r.mode, r.max_grad_norm) for r in both][2:] == [("zerooffload", 1.0)]
    with pytest.raises(RecipeError, match="after-norm"):
        variants(TINY, ("zerooffload",), ("in-backward",), ())


def test_every_format_that_is_asked_for_has_a_recipe():
    assert [r.states for r in variants(TINY, (), ("after-norm",), ("fp32", "bf16"))] == ["fp32", "bf16"]
    assert [r.states for r in variants(TINY, (), ("after-norm",), ())] == ["fp32"]


def test_results_lie_by_day_and_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cpu = torch.device("cpu")
    assert default_directory(cpu).parent.name == "bench-results"
    (tmp_path / "benchmarks").mkdir()
    assert default_directory(cpu).as_posix().startswith("benchmarks/results/20")
    assert default_directory(cpu).name.endswith("-cpu")


def test_exposed_is_what_the_step_takes_beyond_the_floor():
    row = Case(TINY, torch.device("cpu"), 2.0, 6e12, floor_s=1.5).row("penstock", 2.0)
    assert (row.exposed_s, row.tokens_per_s, row.model_tflops, row.matrix_tflops) == (0.5, 24.0, 3.0, 2.0)
    assert row.reference_tflops is None
    counted = Case(TINY, torch.device("cpu"), 2.0, 6e12, floor_s=1.5, reference_flops={"none": 8e12, "full": 9e12})
    assert counted.row("penstock", 2.0).reference_tflops == 4.0
    assert counted.row("deepspeed", 3.0, recompute="full").reference_tflops == 3.0
    failed = Case(TINY, torch.device("cpu"), 2.0, 6e12, floor_s=1.5).row("penstock", None, error="no")
    assert (failed.step_s, failed.exposed_s, failed.tokens_per_s, failed.floor_s) == (None, None, None, 1.5)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return bench(TINY, Asked(steps=2), to=str(tmp_path_factory.mktemp("to")), say=lambda _: None)


def test_rows_are_the_floor_and_each_variant(report):
    assert [(row.system, row.update, row.clip) for row in report.rows] == [
        ("floor", "", False),
        ("penstock", "after-norm", True),
        ("penstock", "in-backward", False),
    ]
    floor = report.rows[0].step_s
    assert all(row.floor_s == floor and 0 < row.step_s < 100 * floor for row in report.rows)
    assert {(row.batch, row.micro_batch, row.seq) for row in report.rows} == {(3, 2, 16)}
    assert all(math.isfinite(row.loss) for row in report.rows[1:])


def test_memory_is_told_by_place(report):
    weights = sum(p.nbytes for p in build(TINY).parameters())
    _, clipped, plain = (row.memory for row in report.rows)
    assert clipped.weights == weights
    assert clipped.resident + clipped.streamed + clipped.host_state == 2 * weights  # fp32 weights: two moments
    assert clipped.gradients == weights
    assert plain.gradients == weights, "with micro-batches, gradients add up before the last frees them"


@pytest.mark.slow
def test_without_micro_batches_in_backward_keeps_no_gradients(tmp_path):
    recipe = dataclasses.replace(TINY, micro_batch_size=0)
    found = bench(recipe, Asked(steps=1, updates=("in-backward",)), to=str(tmp_path), say=lambda _: None)
    assert found.rows[1].memory.gradients == 0


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_an_error(tmp_path, monkeypatch):
    from penstock.bench import run

    real = run._time_steps
    for loss, error in ((2.5, ""), (float("nan"), "the loss is nan")):
        monkeypatch.setattr(run, "_time_steps", lambda *args, loss=loss: (*real(*args)[:2], loss, []))
        row = bench(TINY, Asked(steps=1, updates=("after-norm",)), to=str(tmp_path), say=lambda _: None).rows[1]
        assert row.error == error


@pytest.mark.slow
def test_a_recipe_of_ours_that_fails_is_a_row_too(tmp_path, monkeypatch):
    from penstock.bench import run
    from penstock.errors import DoesNotFit

    class Full(run.NativeEngine):
        def __init__(self, *args, **kwargs):
            raise DoesNotFit("optimizer state needs 999 GiB", remedy="Buy some.")

    monkeypatch.setattr(run, "NativeEngine", Full)
    rows = bench(TINY, Asked(steps=1), to=str(tmp_path), say=lambda _: None).rows
    assert [row.error for row in rows] == ["", *["optimizer state needs 999 GiB"] * 2]
    assert "999 GiB" in (tmp_path / "table.txt").read_text()


@pytest.mark.slow
def test_a_timeline_has_every_lane_of_every_row(tmp_path):
    recipe = dataclasses.replace(TINY, homes="gpu=0.4,stream=0.3,host=0.3")
    bench(recipe, Asked(steps=1, timeline=True), to=str(tmp_path), say=lambda _: None)
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == ["after-norm", "in-backward"]
    for line in lines:
        assert {"in", "update", "out", "cpu", "forward", "backward", "wait"} <= {lane for lane, _, _ in line["spans"]}
        assert all(start <= end for _, start, end in line["spans"])


@pytest.mark.slow
def test_fp8_rows_have_a_floor_in_the_same_arithmetic(tmp_path):
    said = []
    asked = Asked(steps=1, updates=("after-norm",))
    shape = TINY.shape.replace("num_hidden_layers=2", "num_hidden_layers=4")
    found = bench(dataclasses.replace(TINY, shape=shape, matmul="fp8"), asked, to=str(tmp_path), say=said.append)
    assert [(row.system, row.matmul) for row in found.rows] == [("floor", "fp8"), ("penstock", "fp8")]
    assert sum("fp8: 14 linear layers" in line for line in said) == 2, "the floor's model and the step's"
    table = (tmp_path / "table.txt").read_text()
    assert "floor fp8" in table
    assert "penstock fp8" in table


@pytest.mark.slow
def test_deterministic_rows_are_measured_so_and_stand_apart(tmp_path, monkeypatch):
    from penstock.bench import run

    seen = []

    class Asks(run.NativeEngine):
        def __init__(self, *args, **kwargs):
            seen.append(torch.are_deterministic_algorithms_enabled())
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(run, "NativeEngine", Asks)
    asked = Asked(steps=1, updates=("after-norm",))
    for deterministic in (True, False):
        bench(dataclasses.replace(TINY, deterministic=deterministic), asked, to=str(tmp_path), say=lambda _: None)
    assert seen == [True, False]
    titles = [line for line in (tmp_path / "table.txt").read_text().splitlines() if " tokens" in line and ";" in line]
    assert [", deterministic" in title for title in titles] == [True, False]


def test_peers_have_no_fp8(capsys):
    from penstock.command.cli import main

    assert main(["bench", "llama-8b", "--matmul", "fp8", "--against", "torchao"]) == 2
    assert "peers compute in bf16" in capsys.readouterr().err
