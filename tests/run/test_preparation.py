"""What a run knows before its weights are loaded. Its checks are tried in test_cli.py, as a user meets them."""

import dataclasses
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.bench import this_machine as probe
from penstock.checkpoint.resume import Saved
from penstock.checkpoint.store import Checkpoint
from penstock.data.cost import TokenFlops
from penstock.data.loader import Position, prepare
from penstock.data.packing import one_a_row
from penstock.engine.native import NativeEngine
from penstock.engine.ranks import ALONE, World
from penstock.errors import DataError, DoesNotFit, RecipeError
from penstock.machine.known import H200
from penstock.machine.launched import TERMINAL
from penstock.model.load import load_model
from penstock.plan.report import make_plan
from penstock.recipe.presets import PRESETS
from penstock.report.console import Console
from penstock.run import preparation
from penstock.run.preparation import (
    Start,
    attended_by,
    check_same_data,
    dry_run,
    foresee_disk,
    planned,
    prepare_run,
    recipe_of_all,
    with_least,
)

DEMO = PRESETS["demo"]


def test_a_run_on_a_cpu_says_its_memory_and_no_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    run = prepare_run(dataclasses.replace(DEMO, device="cpu"), Console(quiet=True))
    monkeypatch.setattr(probe, "measure", None)  # a CPU is not measured
    _, plan = planned(run, Console(), ALONE)
    assert plan is not None
    assert plan.fits
    said = capsys.readouterr().out
    assert re.match(r"planned: [\d.]+ GB host; exact fp32 state", said), "memory, and no time"


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_a_token_attends_to_is_what_the_steps_cost(packing, compiled):
    """Of compiled layers with padding, which attends to itself; others do not compute any."""
    recipe = dataclasses.replace(DEMO, device="cpu", packing=packing, max_length=512, batch_size=1)
    run = prepare_run(recipe, Console(quiet=True))
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, compile=compiled))
    pairs_only = TokenFlops(0.0, 1.0, layers=1)
    rows = prepare(run.recipe, run.tokenizer, 10**6, lambda _: None, pairs_only).train
    tokens = rows.num_rows * 512 if compiled else rows.num_tokens
    pairs = rows.costs_from(Position(), rows.num_rows).sum()
    assert attended_by(run, 512) == pytest.approx(pairs / 2 / tokens)


@pytest.mark.parametrize(("lengths", "attended"), [([16, 16, 16], 0.0), ([16, 16, 15], (2 * 16**2 + 15**2 + 1) / 96)])
def test_only_rows_that_one_example_fills_are_planned_as_rows(lengths, attended):
    rows = SimpleNamespace(
        store=SimpleNamespace(lengths=np.array(lengths)), packing=one_a_row(np.arange(3)), num_rows=3
    )
    recipe = dataclasses.replace(DEMO, max_length=16, compile=True)
    assert attended_by(SimpleNamespace(recipe=recipe, data=SimpleNamespace(train=rows)), 16) == pytest.approx(attended)


def test_the_plan_of_a_run_is_of_its_examples(tmp_path, monkeypatch, capsys):
    """Rows of 131,072 tokens with many short examples take a third of the seconds of one example each."""
    (tmp_path / "short.jsonl").write_text((json.dumps({"text": "the river " * 900}) + "\n") * 144)
    llama = dataclasses.replace(PRESETS["llama-8b"], **TINY | {"shape": "num_hidden_layers=8,vocab_size=2048"})
    llama = dataclasses.replace(llama, data=str(tmp_path / "short.jsonl"), data_percent=100)
    llama = dataclasses.replace(llama, max_length=131_072, batch_size=1)
    run = prepare_run(dataclasses.replace(llama, device="cpu"), Console(quiet=True))
    recipe = dataclasses.replace(run.recipe, device="auto", compile=True)
    monkeypatch.setattr(preparation, "this_machine", lambda **_: H200)
    _, plan = planned(dataclasses.replace(run, device=torch.device("cuda"), recipe=recipe), Console(), ALONE)
    assert run.data.train.num_tokens > 131_072
    assert plan.seconds.step < 0.4 * make_plan(dataclasses.replace(recipe, recompute="full"), H200).seconds.step
    assert f"{plan.seconds.step:.3g} s a step" in capsys.readouterr().out


class SecondOfTwo(World):
    """A rank of another machine, whose first rank was told nothing but the defaults."""

    def share(self, make):
        return DEMO


def test_settings_of_another_machine_that_do_not_hold_are_said(monkeypatch, tmp_path):
    with open(tmp_path / "said", "wb") as said:
        monkeypatch.setenv(TERMINAL, str(said.fileno()))
        assert recipe_of_all(DEMO, SecondOfTwo(1, 2, 0, 1)) == DEMO
        recipe_of_all(dataclasses.replace(DEMO, lr=0.5), SecondOfTwo(2, 3, 1, 2))  # not its first
        assert not (tmp_path / "said").read_text()
        assert recipe_of_all(dataclasses.replace(DEMO, lr=0.5), SecondOfTwo(1, 2, 0, 1)) == DEMO
    assert f"not what was set here: lr = 0.5 (there {DEMO.lr})\n" in (tmp_path / "said").read_text()


