"""A run, a checkpoint or a model: `export` and `generate` take each, and refuse anything else at once."""

import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from penstock.checkpoint import export
from penstock.checkpoint.lock import claim
from penstock.checkpoint.places import NEWEST, check_is_run, find_place, resume_advice
from penstock.checkpoint.store import remove
from penstock.checkpoint.sums import SUMS
from penstock.command.cli import main
from penstock.errors import RecipeError
from penstock.machine.launch import _report
from penstock.recipe.presets import PRESETS
from penstock.report.console import Console
from penstock.run.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("places") / "run"
    demo = dataclasses.replace(PRESETS["demo"], dtype="fp32", prompt=None, output_dir=str(directory))
    train(dataclasses.replace(demo, max_steps=2, save_every=1, batch_size=1), Console(quiet=True))
    return directory


def answered(path, capsys):
    assert main(["generate", str(path), "What is the capital of Italy?", "--max-new-tokens", "6", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["answer"]


def test_each_is_known_by_its_files(run):
    assert find_place(run).kind == "run"
    assert find_place(run / "checkpoints" / "step-00000001").kind == "checkpoint"
    assert find_place(run / "model").kind == "model"


def test_a_misspelt_name_is_answered_with_the_nearest(run):
    with pytest.raises(RecipeError, match=r"there is no such directory\n  Did you mean .*/run\?"):
        find_place(run.with_name("runn"))
    with pytest.raises(RecipeError, match=r"Did you mean .*step-00000002"):
        find_place(run / "checkpoints" / "step-0000002")


def test_a_file_is_not_said_to_be_missing(tmp_path):
    path = tmp_path / "my.jsonl"
    path.touch()
    for find in (find_place, check_is_run):
        with pytest.raises(RecipeError, match="is a file, not a directory"):
            find(path)


@pytest.mark.parametrize("command", ["generate", "export --verify", "report"])
def test_it_is_refused_before_torch_is_imported(command, tmp_path):
    code = "import sys; from penstock.command.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [*command.split(), "typo"]
    result = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == ["2", "False"], result.stderr


def test_a_model_of_others_has_no_checksums_to_verify(run, tmp_path, capsys):
    assert main(["export", str(run / "model"), "--verify"]) == 0
    assert "as it was written: the model" in capsys.readouterr().out
    shutil.copytree(run / "model", tmp_path / "model", ignore=shutil.ignore_patterns(SUMS))
    assert main(["export", str(tmp_path / "model"), "--verify"]) == 2
    assert "is a model without checksums" in capsys.readouterr().err


@pytest.mark.slow
def test_any_checkpoint_and_any_model_can_be_asked(run, capsys):
    final = answered(run, capsys)
    assert answered(run / "checkpoints" / "step-00000002", capsys) == final
    assert answered(run / "model", capsys) == final


@pytest.mark.slow
def test_any_checkpoint_and_any_model_can_be_exported(run, tmp_path, capsys):
    first, last, copy = tmp_path / "first", tmp_path / "last", tmp_path / "copy"
    for path, to in (("checkpoints/step-00000001", first), ("checkpoints/step-00000002", last), ("model", copy)):
        assert main(["export", str(run / path), "--to", str(to)]) == 0
    final = load_file(run / "model" / "model.safetensors")
    assert all(load_file(last / "model.safetensors")[name].equal(weight) for name, weight in final.items())
    assert all(load_file(copy / "model.safetensors")[name].equal(weight) for name, weight in final.items())
    assert not all(load_file(first / "model.safetensors")[name].equal(weight) for name, weight in final.items())
    assert main(["export", str(run / "checkpoints" / "step-00000001"), "--verify"]) == 0
    assert "1 checkpoint" in capsys.readouterr().out


def test_a_place_for_a_model_is_looked_at_before_all_else(run, capsys, monkeypatch):
    monkeypatch.chdir(run)
    for place in (".", "model"):
        assert main(["export", ".", "--to", place]) == 2
        assert f"{place}: there is something already\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("not-mounted", "is a link to nowhere, which is not there"),
        ("not-mounted/model", "is a link to nowhere, which is not there"),
        ("loop", "can be no directory (Too many levels of symbolic links)"),
    ],
)
def test_a_place_where_no_model_can_be_is_refused_before_one_is_loaded(run, tmp_path, capsys, monkeypatch, place, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "not-mounted").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    assert main(["export", str(run), "--to", place]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"penstock: {place.partition('/')[0]}: {what}\n  ")
    assert said.err.endswith("ame another place with --to.\n")
    assert {path.name for path in tmp_path.iterdir()} == {"not-mounted", "loop"}


