import errno
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from penstock.checkpoint.export import _write_again
from penstock.checkpoint.lock import claim
from penstock.checkpoint.places import NEWEST, Place
from penstock.checkpoint.resume import find_start, goes_on_in
from penstock.checkpoint.run_dir import check_room, check_run_dir, find_model, make_run_dir, run_recipe
from penstock.checkpoint.store import save
from penstock.errors import CheckpointError, DoesNotFit, OutputError, RecipeError, UserError
from penstock.offload.saved_tensors import whole
from penstock.recipe.recipe import Recipe


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


def test_a_run_goes_on_beside_files_of_others_and_is_not_replaced_there(tmp_path):
    run = make_run_dir(Recipe(output_dir=str(tmp_path / "run")))
    (run / "train.log").write_text("x")
    check_run_dir(run, overwrite=False, own=True)
    with pytest.raises(OutputError, match=r"such as train\.log\n.*Move .*run/train\.log elsewhere"):
        check_run_dir(run, overwrite=True)
    (run / "recipe.yaml").unlink()
    with pytest.raises(OutputError, match="something else"):
        check_run_dir(run, overwrite=False, own=True)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    recipe = Recipe(output_dir=str(tmp_path / "run"))
    make_run_dir(recipe)
    (tmp_path / "disk" / "metrics.jsonl").write_text("old")
    make_run_dir(recipe)
    assert (tmp_path / "run").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("link", ["", "run"])
def test_a_link_to_a_disk_that_is_not_there_is_said(tmp_path, link):
    (tmp_path / "runs").symlink_to(tmp_path / "disk") if not link else (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / link).symlink_to(tmp_path / "disk") if link else None
    with pytest.raises(OutputError, match=r"runs.*: is a link to .*/disk, which is not there\n.*is mounted"):
        check_run_dir(tmp_path / "runs" / "run", overwrite=False)


@pytest.mark.parametrize(
    ("name", "reason"), [("n" * 300, "File name too long"), ("loop", "Too many levels of symbolic links")]
)
@pytest.mark.parametrize("below", ["", "run"])
@pytest.mark.parametrize("resume", ["", NEWEST, "."])
def test_a_name_that_can_be_no_directory_is_said(tmp_path, monkeypatch, name, reason, below, resume):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    own = goes_on_in(Path(name) / below, resume)
    with pytest.raises(OutputError, match=rf"^{name}: can be no directory \({reason}\)\n  Name .* --output-dir\.$"):
        check_run_dir(Path(name) / below, overwrite=False, own=own)
    with pytest.raises(CheckpointError, match="no such directory"):
        goes_on_in(tmp_path, "loop")


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/step-00000001"])
def test_a_run_does_not_begin_anew_where_the_disk_of_its_checkpoints_is_not_there(tmp_path, link):
    run = make_run_dir(Recipe(output_dir=str(tmp_path / "run")))
    save(run / "checkpoints", 1, {"state": [whole("x", torch.ones(3))]}, {}, lambda _: None)
    (run / link).rename(tmp_path / "disk")
    (run / link).symlink_to(tmp_path / "not-mounted")
    for act in (lambda: find_start(run, NEWEST, overwrite=False), lambda: find_model(run)):
        with pytest.raises(CheckpointError, match=rf"{link}: is a link to .*/not-mounted, which is not there"):
            act()
    assert run_recipe(run), "which is there"
    assert (run / link).is_symlink()


def test_the_recipe_comes_back(tmp_path):
    recipe = Recipe(
        output_dir=str(tmp_path / "run"), lr=3e-6, betas=(0.8, 0.9), prompt="Wie geht's?", recompute="selected:3"
    )
    assert run_recipe(make_run_dir(recipe)) == recipe