class AmongOthers(World):
    """A rank that hears of another machine with a smaller GPU, and of a third with less memory."""

    def gather(self, mine):
        return [mine, (8, 1000), (100, 10)]


def test_what_is_chosen_for_all_ranks_fits_the_smallest(monkeypatch):
    own = dataclasses.replace(H200, gpu_bytes=100, host_bytes=1000)
    monkeypatch.setattr(preparation, "unmeasured_machine", lambda device: own)
    found = with_least(H200, torch.device("cpu"), AmongOthers(0, 3, 0, 1))
    assert (found.gpu_bytes, found.host_bytes) == (8, 10)
    assert found.matrix_flops_per_s == H200.matrix_flops_per_s
    assert with_least(H200, torch.device("cpu"), ALONE) is H200


def test_parked_inputs_of_every_nth_layer_need_n_layers():
    with pytest.raises(RecipeError, match=r"inputs = parked:99: the model has 4 layers\n  Use parked:4"):
        prepare_run(dataclasses.replace(DEMO, order="layers", inputs="parked:99"), Console(quiet=True))


TINY = {
    "init": "random", "tokenizer": "demo", "data": "demo", "max_length": 64,
    "shape": "num_hidden_layers=1,hidden_size=32,intermediate_size=48,vocab_size=2048,num_attention_heads=4,"
    "num_key_value_heads=2",
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("states", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [DEMO, dataclasses.replace(PRESETS["qwen3-14b"], **TINY)], ids=["tied", "untied"])
def test_what_a_run_will_write_is_known_before(recipe, states, dtype, monkeypatch):
    run = prepare_run(dataclasses.replace(recipe, states=states, dtype=dtype), Console(quiet=True))
    engine = NativeEngine(load_model(run.recipe, run.config, run.device, print), run.recipe, print)
    sizes = {group: sum(t.num_bytes for t in tensors) for group, tensors in engine.saved_tensors().items()}
    engine.release()
    foreseen = []
    monkeypatch.setattr(preparation, "check_disk", lambda _run, _first, *found: foreseen.append(found))
    foresee_disk(run, 1)
    ((checkpoint_bytes, weight_bytes),) = foreseen
    assert weight_bytes == sizes["weights"]
    assert 0 <= sum(sizes.values()) - checkpoint_bytes < 100, "only the count of steps and its like are not foreseen"


def test_a_dry_run_looks_at_the_disk(tmp_path):
    """Petabytes of weights and state: no disk has room for them."""
    shape = f"num_hidden_layers=1,hidden_size={2**20},intermediate_size={2**26}"
    huge = dataclasses.replace(PRESETS["llama-8b"], **TINY | {"shape": shape}, output_dir=str(tmp_path / "not/there"))
    with pytest.raises(DoesNotFit, match=r"of disk, .* are free"):
        dry_run(huge, Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_several_ranks_plans_nothing_for_one(capsys):
    for num_ranks, says in ((1, True), (2, False)):
        dry_run(dataclasses.replace(DEMO, device="cpu"), Console(), num_ranks=num_ranks)
        assert ("planned: " in capsys.readouterr().out) == says


@pytest.mark.parametrize(
    ("num_ranks", "ranks_here", "changes", "said"),
    [
        (2, 0, {}, "2 ranks: each takes 2 of the 4 rows of a step, 2 at once, and holds 1/2 of weights and"),
        (
            3,
            3,
            {"micro_batch_size": 1},
            "3 ranks: each takes up to 2 of the 4 rows of a step, 1 at once, and holds 1/3",
        ),
        (4, 2, {}, "4 ranks, 2 on each machine: each takes 1 of the 4 rows of a step, 1 at once"),
        (1, 1, {}, ""),
    ],
)
def test_a_dry_run_says_what_each_rank_would_do(num_ranks, ranks_here, changes, said, capsys):
    recipe = dataclasses.replace(DEMO, device="cpu", **changes)
    outlook = dry_run(recipe, Console(), num_ranks=num_ranks, ranks_here=ranks_here)
    told = " ".join(capsys.readouterr().out.split())
    assert said in told
    assert ("ranks" in told) == (num_ranks > 1)
    times = f"{num_ranks} x " if num_ranks > 1 else ""
    assert f"on {times}CPU, " in told
    assert outlook.device.startswith(f"{times}CPU")
    assert (outlook.ranks, outlook.rows_of_rank) == (num_ranks, -(-4 // num_ranks))


def test_a_dry_run_wants_a_row_and_a_gpu_for_each_rank(monkeypatch):
    with pytest.raises(RecipeError, match="5 ranks need a row each"):
        dry_run(dataclasses.replace(DEMO, device="cpu"), Console(quiet=True), num_ranks=5)
    monkeypatch.setattr(preparation, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RecipeError, match="2 ranks on this machine, and torch sees 1 GPU"):
        dry_run(DEMO, Console(quiet=True), num_ranks=2, ranks_here=2)


@pytest.mark.parametrize(("ranks_here", "shared"), [(0, 4), (2, 2)])
def test_a_dry_run_of_several_machines_shares_each_host_among_its_own_ranks(ranks_here, shared, monkeypatch):
    seen = []
    monkeypatch.setattr(preparation, "with_length", lambda recipe, *others: seen.append(others) or recipe)
    dry_run(dataclasses.replace(DEMO, device="cpu"), Console(quiet=True), num_ranks=4, ranks_here=ranks_here)
    assert [machine.gpus_per_host for _, _, machine, *_ in seen] == [shared]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_dry_run_refuses_more_layers_than_there_are(num_ranks):
    with pytest.raises(RecipeError, match="the model has 4 layers"):
        dry_run(dataclasses.replace(DEMO, device="cpu", weights="99"), Console(quiet=True), num_ranks=num_ranks)


def test_a_run_starts_after_what_was_saved_and_within_its_data():
    run = prepare_run(DEMO, Console(quiet=True))
    assert (Start(run, None, None).first_step, Start(run, None, None).position) == (1, Position())
    checkpoint, rows = Checkpoint(Path("step-4"), 4, {}), run.data.train.num_rows
    for row, expected in [(rows - 1, Position(2, rows - 1)), (rows, Position(3, 0))]:
        start = Start(run, None, Saved(checkpoint, Position(2, row), {}, 9, "", "", "", {}))
        assert (start.first_step, start.position) == (5, expected)


def test_the_engine_gets_words_where_layers_are_computed_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "measure", None)
    run = prepare_run(dataclasses.replace(DEMO, device="cpu", weights="streamed"), Console(quiet=True))
    chosen, plan = planned(run, Console(quiet=True), ALONE)
    recipe = chosen.recipe
    assert (recipe.weights, recipe.order, recipe.inputs, recipe.recompute) == ("streamed", "layers", "kept", "full")
    assert plan.settings.by_layer
    as_it_was = prepare_run(dataclasses.replace(DEMO, device="cpu"), Console(quiet=True))
    recipe = planned(as_it_was, Console(quiet=True), ALONE)[0].recipe
    assert (recipe.weights, recipe.order, recipe.inputs, recipe.recompute) == ("auto", "auto", "auto", "none")


@pytest.mark.parametrize("change", [{"order": "layers"}, {"weights": "2", "inputs": "parked"}])
def test_several_gpus_compute_no_layers_one_by_one(change, monkeypatch):
    two = dataclasses.replace(ALONE, size=2)
    monkeypatch.setattr(preparation, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(type(two), "pick", lambda self, device: device)
    with pytest.raises(RecipeError, match="on one GPU"):
        prepare_run(dataclasses.replace(DEMO, **change), Console(quiet=True), two)


@pytest.mark.parametrize(
    ("changes", "where"), [({"weights": "99"}, "weights = 99"), ({"gpu_memory": "24GB"}, "gpu_memory = 24GB")]
)
def test_a_dry_run_refuses_what_training_would(tmp_path, changes, where):
    recipe = dataclasses.replace(PRESETS["demo"], output_dir=str(tmp_path), device="cpu", **changes)
    with pytest.raises(RecipeError, match=where):
        dry_run(recipe, Console(quiet=True))


def test_a_dry_run_for_several_ranks_refuses_what_they_would(tmp_path):
    recipe = dataclasses.replace(PRESETS["demo"], output_dir=str(tmp_path), device="cpu", order="layers")
    with pytest.raises(RecipeError, match="on one GPU"):
        dry_run(recipe, Console(quiet=True), num_ranks=2)


@pytest.mark.parametrize(("fingerprint", "steps"), [("a", 12), ("b", 12), ("a", 6)])
def test_machines_that_have_read_other_data_are_refused(fingerprint, steps):
    """As the second of two ranks, with what the first one has read."""
    world = SimpleNamespace(rank=1, share=lambda make: ("node-0", "a", 12), largest=lambda number: number)
    recipe = dataclasses.replace(DEMO, data="my.jsonl")
    refused = pytest.raises(
        DataError, match=r"my.jsonl: rank 1 has read other data than rank 0 on node-0\n.*same files"
    )
    with nullcontext() if (fingerprint, steps) == ("a", 12) else refused:
        check_same_data(recipe, fingerprint, steps, world)
