"""A checkpoint that is damaged, foreign or of another run is refused by name, with what can be taken instead."""

import json
import os
import pickle
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from fault_runs import checkpoints, digests, rows
from safetensors.torch import load_file, save_file

from penstock.checkpoint.run_dir import run_recipe
from penstock.checkpoint.store import _sealed
from penstock.checkpoint.sums import SUMS
from penstock.checkpoint.tensors import digest_file

STEPS = ["--max-steps", "4", "--save-every", "2", "--dtype", "fp32"]  # which `auto` is, depends on the CPU


@pytest.fixture(scope="module")
def ended_run(server, tmp_path_factory):
    run = tmp_path_factory.mktemp("ended") / "run"
    ended = server.train(run, *STEPS)
    assert ended.code == 0, ended.text
    return run


@pytest.fixture
def run(ended_run, tmp_path):
    shutil.copytree(ended_run, tmp_path / "run")
    return tmp_path / "run"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero_tail(path):
    content = path.read_bytes()
    path.write_bytes(content[:-4096] + bytes(4096) if len(content) > 8192 else bytes(len(content)))


def link_out(path):
    outside = path.parents[3] / path.name
    path.rename(outside)
    path.symlink_to(outside)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (truncate, "bytes and should have"),
        (flip, "its checksum is not the one it was written with"),
        (zero_tail, "its checksum is not the one it was written with"),
        (os.unlink, "is missing"),
        (link_out, "is not a plain file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize(
    "file",
    [
        "weights-00001.safetensors",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("run.json", "state-00001.safetensors", "rng.json")),
    ],
)
def test_damage_is_found_and_the_older_checkpoint_is_named(server, run, ended_run, file, damage, what):
    older, newest = checkpoints(run)
    damage(newest / file)
    ended = server.train(run, *STEPS, "--resume")
    assert ended.code == 5, ended.text
    assert f"{newest / file}: " in ended.text
    assert what in ended.text
    assert f"--resume {older}" in ended.text
    assert "Traceback" not in ended.text
    assert rows(run) == rows(ended_run), "nothing was touched"
    verified = server.penstock("export", run, "--verify")
    assert (verified.code, str(newest / file) in verified.text) == (5, True), verified.text
    if damage is flip:
        again = server.train(run, *STEPS, "--resume", older)
        assert again.code == 0, again.text
        left = checkpoints(run)
        assert [path.name for path in left] == ["step-00000002", "step-00000004.1"], "the damaged one is gone"
        assert digests(left[-1]) == digests(checkpoints(ended_run)[-1])
        assert rows(run) == rows(ended_run)
        assert server.penstock("export", run, "--verify").code == 0


def test_a_damaged_manifest_is_damage_and_no_manifest_is_debris(server, run):
    older, newest = checkpoints(run)
    flip(newest / "manifest.json")
    ended = server.train(run, *STEPS, "--resume")
    assert ended.code == 5, ended.text
    assert f"{newest / 'manifest.json'}: the manifest is damaged" in ended.text
    assert f"--resume {older}" in ended.text
    (newest / "manifest.json").unlink()
    ended = server.train(run, *STEPS, "--resume")
    assert ended.code == 0, ended.text
    assert "Resuming after step 2" in ended.text
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000002", "step-00000004"]


def test_both_damaged_leaves_nothing_to_name(server, run):
    for checkpoint in checkpoints(run):
        flip(checkpoint / "state-00001.safetensors")
    ended = server.train(run, *STEPS, "--resume")
    assert (ended.code, "There is no older checkpoint to take" in ended.text) == (5, True), ended.text


@pytest.mark.parametrize("command", ["export", "generate"])
def test_other_commands_name_what_they_can_take(server, run, tmp_path, command):
    older, newest = checkpoints(run)
    shutil.rmtree(run / "model")
    flags = {"export": ["--to", tmp_path / "out"], "generate": ["Why?", "--max-new-tokens", "1"]}[command]
    advice = {"export": f"`penstock export {{}} --to {tmp_path / 'out'}`", "generate": "`penstock generate {}`"}[
        command
    ]
    flip(newest / "weights-00001.safetensors")
    ended = server.penstock(command, run, *flags)
    assert (ended.code, f"Another one is whole: {advice.format(older)}" in ended.text) == (5, True), ended.text
    assert "--resume" not in ended.text
    assert server.penstock(command, older, *flags).code == 0, "what is advised works"
    flip(older / "run.json")
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    ended = server.penstock(command, run, *flags)
    assert (ended.code, "No other checkpoint beside it is whole." in ended.text) == (5, True), ended.text


