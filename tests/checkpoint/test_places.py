"""A run, a checkpoint or a model: `export` and `generate` take each, and refuse anything else at once."""

import dataclasses
import json
import os
import stat
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from penstock.checkpoint.places import find_place
from penstock.command.cli import main
from penstock.errors import RecipeError
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


@pytest.mark.parametrize("command", ["generate", "export --verify", "report"])
def test_it_is_refused_before_torch_is_imported(command, tmp_path):
    code = "import sys; from penstock.command.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [*command.split(), "typo"]
    result = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == ["2", "False"], result.stderr


def test_a_model_has_no_checksums_to_verify(run, capsys):
    assert main(["export", str(run / "model"), "--verify"]) == 2
    assert "has no checksums" in capsys.readouterr().err


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


def test_who_may_read_the_users_files_may_read_the_model(run, tmp_path):
    before = os.umask(0o027)
    try:
        assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {0o640}
