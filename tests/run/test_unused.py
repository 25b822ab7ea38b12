"""What is said of settings that change nothing."""

import dataclasses

import pytest

from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.run.preparation import prepare_run
from penstock.run.unused import unused


@pytest.fixture
def _places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.jsonl").touch()


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"tags": "a"}, "tags a changes nothing: only wandb and trackio have tags"),
        ({"tags": "a", "track": "tensorboard"}, "tags a changes nothing"),
        ({"tags": "a", "track": "wandb"}, ""),
        ({"project": "mine"}, "project mine changes nothing"),
        ({"project": "mine", "track": "trackio,tensorboard"}, ""),
        ({"data": "a.jsonl", "data_split": "test"}, "data_split test changes nothing: a file has no splits"),
        ({"data": "demo", "eval_split": "dev"}, "eval_split dev changes nothing"),
        ({"data": "folder", "data_split": "test"}, ""),
        ({"data": "owner/name:en", "data_split": "test"}, ""),
        ({"data": "a.jsonl", "eval_data": "owner/name", "eval_split": "dev"}, ""),
        ({"data": "a.jsonl:0.5,folder:0.5", "eval_split": "dev"}, ""),
        ({"data": "folder", "data_stream": True}, "data_stream True changes nothing: only data sets of the Hub"),
        ({"data": "owner/name", "data_stream": True}, ""),
        ({"model": "demo", "revision": "v2"}, "revision v2 changes nothing: the demo model has no revisions"),
        ({"model": "folder", "revision": "v2"}, "a model on a disk has no revisions"),
        ({"model": "owner/name", "revision": "v2"}, ""),
    ],
)
@pytest.mark.usefixtures("_places")
def test_what_changes_nothing(chosen, says):
    lines = unused(Recipe(**chosen))
    assert len(lines) == bool(says)
    assert says in "".join(lines)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_choose_nothing_that_changes_nothing(name):
    assert unused(PRESETS[name]) == []


def test_it_is_said_before_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    prepare_run(dataclasses.replace(PRESETS["demo"], device="cpu", tags="a"), Console())
    assert "WARNING: tags a changes nothing" in capsys.readouterr().out