def test_an_export_of_a_damaged_checkpoint_names_a_newer_one(server, run, tmp_path):
    older, newest = checkpoints(run)
    flip(older / "run.json")
    ended = server.penstock("export", older, "--to", tmp_path / "out")
    assert (ended.code, f"`penstock export {newest} --to {tmp_path / 'out'}`" in ended.text) == (5, True), ended.text


def test_a_foreign_file_is_refused(server, run):
    newest = checkpoints(run)[-1]
    (newest / "evil.py").write_text("import os")
    ended = server.train(run, *STEPS, "--resume")
    assert (ended.code, f"{newest / 'evil.py'}: does not belong" in ended.text) == (5, True), ended.text


def reseal(checkpoint, change):
    """What someone does who wants to be believed: change the manifest and mend its checksum."""
    path = checkpoint / "manifest.json"
    values = json.loads(path.read_text())
    values.pop("checksum")
    change(values["files"])
    path.write_text(json.dumps(_sealed(values)))


@pytest.mark.parametrize("name", ["../../../outside.json", "/etc/passwd", "..", "a/b.json", "x.pkl", "manifest.json"])
def test_a_manifest_may_not_name_what_is_not_its_own(server, run, tmp_path, name):
    (tmp_path / "outside.json").write_text("{}")
    newest = checkpoints(run)[-1]
    reseal(newest, lambda files: files.update({name: {"num_bytes": 2, "xxh3_128": "0" * 32}}))
    ended = server.train(run, *STEPS, "--resume")
    assert ended.code == 5, ended.text
    assert f"manifest.json: names {name!r}" in ended.text


def test_a_pickle_where_safetensors_belongs_is_never_loaded(server, run, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "pwned"),))

    newest = checkpoints(run)[-1]
    for name in ("weights-00001.safetensors", "run.json"):
        path = newest / name
        path.write_bytes(pickle.dumps([Evil(), "x" * 4096]))
        digest = digest_file(path)
        entry = {"num_bytes": digest.num_bytes, "xxh3_128": digest.xxh3_128}
        reseal(newest, lambda files, name=name, entry=entry: files.update({name: entry}))
        ended = server.train(run, *STEPS, "--resume")
        assert ended.code == 5, ended.text
        expected = "is not JSON" if name == "run.json" else "is not a safetensors file"
        assert f"{path}: {expected}" in ended.text
        assert not (tmp_path / "pwned").exists()


def test_the_newest_is_told_by_step_not_by_time(server, run):
    older, newest = checkpoints(run)
    for path, seconds in ((older, 2_000_000_000), (newest, 1)):
        for file in [path, *path.iterdir()]:
            os.utime(file, (seconds, seconds))
    ended = server.train(run, *STEPS, "--resume")
    assert (ended.code, "Resuming after step 4" in ended.text) == (0, True), ended.text


def test_a_run_that_ended_is_only_exported_again(server, run, ended_run):
    ended = server.train(run, *STEPS, "--resume")
    assert ended.code == 0, ended.text
    assert (run / "model/model.safetensors").read_bytes() == (ended_run / "model/model.safetensors").read_bytes()
    assert rows(run) == rows(ended_run)


CHANGED = [
    (["--lr", "1e-3"], ["lr was 0.002, is 0.001"], True),
    (["--max-steps", "6"], ["max_steps was 4, is 6", "number of steps was 4, is 6"], True),
    (["--max-steps", "3"], ["max_steps was 4, is 3", "number of steps was 4, is 3"], False),
    (["--seed", "1"], ["seed was 42, is 1", "content of the data"], True),
    (["--batch-size", "3"], ["batch_size was 2, is 3"], True),
    (["--data-percent", "2"], ["data_percent was 20.0, is 2.0", "content of the data"], True),
    (["--dtype", "bf16"], ["dtype was 'fp32', is 'bf16'", "begin a new run"], False),
    (["--shape", "num_hidden_layers=1"], ["shape was", "begin a new run"], False),
]


@pytest.mark.parametrize(("flags", "listed", "possible"), CHANGED, ids=lambda value: " ".join(map(str, value))
                         if isinstance(value, list) else "")  # fmt: skip
def test_another_recipe_is_refused_with_a_list_and_goes_by_force_where_it_can(server, run, flags, listed, possible):
    ended = server.train(run, *STEPS, *flags, "--resume")
    assert ended.code == 5, ended.text
    assert all(line in ended.text for line in listed), ended.text
    forced = server.train(run, *STEPS, *flags, "--resume", "--resume-anyway")
    assert forced.code == (0 if possible else 5), forced.text


