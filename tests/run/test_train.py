"""A whole run, against a loop written by hand, and through what can go wrong in it."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.data.loader import Position
from penstock.errors import OutputError
from penstock.model.flops import token_flops
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.report.facts import Recorder
from penstock.run.preparation import dry_run, prepare_run
from penstock.run.progress import Progress
from penstock.run.train import lr_at, train

DEMO = PRESETS["demo"]


def quiet():
    return Console(quiet=True)


def losses_of(recipe):
    lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def plain_loop(recipe, steps):
    """Twenty steps as anyone would write them: one example at a time, no packing, torch's own AdamW."""
    run = prepare_run(recipe, quiet())
    directory = str(__import__("importlib.resources").resources.files("penstock.demo") / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps)
    loader, position, losses = run.data.train, Position(), []
    for step in range(steps):
        rows = loader._rows(position.epoch)[position.row : position.row + recipe.batch_size]
        examples = [loader.store.example(i) for r in rows for i in loader.packing.row(r)]
        trained = sum(int(mask[1:].sum()) for _, mask in examples)
        total = 0.0
        for ids, mask in examples:
            ids = torch.tensor(ids.astype("int64"))
            labels = ids.where(torch.tensor(mask.astype(bool)), -100)
            logits = model(input_ids=ids[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum") / trained
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        warmup_steps = round(recipe.warmup * steps)
        progress = (step - warmup_steps) / (steps - warmup_steps)
        factor = (step + 1) / warmup_steps if step < warmup_steps else 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        _, position = loader.step_at(position)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_twenty_steps_equal_a_plain_loop(tmp_path, packing):
    recipe = dataclasses.replace(
        DEMO, dtype="fp32", output_dir=str(tmp_path / "run"), packing=packing, batch_size=2 if packing else 6,
        max_length=128, micro_batch_size=0 if packing else 2, max_steps=20, lr=1e-3, warmup=0.2, prompt=None,
    )  # fmt: skip
    train(recipe, quiet())
    ours, theirs = losses_of(recipe), plain_loop(recipe, 20)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert sum(ours[-5:]) < sum(ours[:5]) - 1


def test_the_schedules():
    recipe = Recipe(lr=1.0, warmup=0.2)
    rates = [lr_at(recipe, step, 10) for step in range(1, 11)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert 0 < rates[-1] < 0.1
    linear = [lr_at(dataclasses.replace(recipe, schedule="linear"), step, 10) for step in range(3, 11)]
    assert linear == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert lr_at(dataclasses.replace(recipe, schedule="constant"), 10, 10) == 1.0
    assert lr_at(dataclasses.replace(recipe, warmup=1.0), 10, 10) == 1.0
    assert lr_at(dataclasses.replace(recipe, warmup=0.0), 1, 1) == 1.0


def test_a_run_is_not_written_over(tmp_path):
    recipe = dataclasses.replace(DEMO, output_dir=str(tmp_path / "run"), max_steps=1, data_percent=10.0, prompt=None)
    train(recipe, quiet())
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(OutputError, match="holds a run already"):
        train(recipe, quiet())
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    train(dataclasses.replace(recipe, max_steps=2), quiet(), overwrite=True)
    assert len(losses_of(recipe)) == 2


@pytest.mark.slow
def test_checkpoints_count_for_the_disk_where_they_stay(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(
        "penstock.run.preparation.check_room", lambda *_, keep_checkpoints, **__: kept.append(keep_checkpoints)
    )
    recipe = dataclasses.replace(DEMO, output_dir=str(tmp_path / "run"), max_steps=1, data_percent=10.0, prompt=None)
    train(recipe, quiet())
    kept.clear()
    (tmp_path / "run" / "train.log").write_text("of the shell")
    train(recipe, quiet(), resume="newest")
    dry_run(recipe, quiet(), resume="newest")
    assert kept == [True, True, True], "before the load, after it, and in a dry run"
    assert (tmp_path / "run" / "train.log").exists()
    (tmp_path / "run" / "train.log").unlink()
    train(recipe, quiet(), overwrite=True)
    assert kept[3:] == [False, False]


@pytest.mark.slow
def test_evaluation_is_written_and_summed_up(tmp_path):
    recipe = dataclasses.replace(
        DEMO, output_dir=str(tmp_path / "run"), max_steps=4, validation=0.2, eval_every=2, prompt=None
    )
    summary = train(recipe, quiet())
    evals = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evals] == [2, 4]
    assert summary.eval_loss == evals[-1]["eval_loss"] < evals[0]["eval_loss"]


def test_a_directory_that_the_first_rank_refuses_is_refused_by_all(ranks, tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    refused = ranks("refusing", 2, directory=str(tmp_path))
    assert refused[0] == refused[1]
    assert refused[0][0] == "OutputError"
    assert "thesis.txt" in refused[0][1]
    missing = ranks("refusing", 2, directory=str(tmp_path / "run"), resume=str(tmp_path / "none"))
    assert missing[0] == missing[1]
    assert missing[0][0] == "CheckpointError"


@pytest.mark.slow
def test_ranks_wait_for_the_one_that_writes_the_model_of_an_interrupted_run(ranks, tmp_path):
    assert ranks("interrupting", 2, directory=str(tmp_path / "run")) == [True, True]


@pytest.mark.slow
def test_time_left_counts_the_steps_from_where_a_run_goes_on(tmp_path, monkeypatch):
    """Over three epochs, each in its own order, with a smaller last step, and after a resume."""
    given = []

    class Noting(Progress):
        def __init__(self, recipe, total_steps, costs, console, plan=None):
            given.append(costs.tolist())
            super().__init__(recipe, total_steps, costs, console, plan)

    monkeypatch.setattr("penstock.run.train.Progress", Noting)
    recipe = dataclasses.replace(
        DEMO, output_dir=str(tmp_path / "run"), data_percent=10.0, packing=False, batch_size=10, micro_batch_size=2,
        epochs=3.0, save_every=5, keep=9, prompt=None,
    )  # fmt: skip
    train(recipe, quiet())
    loader, flops, steps = prepare_run(recipe, quiet()).data.train, flops_of_demo(), []
    position = Position()
    while position.epoch < 3:
        batches, position = loader.step_at(position)
        segments = np.concatenate([np.diff(batch.boundaries) for batch in batches])
        places = sum(batch.input_ids.numel() for batch in batches)
        steps.append(flops.products * places + flops.pair * flops.pairs(segments).sum())
    assert given[0] == pytest.approx(steps)
    assert max(steps) > 1.5 * min(steps)
    train(recipe, quiet(), resume=str(tmp_path / "run" / "checkpoints" / "step-00000005"))
    assert given[1] == given[0][5:]


def flops_of_demo():
    return token_flops(load_model(DEMO, load_config(DEMO), torch.device("cpu"), lambda _: None))


@pytest.mark.parametrize("part", ["close", "memory"])
def test_facts_that_cannot_be_written_do_not_cost_the_model(part, tmp_path, monkeypatch):
    def fail(self, *_):
        raise OSError("no facts today")

    monkeypatch.setattr(Recorder, part, fail)
    recipe = dataclasses.replace(
        DEMO, output_dir=str(tmp_path / "run"), max_steps=1, max_length=64, prompt=None, keep=0
    )
    console = Console()
    with console.rich.capture() as capture:
        train(recipe, console)
    assert "WARNING: the report will lack some facts (OSError: no facts today)" in capture.get()
    assert (tmp_path / "run" / "model" / "config.json").exists()
