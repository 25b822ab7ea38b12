"""Words of a command line, and what they become."""

import dataclasses
import shlex

import pytest

from penstock.command.arguments import (
    BenchArgs,
    DataArgs,
    PlanArgs,
    TrainArgs,
    parse_with_recipe,
    with_value,
    without_local_rank,
)
from penstock.command.cli import main
from penstock.recipe.file import find_recipe, for_model
from penstock.recipe.presets import PRESETS


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ([], 10.0),
        (["--data", "mine.jsonl"], 100.0),
        (["--data=mine.jsonl"], 100.0),
        (["--data", "mine.jsonl", "--data-percent", "10"], 10.0),
    ],
)
def test_presets_take_a_tenth_of_their_own_data_and_all_of_yours(words, share, tmp_path):
    args = parse_with_recipe(DataArgs, "data", ["llama-8b", *words]).args
    assert args.recipe.data_percent == share
    path = tmp_path / "mine.yaml"
    path.write_text("preset: llama-8b\n" + "".join(f"{w.lstrip('-').replace('=', ': ')}\n" for w in words if "=" in w))
    assert find_recipe(str(path)).recipe.data_percent == (100.0 if any("=" in w for w in words) else 10.0)


def test_a_share_that_a_file_chose_stays_for_other_data(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, share in (("data_percent: 10", 10.0), ("lr: 2e-5", 100.0)):
        path.write_text(f"preset: llama-8b\n{text}\n")
        assert parse_with_recipe(DataArgs, "data", [str(path), "--data", "x.jsonl"]).args.recipe.data_percent == share


@pytest.mark.parametrize("words", [[], ["--max-steps", "3"], ["--model", "demo"], ["--data=demo"]])
def test_without_a_recipe_and_a_model_it_is_the_demo(words):
    args = parse_with_recipe(TrainArgs, "train", words).args
    assert dataclasses.replace(args.recipe, max_steps=0) == PRESETS["demo"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--model", "Qwen/Qwen3-8B"], "Qwen3-8B"),
        (["--model=Qwen/Qwen3-8B"], "Qwen3-8B"),
        (["--model", "some/where/mine/"], "mine"),
        (["--model", "some/model.gguf"], "model"),
        (["--model", "Qwen/Qwen3-8B", "--name", "first"], "first"),
    ],
)
@pytest.mark.parametrize("kind", [TrainArgs, DataArgs, PlanArgs, BenchArgs])
def test_a_model_without_a_preset_has_defaults_that_do_no_harm(kind, words, name):
    parsed = parse_with_recipe(kind, "train", [*words, "--data", "my.jsonl"])
    recipe = parsed.args.recipe
    assert (recipe.lr, recipe.epochs, recipe.warmup, recipe.max_length) == (1e-5, 1.0, 0.05, 0)
    assert (recipe.name, recipe.prompt, recipe.data_percent, parsed.note) == (name, None, 100.0, "")


def test_the_directory_that_one_stands_in_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert for_model(".").name == "mine"


def test_a_file_with_a_model_and_no_preset_has_the_same_defaults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: Qwen/Qwen3-8B\ndata: my.jsonl\n")
    recipe = find_recipe(str(path)).recipe
    assert recipe == dataclasses.replace(for_model("Qwen/Qwen3-8B"), name="mine", data="my.jsonl")


@pytest.mark.parametrize("as_file", [False, True])
def test_a_model_beside_a_preset_says_what_is_borrowed(as_file, tmp_path):
    words = ["demo", "--model", "Qwen/Qwen3-8B", "--lr", "1e-5"]
    if as_file:
        words = [str(tmp_path / "mine.yaml")]
        (tmp_path / "mine.yaml").write_text("preset: demo\nmodel: Qwen/Qwen3-8B\nlr: 1e-5\nname: demo\n")
    assert parse_with_recipe(TrainArgs, "train", words).note == (
        "Qwen/Qwen3-8B with the settings of the preset demo: name demo, data demo, data_percent 100, max_length 256, "
        "batch_size 4, epochs 8, warmup 0.05, prompt What is the capital of Italy?"
    )
    assert parse_with_recipe(TrainArgs, "train", ["llama-8b", "--lr", "1e-4"]).note == ""


@pytest.mark.parametrize("flag", ["--offload-ratio=0.5", "--bucket-size=5", "--offload_ratio=0.5"])
def test_what_only_deepspeed_reads_is_refused_of_the_command_line_alone(flag, capsys):
    """Presets have its values, and so has the recipe that a run of ours leaves behind."""
    assert main(["train", "llama-8b", flag, "--dry-run"]) == 2
    name = flag.partition("=")[0].replace("_", "-")
    assert f"{name}: only the engine deepspeed knows it" in capsys.readouterr().err
    args = parse_with_recipe(TrainArgs, "train", ["llama-8b", flag, "--engine", "deepspeed"]).args
    assert 0.5 in (args.recipe.offload_ratio, args.recipe.bucket_size / 10)


@pytest.mark.parametrize("command", ["train", "data", "bench", "plan"])
def test_a_recipe_after_flags_is_told_where_it_belongs(command, capsys):
    for flags, rest in (
        (["--lr", "1e-5"], []),
        (["--no-packing"], ["--json"]),
        (["--lr=1e-5"], ["--data", "my set.jsonl"]),
    ):
        for recipe in ("llama-70b", "mine.yaml"):
            assert main([command, *flags, recipe, *rest]) == 2
            said = capsys.readouterr().err
            assert f"{recipe}: a preset or a recipe's file comes before all flags" in said
            assert said.splitlines()[-1].strip() == shlex.join(["penstock", command, recipe, *flags, *rest])


@pytest.mark.parametrize("words", [["--model", "demo"], ["--json", "--name", "llama-8b"], ["--data", "demo"]])
def test_the_value_of_a_flag_is_no_recipe(words):
    assert parse_with_recipe(TrainArgs, "train", words).args.recipe.model == "demo"


@pytest.mark.parametrize(
    ("words", "filled"),
    [
        ([], []),
        (["demo", "--resume"], ["demo", "--resume", "newest"]),
        (["demo", "--resume", "--lr", "1"], ["demo", "--resume", "newest", "--lr", "1"]),
        (["demo", "--resume", "some/path", "--json"], ["demo", "--resume", "some/path", "--json"]),
        (["demo", "--resume=some/path"], ["demo", "--resume=some/path"]),
    ],
)
def test_resume_stands_alone_or_with_a_path(words, filled):
    assert with_value(words, "--resume", "newest") == filled


@pytest.mark.parametrize("words", [["--resume", ""], ["--resume="], ["--resume", "", "--quiet"]])
def test_an_empty_variable_is_no_checkpoint_and_does_not_begin_anew(words, capsys):
    assert main(["train", "demo", *words]) == 2
    assert "--resume: its value is empty\n  Name a checkpoint, or give --resume alone" in capsys.readouterr().err


def test_a_launchers_local_rank_is_no_flag_of_ours():
    words = ["--local_rank=1", "train", "demo", "--lr", "1e-5"]
    assert without_local_rank(words, {"LOCAL_RANK": "1"}) == words[1:]
    assert without_local_rank(words, {}) == words, "without a launcher it is a mistake"