def test_what_does_not_change_the_mathematics_may_change(server, run, ended_run, tmp_path):
    shutil.rmtree(checkpoints(run)[-1])
    flags = ["--log-every", "2", "--save-every", "3", "--keep", "5", "--recompute", "full", "--name", "other"]
    ended = server.train(tmp_path / "moved", "--max-steps", "4", *flags, "--resume", run)
    assert ended.code == 0, ended.text
    assert [path.name for path in checkpoints(tmp_path / "moved")] == ["step-00000003", "step-00000004"]
    assert digests(checkpoints(tmp_path / "moved")[-1]) == digests(checkpoints(ended_run)[-1])
    assert rows(tmp_path / "moved") == rows(ended_run), "also the rows from before it moved"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_keeps_its_precision_whatever_this_machine_would_choose(server, tmp_path, dtype):
    first, second = tmp_path / "first", tmp_path / "second"
    flags = ["--max-steps", "2", "--save-every", "1", "--keep", "2"]
    assert server.train(first, *flags, "--dtype", dtype).code == 0
    ended = server.train(second, *flags, "--resume", checkpoints(first)[0])
    assert ended.code == 0, ended.text
    assert run_recipe(second).dtype == dtype
    assert digests(checkpoints(second)[-1]) == digests(checkpoints(first)[-1])


def test_a_resumed_run_recomputes_what_it_did(server, tmp_path):
    """Compiled layers may round in another order with another recompute, so that `auto` is not chosen anew."""
    first, second = tmp_path / "first", tmp_path / "second"
    flags = ["--max-steps", "2", "--save-every", "1", "--keep", "2"]
    assert server.train(first, *flags, "--recompute", "selected").code == 0
    ended = server.train(second, *flags, "--resume", checkpoints(first)[0])
    assert ended.code == 0, ended.text
    assert run_recipe(second).recompute == "selected"