@pytest.mark.parametrize(
    ("written", "what"),
    [
        (b"", "does not name model and data"),
        (b"- lr", "does not name model and data"),
        (b"name: demo\nmod", "cannot be read"),
        (b"name: demo\nlr: 2e-5", "does not name model and data"),
        (b": : bad", "cannot be read"),
        (b"data: 2026-13-45", "cannot be read: month must be"),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec"),
    ],
)
def test_a_damaged_recipe_is_said_with_what_does_without_it(tmp_path, written, what):
    run = make_run_dir(Recipe(output_dir=str(tmp_path / "run")))
    (run / "recipe.yaml").write_bytes(written)
    with pytest.raises(CheckpointError, match=what) as caught:
        run_recipe(run)
    assert caught.value.where == str(run / "recipe.yaml")
    assert caught.value.remedy.endswith("with --overwrite.")
    (run / "model").mkdir()
    with pytest.raises(CheckpointError, match=f"name {run / 'model'}"):
        run_recipe(run)
    newest = save(run / "checkpoints", 1, {"state": [whole("x", torch.ones(3))]}, {}, lambda _: None)
    with pytest.raises(CheckpointError, match=f"--resume.*name {newest.path}"):
        run_recipe(run)


def test_advice_can_be_pasted_whatever_the_run_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run_dir(Recipe(output_dir="a b/ü"))
    for step in (1, 2):  # without `run.json`: damaged as that of a run
        save(run / "checkpoints", step, {"state": [whole("x", torch.ones(3))]}, {}, lambda _: None)
    acts = {
        "--output-dir 'a b/ü'-2,": lambda: check_run_dir(run, overwrite=False),
        "`penstock export 'a b/ü' --to DIR`": lambda: find_model(run),
        "--resume 'a b/ü/checkpoints/step-00000001'": lambda: find_start(run, NEWEST, overwrite=False),
    }
    for advised, act in acts.items():
        with pytest.raises(UserError) as caught:
            act()
        assert advised in caught.value.remedy
    with claim(run), pytest.raises(OutputError, match=r"--output-dir 'a b/ü'-2\."):
        check_run_dir(run, overwrite=True)
    assert "`penstock export 'a b/ü' --to 'a b/ü/model'`" in _write_again(Place(run, "run"), run / "model")


def test_a_run_without_a_model_is_said(tmp_path):
    with pytest.raises(RecipeError, match="not the directory of a run"):
        find_model(tmp_path)
    run = make_run_dir(Recipe(output_dir=str(tmp_path / "run")))
    with pytest.raises(CheckpointError, match=r"(?s)no exported model.*no checkpoint either"):
        find_model(run)
    save(run / "checkpoints", 1, {"state": [whole("x", torch.ones(3))]}, {}, lambda _: None)
    with pytest.raises(CheckpointError, match=r"(?s)no exported model.*--resume"):
        find_model(run)


def test_overwriting_removes_checkpoints_and_going_on_keeps_them(tmp_path):
    recipe = Recipe(output_dir=str(tmp_path / "run"))
    directory = make_run_dir(recipe) / "checkpoints"
    save(directory, 1, {"state": [whole("x", torch.ones(3))]}, {}, lambda _: None)
    (directory / ".saving-step-00000002").mkdir()
    make_run_dir(recipe, keep_checkpoints=True)
    assert [path.name for path in directory.iterdir()] == ["step-00000001"]
    make_run_dir(recipe)
    assert not directory.exists()


def test_what_is_still_read_cannot_be_replaced_and_that_is_said(tmp_path, monkeypatch):
    recipe = Recipe(output_dir=str(tmp_path / "run"))
    run = make_run_dir(recipe)
    (run / "model").mkdir()

    def rmdir(path, **_):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    with pytest.raises(OutputError, match=r"model: cannot be removed \(Device or resource busy\)\n  End what still"):
        make_run_dir(recipe)


GIB = 2**30


