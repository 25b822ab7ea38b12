"""Trackers, each with its real library where it is installed, and what happens when one fails."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading

import pytest

from penstock.command.cli import main
from penstock.errors import RecipeError
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.report.metrics import EvalRow, StepRow
from penstock.report.trackers import Trackers, check_installed, without_secrets
from penstock.run.train import train


def row(step, loss=1.0):
    return StepRow(step, loss, 1e-5, 0.5, 100, 50, 0.5, math.isnan(loss))


def scalars(directory):
    """Every scalar in the event files: {name: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.slow
def test_tensorboard_has_every_row_of_a_run_and_of_a_resumed_one(small_recipe, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    recipe = dataclasses.replace(
        small_recipe, output_dir=str(tmp_path / "run"), track="tensorboard", save_every=2, keep=3, prompt=None
    )
    train(recipe, Console(quiet=True))

    def check():
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        found = scalars(tmp_path / "run" / "tensorboard")
        assert found["train/loss"] == [(r["step"], pytest.approx(r["loss"], rel=1e-6)) for r in rows]
        assert [step for step, _ in found["train/lr"]] == [1, 2, 3, 4, 5]
        assert [step for step, _ in found["eval/loss"]] == [2, 4, 5]
        for name in ("model_tflops", "reference_tflops"):
            assert found[f"speed/{name}"] == [(r["step"], pytest.approx(r[name], rel=1e-6)) for r in rows]
        assert found["speed/tokens_per_s"][0][1] == pytest.approx(rows[0]["tokens"] / rows[0]["step_seconds"], rel=1e-6)

    check()
    train(recipe, Console(quiet=True), resume=str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    check()


def test_wandb_offline_has_project_name_tags_and_rows(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    code = """
import sys
from penstock.recipe.recipe import Recipe
from penstock.report.metrics import StepRow
from penstock.report.trackers import Trackers
recipe = Recipe(name="mine", output_dir=sys.argv[1], track="wandb", project="hydro", tags="one, two")
with Trackers(recipe, print, finish_seconds=60) as trackers:
    trackers.start()
    for step in (1, 2, 3):
        trackers.row(StepRow(step, 1 / step, 1e-5, 0.5, 100, 50, 0.5, False))
"""
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=env, timeout=120)
    assert "Warning" not in done.stdout, done.stdout
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    for word in (b"mine", b"hydro", b"two", b"train/loss"):
        assert word in file.read_bytes(), word
    assert env["WANDB_API_KEY"].encode() not in content


def test_trackio_has_project_name_and_rows(tmp_path):
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    code = """
import sys
from penstock.recipe.recipe import Recipe
from penstock.report.metrics import StepRow
from penstock.report.trackers import Trackers
recipe = Recipe(name="mine", output_dir=sys.argv[1], track="trackio", project="hydro", tags="one,two")
with Trackers(recipe, print, finish_seconds=60) as trackers:
    trackers.start()
    for step in (1, 2, 3):
        trackers.row(StepRow(step, 1 / step, 1e-5, 0.5, 100, 50, 0.5, False))
"""
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=env, timeout=120)
    assert "Warning" not in done.stdout, done.stdout
    content = b"".join(path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file())
    for word in (b"mine", b"train/loss", b"two"):
        assert word in content, word
    assert list((tmp_path / "trackio").rglob("hydro*")), "a database of the project"


class Fine:
    """Keeps what it is told."""

    def __init__(self, recipe):
        self.told = []
        type(self).last = self

    def log(self, step, values):
        self.told.append((step, values))

    def finish(self):
        self.told.append("end")


class FailsAtStart(Fine):
    def __init__(self, recipe):
        raise SystemExit(f"no key {os.environ['MY_TOKEN']}\nand more")


class FailsLater(Fine):
    def log(self, step, values):
        if step == 2:
            raise ConnectionError("gone")


class Hangs(Fine):
    def log(self, step, values):
        threading.Event().wait()


@pytest.mark.parametrize(
    ("broken", "warning"),
    [
        (FailsAtStart, "Warning: the run goes on without wandb: SystemExit: no key $MY_TOKEN"),
        (FailsLater, "Warning: the run goes on without wandb: ConnectionError: gone"),
        (Hangs, "Warning: wandb does not end; what it has not sent by now is lost to it"),
    ],
)
def test_one_that_fails_is_one_line_and_the_others_go_on(broken, warning, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "very-secret-value")
    said = []
    recipe = Recipe(track="tensorboard,wandb")
    kinds = {"tensorboard": Fine, "wandb": broken}
    with Trackers(recipe, said.append, kinds=kinds, finish_seconds=0.5) as trackers:
        trackers.start()
        for step in (1, 2, 3):
            trackers.row(row(step))
    assert said == [warning]
    assert [entry if entry == "end" else entry[0] for entry in Fine.last.told] == [1, 2, 3, "end"]


def test_one_that_is_not_installed_says_how_to_install_it(monkeypatch, tmp_path, capsys):
    """Before anything is loaded, by `--dry-run` too."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("penstock.run.train.load_engine", None)  # nothing is loaded
    words = ["train", "demo", "--track", "tensorboard,wandb", "--output-dir", str(tmp_path / "run")]
    for more in ([], ["--dry-run"]):
        assert main([*words, *more]) == 2
        said = capsys.readouterr().err
        assert "track = 'tensorboard,wandb': the package wandb is not installed" in said
        assert "pip install 'penstock-train[wandb]'" in said
        assert "pip install -c constraints.txt '.[wandb]'" in said
    assert not (tmp_path / "run").exists()


def test_a_directory_of_a_trackers_name_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    (tmp_path / "wandb").mkdir()
    with pytest.raises(RecipeError, match="the package wandb is not installed"):
        check_installed(Recipe(track="wandb"))


def test_a_resumed_run_is_told_from_its_first_step_and_nan_is_left_out():
    with Trackers(Recipe(track="wandb"), print, kinds={"wandb": Fine}) as trackers:
        trackers.start([row(1), row(2, math.nan)], [EvalRow(1, 0.3)])
        trackers.row(row(3))
    told = Fine.last.told[:-1]
    assert [step for step, _ in told] == [1, 1, 2, 3]
    assert told[1] == (1, {"eval/loss": 0.3})
    assert "train/loss" not in told[2][1]


@pytest.mark.parametrize(("field", "value"), [("track", "wandbb"), ("project", " ")])
def test_fields_are_checked(field, value):
    with pytest.raises(RecipeError, match=f"{field} = "):
        Recipe(**{field: value})


def test_secrets_are_cut_out_of_messages(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    assert without_secrets("denied: hf_abcdefgh") == "denied: $HF_TOKEN"
