"""The lowest evaluation loss: what is kept for it, when a run ends early, and that a kill changes neither."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from penstock.errors import RecipeError
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.report.metrics import EvalRow, Metrics
from penstock.run import train as training

TINY = "num_hidden_layers=1,hidden_size=16,intermediate_size=16,num_attention_heads=2,num_key_value_heads=1,head_dim=8"


def recipe(directory, **changes):
    """Its evaluation loss falls, and rises again once the learning rate has done its harm."""
    base = dataclasses.replace(
        PRESETS["demo"], init="random", shape=TINY, tokenizer="demo", dtype="fp32", data_percent=40.0, max_length=64,
        batch_size=2, max_steps=12, lr=0.7, warmup=0.5, schedule="constant", validation=0.2, eval_every=1, keep=1,
        prompt=None, log_every=100, output_dir=str(directory),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def run(directory, resume="", **changes):
    console = Console()
    with console.rich.capture() as capture:
        summary = training.train(recipe(directory, **changes), console, resume=resume)
    return summary, capture.get()


def evals(directory):
    return [json.loads(line) for line in (directory / "eval.jsonl").read_text().splitlines()]


def names(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, *run(directory, keep_best=True, patience=3)


def test_a_run_ends_when_patience_runs_out_and_keeps_its_best(whole):
    directory, summary, said = whole
    losses = [row["eval_loss"] for row in evals(directory)]
    best = losses.index(min(losses)) + 1
    assert 1 < best < 9, "the loss falls and rises"
    assert (summary.stopped_early, summary.steps) == (True, best + 3)
    assert (summary.best_step, summary.best_eval_loss) == (best, min(losses))
    assert summary.best_checkpoint == str(directory / "checkpoints" / f"step-{best:08}")
    assert names(directory) == [f"step-{best:08}", f"step-{best + 3:08}"]
    assert (directory / "model" / "config.json").exists(), "a run that ends early has ended"
    assert f"eval {best:>2}/12  loss {min(losses):7.4f}  the lowest so far" in said
    assert f"lowest {min(losses):.4f} at step {best}" in said


def test_the_summary_says_where_the_best_is(whole, capsys):
    _, summary, _ = whole
    Console().summary(summary)
    said = capsys.readouterr().out
    assert f"at the end, lowest {summary.best_eval_loss:.4f} at step {summary.best_step}" in said
    assert f"best in {summary.best_checkpoint}" in said
    assert "early: patience ran out" in said


@pytest.mark.slow
@pytest.mark.parametrize("save", [1, 3, 5, 7])
def test_killed_after_any_save_it_decides_the_same(whole, save, tmp_path, monkeypatch):
    """The best value and the count of patience follow from the rows, which are part of every checkpoint."""
    directory, summary, _ = whole
    saves, real = [], training.save_run

    def killed(*args):
        real(*args)
        saves.append(args[2])
        if len(saves) == save:
            raise SystemExit("killed")

    changes = {"keep_best": True, "patience": 3, "save_every": 1}
    monkeypatch.setattr(training, "save_run", killed)
    with pytest.raises(SystemExit, match="killed"):
        run(tmp_path / "run", **changes)
    monkeypatch.setattr(training, "save_run", real)
    again, _ = run(tmp_path / "run", resume="newest", **changes)
    assert evals(tmp_path / "run") == evals(directory)
    assert names(tmp_path / "run") == names(directory)
    place = "model/model.safetensors"
    old, new = load_file(directory / place), load_file(tmp_path / "run" / place)
    assert all(new[name].equal(weight) for name, weight in old.items())
    same = ("steps", "stopped_early", "best_step", "best_eval_loss", "eval_loss")
    assert [getattr(again, name) for name in same] == [getattr(summary, name) for name in same]


@pytest.mark.slow
def test_a_run_that_ended_early_has_nothing_left_to_do(whole, tmp_path):
    run(tmp_path / "run", keep_best=True, patience=3)
    before = names(tmp_path / "run")
    again, _ = run(tmp_path / "run", resume="newest", keep_best=True, patience=3)
    assert again.stopped_early
    assert names(tmp_path / "run") == before
    longer, _ = run(tmp_path / "run", resume="newest", keep_best=True, patience=0)
    assert (longer.stopped_early, longer.steps) == (False, 12), "with more patience it goes on"


def test_losses_that_are_not_finite_are_never_the_best(tmp_path):
    metrics = Metrics(tmp_path, on_row=print, device=torch.device("cpu"), write=False)
    for step, loss in enumerate([float("nan"), 2.0, 1.0, float("inf"), 1.0], start=1):
        metrics.add_eval(step, loss)
    assert metrics.best == EvalRow(3, 1.0)
    assert metrics.out_of_patience(2)
    assert not metrics.out_of_patience(3)
    assert not metrics.out_of_patience(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"patience": 2},
        {"keep_best": True},
        {"patience": -1},
        {"keep_best": True, "eval_every": 1, "validation": 0.1, "keep": 0},
        {"keep_best": True, "eval_every": 1, "validation": 0.1, "engine": "deepspeed"},
    ],
)
def test_what_they_need_is_said(changes):
    with pytest.raises(RecipeError, match=r"^(patience|keep_best) = "):
        Recipe(**changes)


def test_steps_that_epochs_do_not_have_are_said(tmp_path, capsys):
    from penstock.command.cli import main

    words = ["train", "demo", "--data-percent", "5", "--epochs", "1", "--max-steps", "40", "--dry-run"]
    assert main([*words, "--output-dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "1 epoch has 1 step, fewer than --max-steps 40; --epochs adds more" in said
    assert len(said.splitlines()) < 20, "what would happen, and no list of every default"
    assert "max_steps: 40" in said
    assert "betas" not in said