@pytest.mark.parametrize(
    ("existing", "num_saves", "keep", "free_gib", "fits"),
    [
        (0, 1, 2, 10 + 3, True),  # one checkpoint and the model
        (0, 1, 2, 10 + 2, False),
        (0, 5, 2, 3 * 10 + 3, True),  # two are kept while a third is written
        (0, 5, 2, 3 * 10 + 2, False),
        (2, 5, 2, 10 + 3, True),  # those that are there are paid for
        (2, 5, 2, 10 + 2, False),
        (3, 5, 1, 10 + 3, True),  # the first is written before the others are removed
        (3, 5, 1, 10 + 2, False),
        (0, 5, 0, 3, True),  # none is ever saved
        (2, 0, 2, 3, True),  # only the export is left
    ],
)
def test_the_disk_must_hold_what_is_kept_one_more_and_the_model(
    tmp_path, monkeypatch, existing, num_saves, keep, free_gib, fits
):
    for step in range(existing):
        save(tmp_path / "checkpoints", step, {"state": [whole("x", torch.ones(3))]}, {}, lambda _: None)
    usage = shutil.disk_usage(tmp_path)._replace(free=free_gib * GIB)
    monkeypatch.setattr("penstock.checkpoint.run_dir.shutil.disk_usage", lambda _: usage)
    sizes = {"checkpoint_bytes": 10 * GIB, "export_bytes": 3 * GIB}
    if fits:
        check_room(tmp_path, num_saves=num_saves, keep=keep, **sizes)
    else:
        with pytest.raises(DoesNotFit, match=r"GiB of disk, .* are free") as caught:
            check_room(tmp_path, num_saves=num_saves, keep=keep, **sizes)
        assert caught.value.exit_code == 3


SAVED = {"num_saves": 5, "save_every": 1}


@pytest.mark.parametrize(
    ("run", "free_gib", "listed", "advice"),
    [
        ({**SAVED, "keep": 3}, 35, "4 more checkpoints of 10.0 GiB (keep = 3, and one being written)", "--keep 2"),
        ({**SAVED, "keep": 3}, 25, "4 more checkpoints of 10.0 GiB (keep = 3, and one being written)", "--keep 1"),
        ({**SAVED, "keep": 2}, 15, "3 more checkpoints", "save at the end only: --save-every 0"),
        ({**SAVED, "keep": 1}, 15, "2 more checkpoints", "save at the end only: --save-every 0"),
        ({**SAVED, "keep": 1}, 5, "2 more checkpoints", "save no checkpoint: --keep 0 --save-every 0"),
        ({"num_saves": 1, "keep": 3}, 5, "free: 1 more checkpoint of 10.0 GiB and the", "save no checkpoint: --keep 0"),
        ({"num_saves": 1, "keep": 3}, 2, "1 more checkpoint", ""),
        ({"num_saves": 1, "keep": 0}, 2, "are free: the model, 3.0 GiB", ""),
        ({"num_saves": 0, "keep": 2}, 2, "are free: the model, 3.0 GiB", ""),  # a run that has ended
        ({"num_saves": 5, "keep": 1, "keep_best": True}, 25, "(keep = 1, the best one, and one being written)",
         "save at the end only: --no-keep-best"),
        ({"num_saves": 1, "keep": 1, "keep_best": True}, 5, "1 more checkpoint",
         "save no checkpoint: --keep 0 --no-keep-best"),
    ],
)  # fmt: skip
def test_what_is_advised_is_enough_and_not_what_the_run_does_already(
    tmp_path, monkeypatch, run, free_gib, listed, advice
):
    usage = shutil.disk_usage(tmp_path)._replace(free=free_gib * GIB)
    monkeypatch.setattr("penstock.checkpoint.run_dir.shutil.disk_usage", lambda _: usage)
    with pytest.raises(DoesNotFit) as caught:
        check_room(tmp_path, checkpoint_bytes=10 * GIB, export_bytes=3 * GIB, **run)
    assert listed in caught.value.what
    assert caught.value.remedy.startswith("Free space")
    assert caught.value.remedy.endswith(advice or "larger disk.")


def test_a_limit_on_file_size_is_seen_before_a_run_begins(tmp_path, monkeypatch):
    for limit, refused in ((None, False), (13 * 2**20, False), (12 * 2**20, True)):
        monkeypatch.setattr("penstock.checkpoint.run_dir.file_limit", lambda limit=limit: limit)
        with pytest.raises(DoesNotFit, match="and a file may have 12 MiB") if refused else nullcontext() as caught:
            check_room(tmp_path, checkpoint_bytes=2**20, export_bytes=13 * 2**20, num_saves=1, keep=1)
    assert "`ulimit -f`" in caught.value.remedy


