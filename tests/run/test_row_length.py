"""How long rows are where nobody has said it."""

import dataclasses
import json
import shutil
from importlib.resources import files

import pytest
import torch

from penstock.bench.this_machine import unmeasured_machine
from penstock.command.cli import main
from penstock.machine.known import H200
from penstock.model.load import load_config, load_tokenizer
from penstock.recipe.file import for_model
from penstock.report.console import Console
from penstock.run.preparation import prepare_run
from penstock.run.row_length import LONGEST, with_length

MODEL = str(files("penstock.demo") / "model")
ROOMY = dataclasses.replace(H200, host_bytes=10**12)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "my.jsonl"
    path.write_text("".join(json.dumps({"prompt": "say", "completion": "word " * n}) + "\n" for n in (5, 90, 20)))
    return dataclasses.replace(for_model(MODEL), data=str(path), output_dir=str(tmp_path / "run"))


def chosen(recipe, machine=ROOMY, config=None):
    said = []
    config = config or load_config(recipe)
    return with_length(recipe, config, load_tokenizer(recipe), machine, 1, said.append), said


def test_the_longest_example_decides(recipe):
    run = prepare_run(recipe, Console(quiet=True))
    longest = run.data.train.store.counts.longest
    assert 90 < longest <= run.recipe.max_length < longest + 64
    assert run.recipe.max_length % 64 == 0
    assert run.data.train.store.counts.truncated.count == 0
    _, said = chosen(recipe)
    length = run.recipe.max_length
    assert said == [f"  rows of {length} tokens (the longest example has {longest}); --max-length sets it"]


def test_what_is_evaluated_on_is_not_cut_either(recipe, tmp_path):
    other = tmp_path / "eval.jsonl"
    other.write_text(json.dumps({"prompt": "say", "completion": "word " * 300}) + "\n")
    found, _ = chosen(dataclasses.replace(recipe, eval_data=str(other)))
    assert found.max_length > 300
    (tmp_path / "set").mkdir()
    shutil.copy(recipe.data, tmp_path / "set" / "train.jsonl")
    shutil.copy(other, tmp_path / "set" / "validation.jsonl")
    found, _ = chosen(dataclasses.replace(recipe, data=str(tmp_path / "set")))
    assert found.max_length > 300, "a split of the directory"


def test_text_is_looked_at_in_the_documents_that_it_becomes(recipe, tmp_path):
    """The file as one document would be over the most that is taken, and tokenized rows of it found in the cache."""
    path = tmp_path / "book.txt"
    path.write_text("a line of a book\n" * 2000)
    run = prepare_run(dataclasses.replace(recipe, data=str(path), split_documents="lines"), Console(quiet=True))
    assert run.recipe.max_length == 64
    assert run.data.train.num_examples == 2000


@pytest.mark.parametrize(
    ("positions", "length", "why"),
    [(128, 128, "what the model takes"), (10**6, LONGEST, "the most that is taken unasked")],
)
def test_it_is_no_longer_than_the_model_takes_nor_than_4096(recipe, positions, length, why):
    path = recipe.data
    with open(path, "a") as file:
        file.write(json.dumps({"prompt": "say", "completion": "word " * 6000}) + "\n")
    config = load_config(recipe)
    config.max_position_embeddings = positions
    found, said = chosen(recipe, config=config)
    assert found.max_length == length
    assert why in said[0]


def test_fewer_rows_at_once_come_before_shorter_rows(recipe):
    """The first keeps every example whole."""
    with open(recipe.data, "a") as file:
        file.write(json.dumps({"prompt": "say", "completion": "word " * 3000}) + "\n")
    config = load_config(recipe)
    config.max_position_embeddings = 4096
    steps = []
    for gigabytes in range(300, 140, -4):
        found, _ = chosen(recipe, dataclasses.replace(H200, gpu_bytes=int(gigabytes * 1e7)), config)
        steps.append((found.micro_batch_size, found.max_length))
    whole = steps[0][1]
    in_order = list(dict.fromkeys(steps))
    assert in_order[:3] == [(0, whole), (2, whole), (1, whole)], in_order
    assert in_order[3][1] < whole, "only then shorter ones"


def test_what_the_recipe_says_stays(recipe):
    said = dataclasses.replace(recipe, max_length=96)
    assert chosen(said) == (said, [])


def test_plan_and_train_agree(recipe, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["--model", MODEL, "--data", recipe.data]
    assert main(["plan", *words, "--gpu", "h200", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["max_length"]
    assert main(["train", *words, "--dry-run", "--json"]) == 0
    assert f"rows of {planned} tokens" in capsys.readouterr().err
    assert prepare_run(recipe, Console(quiet=True)).recipe.max_length == planned


def test_without_data_a_plan_assumes_and_says_so(capsys):
    assert main(["plan", "--model", MODEL, "--gpu", "h200", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["max_length"] == LONGEST
    assert "are assumed (no --data is named)" in said.err


def test_memory_needs_no_measuring():
    machine = unmeasured_machine(torch.device("cpu"))
    assert not machine.has_gpu
    assert not machine.measured
    assert machine.host_bytes > 0


@pytest.mark.slow
def test_a_run_goes_on_with_the_length_it_began_with(recipe, tmp_path, monkeypatch, capsys):
    """A model without a preset: its own name, the low learning rate, and a resume that chooses nothing anew."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, tmp_path / "mine")
    words = ["train", "--model", str(tmp_path / "mine"), "--data", recipe.data, "--epochs", "4", "--save-every", "1"]
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["run_dir"] == "runs/mine"
    rows = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert max(row["lr"] for row in rows) <= 1e-5
    monkeypatch.setattr("penstock.run.row_length.MULTIPLE", 1)  # as if another machine chose otherwise
    assert main([*words, "--resume"]) == 0