@pytest.mark.parametrize("name", ["model", "model.unchecked"])
def test_where_a_run_that_is_going_on_will_write_its_model_nothing_is_exported(run, tmp_path, capsys, name):
    going = tmp_path / "going"
    with claim(going):
        assert main(["export", str(run), "--to", str(going / name)]) == 2
        assert f"{name}: a run that is going on will write its model there\n" in capsys.readouterr().err
        assert [path.name for path in going.iterdir()] == ["lock"]


@pytest.mark.slow
def test_a_run_finds_its_model_from_another_directory(run, tmp_path, monkeypatch):
    """It was named from where the command ran."""
    shutil.copytree(run / "model", tmp_path / "base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["demo", "--model", "./base", "--tokenizer", "base", "--max-steps", "1", "--save-every", "1"]
    assert main(["train", *words, "--output-dir", "run", "--prompt", "None", "--data-percent", "10"]) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["export", "../run", "--to", "exported"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "--output-dir", "run", "--prompt", "None", "--data-percent", "10", "--resume"]) == 0


def test_who_may_read_the_users_files_may_read_the_model(run, tmp_path):
    before = os.umask(0o027)
    try:
        assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {0o640}


def test_how_a_run_whose_rank_died_goes_on_is_told_by_what_it_has_saved(tmp_path, capsys):
    def said():
        _report([-signal.SIGKILL], tmp_path, ["train"], lambda: resume_advice(tmp_path), first_rank=0)
        return capsys.readouterr().err

    assert f"There is no checkpoint in {tmp_path} yet: the same command with --resume begins again." in said()
    assert "the same command with --overwrite goes on from other/run again." in resume_advice(tmp_path, "other/run")
    assert resume_advice(tmp_path, NEWEST) == resume_advice(tmp_path)
    half = tmp_path / "checkpoints" / ".saving-step-00000002"
    half.mkdir(parents=True)
    (half / "manifest.json").touch()
    assert "There is no checkpoint" in said()
    half.rename(half.with_name("step-00000002"))
    assert "The same command with --resume goes on from the newest checkpoint." in said()
    advice = resume_advice(tmp_path, "other/run")
    assert advice == "The same command goes on with --resume alone; other/run would take it back there."


def test_of_a_run_that_is_going_on_its_newest_checkpoint_is_taken_and_that_is_said(run, tmp_path, capsys):
    going = tmp_path / "going"
    shutil.copytree(run, going, ignore=shutil.ignore_patterns("model"))
    with claim(going):
        assert main(["export", str(going), "--to", str(tmp_path / "out")]) == 0
        assert "The run is still going on: taking the model of step 2, its newest" in capsys.readouterr().out
        shutil.rmtree(going / "checkpoints")
        assert main(["export", str(going), "--to", str(tmp_path / "none")]) == 5
        assert "still going on and has saved nothing yet\n  Wait for its first checkpoint." in capsys.readouterr().err
    assert main(["export", str(going), "--to", str(tmp_path / "none")]) == 5
    assert "it did not end\n  It left no checkpoint either" in capsys.readouterr().err
    assert main(["export", str(run / "checkpoints" / "step-00000001"), "--to", str(tmp_path / "first")]) == 0
    assert "going on" not in capsys.readouterr().out


@pytest.mark.parametrize("at", ["verify_saved", "read_tensors"])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_called_damaged(run, tmp_path, capsys, monkeypatch, at):
    going, real = tmp_path / "going", getattr(export, at)
    shutil.copytree(run, going, ignore=shutil.ignore_patterns("model"))

    def too_late(*args, **kwargs):
        remove(going / "checkpoints" / "step-00000002")
        real(*args, **kwargs)

    monkeypatch.setattr(export, at, too_late)
    assert main(["export", str(going), "--to", str(tmp_path / "out")]) == 5
    said = capsys.readouterr().err
    assert "step-00000002: was removed while it was read" in said
    assert f"Give the command again with {going}: " in said


@pytest.mark.parametrize("at", ["open_checkpoint", "verify"])
def test_what_the_run_removes_while_all_is_verified_is_passed_over(run, tmp_path, capsys, monkeypatch, at):
    going, real = tmp_path / "going", getattr(export, at)
    shutil.copytree(run, going, ignore=shutil.ignore_patterns("model"))
    first = going / "checkpoints" / "step-00000001"

    def too_late(found, *args):
        if first in (found, getattr(found, "path", None)):
            remove(first)
        return real(found, *args)

    monkeypatch.setattr(export, at, too_late)
    assert main(["export", str(going), "--verify"]) == 0
    said = capsys.readouterr()
    assert "step-00000001: was removed while it was read" in said.out
    assert ("Every byte is as it was written: 1 checkpoint" in said.out, said.err) == (True, "")