@pytest.mark.parametrize(("reason", "kind"), [(errno.EROFS, OutputError), (errno.ENOSPC, DoesNotFit)])
def test_a_directory_that_cannot_be_written_is_not_called_full(tmp_path, monkeypatch, reason, kind):
    def refuse(*_, **__):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("penstock.checkpoint.run_dir.tempfile.mkdtemp", refuse)
    with pytest.raises(kind, match="cannot be written") as caught:
        check_run_dir(tmp_path, overwrite=False)
    assert ("Free space" in caught.value.remedy) == (kind is DoesNotFit)


def test_a_file_that_was_being_written_when_a_process_died_is_cleared_away(tmp_path):
    run = make_run_dir(Recipe(output_dir=str(tmp_path / "run")))
    (run / ".penstock-1-recipe.yaml").write_text("ha")
    check_run_dir(run, overwrite=True)
    assert [path.name for path in run.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(("free_gib", "fits"), [(3 * 10 + 3 - 2, True), (3 * 10 + 3 - 3, False)])
def test_checkpoints_that_will_be_removed_pay_for_no_more_than_they_hold(tmp_path, monkeypatch, free_gib, fits):
    for step in range(2):
        path = tmp_path / "checkpoints" / f"step-{step:08}"
        save(path.parent, step, {"state": [whole("x", torch.ones(3))]}, {}, lambda _: None)
        with (path / "large").open("wb") as file:
            file.truncate(GIB)
    usage = shutil.disk_usage(tmp_path)._replace(free=free_gib * GIB)
    monkeypatch.setattr("penstock.checkpoint.run_dir.shutil.disk_usage", lambda _: usage)
    sizes = {"checkpoint_bytes": 10 * GIB, "export_bytes": 3 * GIB, "num_saves": 5, "keep": 2}
    with nullcontext() if fits else pytest.raises(DoesNotFit, match="3 more checkpoints"):
        check_room(tmp_path, **sizes, keep_checkpoints=False)


@pytest.mark.parametrize("name", ["model", "model.unchecked"])
def test_a_model_that_will_be_replaced_makes_room(tmp_path, monkeypatch, name):
    usage = shutil.disk_usage(tmp_path)._replace(free=GIB)
    monkeypatch.setattr("penstock.checkpoint.run_dir.shutil.disk_usage", lambda _: usage)
    sizes = {"checkpoint_bytes": 10 * GIB, "export_bytes": 3 * GIB, "num_saves": 0, "keep": 2}
    with pytest.raises(DoesNotFit):
        check_room(tmp_path, **sizes)
    (tmp_path / name).mkdir()
    with (tmp_path / name / "model.safetensors").open("wb") as file:
        file.truncate(2 * GIB)
    check_room(tmp_path, **sizes)


@pytest.mark.parametrize(
    ("free_gib", "there_gib", "refused"),
    [
        (3, 30, ""),
        (2, 30, "run: needs 3.0 GiB of disk, 2.0 GiB are free: the model, 3.0 GiB\n"),
        (99, 29, r"run/checkpoints: needs 30.0 GiB of disk, 29.0 .*3 more checkpoints of 10.0 GiB \(.*written\)\n"),
    ],
)
def test_checkpoints_on_a_disk_of_their_own_need_room_there(tmp_path, monkeypatch, free_gib, there_gib, refused):
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    usage = shutil.disk_usage(tmp_path)
    free = {"run": free_gib, "checkpoints": there_gib}
    monkeypatch.setattr("penstock.checkpoint.run_dir._disk", lambda path: path.name)
    monkeypatch.setattr(
        "penstock.checkpoint.run_dir.shutil.disk_usage", lambda path: usage._replace(free=free[path.name] * GIB)
    )
    with pytest.raises(DoesNotFit, match=refused) if refused else nullcontext():
        check_room(tmp_path / "run", checkpoint_bytes=10 * GIB, export_bytes=3 * GIB, num_saves=5, keep=2)


def test_a_run_on_deepspeed_keeps_the_configuration_it_ran_with(tmp_path):
    make_run_dir(Recipe(output_dir=str(tmp_path / "run"), engine="deepspeed", offload_ratio=0.25))
    config = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    assert config["zero_optimization"]["offload_optimizer"]["ratio"] == 0.25
    check_run_dir(tmp_path / "run", overwrite=True)
    make_run_dir(Recipe(output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run" / "deepspeed.json").exists()
