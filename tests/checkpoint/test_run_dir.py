import pytest

from penstock.checkpoint.run_dir import check_run_dir, find_model, make_run_dir, run_recipe
from penstock.errors import CheckpointError, OutputError
from penstock.recipe import Recipe


def test_a_new_and_an_empty_directory_are_fine_and_nothing_is_made(tmp_path):
    check_run_dir(tmp_path / "a" / "b", overwrite=False)
    assert list(tmp_path.iterdir()) == []
    check_run_dir(tmp_path, overwrite=False)


def test_overwrite_replaces_a_run_but_never_anything_else(tmp_path):
    recipe = Recipe(output_dir=str(tmp_path / "run"))
    make_run_dir(recipe)
    with pytest.raises(OutputError, match="--overwrite"):
        check_run_dir(tmp_path / "run", overwrite=False)
    check_run_dir(tmp_path / "run", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(OutputError, match="something else"):
        check_run_dir(tmp_path / "mine", overwrite=True)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    recipe = Recipe(output_dir=str(tmp_path / "run"))
    make_run_dir(recipe)
    (tmp_path / "disk" / "metrics.jsonl").write_text("old")
    make_run_dir(recipe)
    assert (tmp_path / "run").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["recipe.yaml"]


def test_the_recipe_comes_back(tmp_path):
    recipe = Recipe(output_dir=str(tmp_path / "run"), lr=3e-6, betas=(0.8, 0.9), prompt="Wie geht's?", recompute=3)
    assert run_recipe(make_run_dir(recipe)) == recipe


def test_a_run_without_a_model_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="not the directory of a run"):
        find_model(tmp_path)
    make_run_dir(Recipe(output_dir=str(tmp_path / "run")))
    with pytest.raises(CheckpointError, match=r"(?s)no exported model.*--resume"):
        find_model(tmp_path / "run")
