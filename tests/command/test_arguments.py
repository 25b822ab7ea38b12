"""Words of a command line, and what they become."""

import pytest

from penstock.command.arguments import DataArgs, parse_with_recipe, with_value, without_local_rank
from penstock.recipe.file import find_recipe


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
    args = parse_with_recipe(DataArgs, "data", ["llama-8b", *words])
    assert args.recipe.data_percent == share
    path = tmp_path / "mine.yaml"
    path.write_text("preset: llama-8b\n" + "".join(f"{w.lstrip('-').replace('=', ': ')}\n" for w in words if "=" in w))
    assert find_recipe(str(path))[0].data_percent == (100.0 if any("=" in w for w in words) else 10.0)


def test_a_share_that_a_file_chose_stays_for_other_data(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, share in (("data_percent: 10", 10.0), ("lr: 2e-5", 100.0)):
        path.write_text(f"preset: llama-8b\n{text}\n")
        assert parse_with_recipe(DataArgs, "data", [str(path), "--data", "x.jsonl"]).recipe.data_percent == share


@pytest.mark.parametrize(
    ("words", "filled"),
    [
        (["demo", "--resume"], ["demo", "--resume", "newest"]),
        (["demo", "--resume", "--lr", "1"], ["demo", "--resume", "newest", "--lr", "1"]),
        (["demo", "--resume", "some/path", "--json"], ["demo", "--resume", "some/path", "--json"]),
        (["demo", "--resume=some/path"], ["demo", "--resume=some/path"]),
    ],
)
def test_resume_stands_alone_or_with_a_path(words, filled):
    assert with_value(words, "--resume", "newest") == filled


def test_a_launchers_local_rank_is_no_flag_of_ours():
    words = ["--local_rank=1", "train", "demo", "--lr", "1e-5"]
    assert without_local_rank(words, {"LOCAL_RANK": "1"}) == words[1:]
    assert without_local_rank(words, {}) == words, "without a launcher it is a mistake"