def test_other_data_behind_the_same_name_is_refused_and_the_same_elsewhere_is_not(server, tmp_path):
    data = tmp_path / "mine.jsonl"
    lines = [{"instruction": f"Say {i}.", "input": "", "output": f"{i} it is."} for i in range(40)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = server.train(tmp_path / "run", *STEPS, "--data", data)
    assert first.code == 0, first.text
    data.rename(tmp_path / "elsewhere.jsonl")
    moved = server.train(tmp_path / "run", *STEPS, "--data", tmp_path / "elsewhere.jsonl", "--resume")
    assert moved.code == 0, moved.text
    data.write_text("".join(json.dumps({**line, "output": "no"}) + "\n" for line in lines))
    other = server.train(tmp_path / "run", *STEPS, "--data", data, "--resume")
    assert (other.code, "content of the data was" in other.text) == (5, True), other.text


def test_another_model_behind_the_same_name_is_refused(server, tmp_path):
    from importlib.resources import files

    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(str(files("penstock.demo") / "model"), model)
    flags = ["--init", "pretrained", "--shape", "None", "--model", model, "--max-steps", "1", "--dtype", "fp32"]
    first = server.train(tmp_path / "run", *flags)
    assert first.code == 0, first.text
    weights = load_file(model / "model.safetensors")
    save_file({k: v * 1.01 for k, v in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})
    other = server.train(tmp_path / "run", *flags, "--resume")
    assert (other.code, "content of the model was" in other.text) == (5, True), other.text
    forced = server.train(tmp_path / "run", *flags, "--resume", "--resume-anyway")
    assert forced.code == 0, forced.text


def test_the_same_step_saved_twice(server, run):
    """Resumed from step 2, step 4 is saved while an older one of step 4 is there."""
    older, newest = checkpoints(run)
    before = digests(newest)
    ended = server.train(run, *STEPS, "--resume", older)
    assert ended.code == 0, ended.text
    assert [path.name for path in checkpoints(run)] == ["step-00000002", "step-00000004.1"]
    assert digests(checkpoints(run)[-1]) == before
    again = server.train(run, *STEPS, "--resume", older)
    assert [path.name for path in checkpoints(run)] == ["step-00000002", "step-00000004.2"], again.text


def test_a_path_that_is_no_checkpoint(server, run, tmp_path):
    for path, message in ((tmp_path / "none", "no such directory"), (run / "model", "is not a checkpoint")):
        ended = server.train(tmp_path / "new", *STEPS, "--resume", path)
        assert (ended.code, message in ended.text) == (5, True), ended.text
    beside = server.train(run, *STEPS, "--resume", tmp_path / "none")
    assert (beside.code, "no such directory" in beside.text) == (5, True), "and not that a run is there"
    assert not (tmp_path / "new").exists()


def test_a_dry_run_checks_the_checkpoint_too(server, run):
    ended = server.train(run, *STEPS, "--resume", "--dry-run")
    assert (ended.code, "Would go on after step 4" in ended.text) == (0, True), ended.text
    flip(checkpoints(run)[-1] / "state-00001.safetensors")
    assert server.train(run, *STEPS, "--resume", "--dry-run").code == 5


def test_a_run_that_did_not_end_is_exported_from_its_newest_checkpoint(server, run, ended_run, tmp_path):
    shutil.rmtree(run / "model")
    ended = server.penstock("export", run, "--to", tmp_path / "out", "--verify", "--json")
    assert ended.code == 0, ended.text
    result = json.loads(ended.text.splitlines()[-1])
    assert [entry["step"] for entry in result["verified"]] == [4, 2]
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (ended_run / "model" / name).read_bytes(), name


def test_export_needs_something_to_do(server, run):
    assert server.penstock("export", run).code == 2


def test_every_checkpoint_is_looked_at_before_damage_is_an_error(server, run):
    older, newest = checkpoints(run)
    flip(newest / "state-00001.safetensors")
    ended = server.penstock("export", run, "--verify")
    assert ended.code == 5
    assert f"Checking {older}" in ended.text
    assert f"Whole: {older}." in ended.text


def test_a_bit_of_the_model_that_flips_is_no_weight(server, run, tmp_path):
    """Written out again it would be certified, and the model in front of it is whole in every other way."""
    assert server.penstock("export", run, "--verify").text.splitlines()[-1].endswith("2 checkpoints and the model")
    weights, template = run / "model" / "model.safetensors", run / "model" / "tokenizer_config.json"
    flip(weights)
    for words in (["export", run, "--to", tmp_path / "out"], ["export", run, "--verify"], ["generate", run, "hello"]):
        ended = server.penstock(*words)
        assert (ended.code, f"{weights}: is damaged: its checksum" in ended.text) == (5, True), ended.text
    flip(weights)
    template.unlink()
    ended = server.penstock("export", run / "model", "--verify")
    assert (ended.code, f"{template}: is missing" in ended.text) == (5, True), ended.text
    assert "remove checksums.json there" in ended.text
    (run / "model" / SUMS).unlink()
    assert server.penstock("export", run, "--to", tmp_path / "out").code == 0, "as the message says"


def test_a_damaged_model_is_no_bug(server, run):
    (run / "model" / SUMS).unlink()
    truncate(run / "model" / "model.safetensors")
    ended = server.penstock("generate", run, "hello", "--device", "cpu")
    assert ended.code == 5, ended.text
    assert f"{run / 'model'}: the exported model cannot be loaded" in ended.text
    shutil.rmtree(run / "model")
    assert server.penstock("export", run, "--to", run / "model").code == 0, "as the message says"
    assert server.penstock("generate", run, "hello", "--device", "cpu").code == 0


def test_a_damaged_recipe_is_no_bug_and_what_is_advised_works(server, run, ended_run, tmp_path):
    (run / "recipe.yaml").write_text("")
    for command in (["report", run], ["export", run, "--to", tmp_path / "out"]):
        ended = server.penstock(*command)
        assert ended.code == 5, ended.text
        assert f"{run / 'recipe.yaml'}: the run's recipe is damaged" in ended.text
        assert f"name {checkpoints(run)[-1]}," in ended.text
    assert server.penstock("export", checkpoints(run)[-1], "--to", tmp_path / "out").code == 0
    assert server.train(run, *STEPS, "--resume").code == 0
    assert run_recipe(run) == replace(run_recipe(ended_run), output_dir=str(run))


def test_a_run_that_had_ended_keeps_its_facts_when_it_is_resumed(server, run):
    before = sorted(path.name for path in (run / "facts").iterdir())
    assert server.train(run, *STEPS, "--resume").code == 0
    assert sorted(path.name for path in (run / "facts").iterdir()) == before
    assert "timeline.json" in before


def test_a_checkpoint_of_the_first_format_is_taken_up(server, run, ended_run):
    """It had the powers of the betas too, which are computed now."""
    older, newest = checkpoints(run)
    shutil.rmtree(newest)
    state = older / "state-00001.safetensors"
    tensors = load_file(state)
    save_file({**tensors, "powers": torch.full((2, 2), 0.5, dtype=torch.float64)}, state)
    values = json.loads((older / "manifest.json").read_text())
    values["files"][state.name] = asdict(digest_file(state))
    del values["checksum"]
    (older / "manifest.json").write_text(json.dumps(_sealed({**values, "format": 1})))
    ended = server.train(run, *STEPS, "--resume")
    assert ended.code == 0, ended.text
    assert "this checkpoint is of an earlier version" in ended.text
    assert digests(checkpoints(run)[-1]) == digests(checkpoints(ended_run)[-1])
    assert json.loads((checkpoints(run)[-1] / "manifest.json").read_text())["format"] == 2
