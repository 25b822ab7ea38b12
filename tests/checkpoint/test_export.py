import errno
import json
import os
import resource
import shutil
import signal
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from own_code import with_own_code
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.checkpoint.export import PROBE, _compare, export, export_from, logits_of, mend_generation, not_written
from penstock.checkpoint.run_dir import make_run_dir
from penstock.errors import CheckpointError, Diverged, DoesNotFit, OutputError, RecipeError
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.run.train import train

DEMO = str(files("penstock.demo") / "model")


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def test_what_is_written_loads_and_is_the_same(tmp_path, model, tokenizer):
    export(model, tokenizer, tmp_path / "out", file_size="2MB")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert sum(name.endswith(".safetensors") for name in names) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing else is left behind"


def test_nothing_is_written_over(tmp_path, model, tokenizer):
    with pytest.raises(OutputError, match="there is something already"):
        export(model, tokenizer, tmp_path)


@pytest.mark.parametrize(("reason", "kind"), [(errno.EROFS, OutputError), (errno.ENOSPC, DoesNotFit)])
def test_a_place_that_cannot_be_written_is_not_called_full(tmp_path, model, tokenizer, monkeypatch, reason, kind):
    def refuse(*_, **__):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(kind, match="cannot be written") as caught:
        export(model, tokenizer, tmp_path / "out")
    assert ("Free space" in caught.value.remedy) == (kind is DoesNotFit)


@pytest.mark.parametrize("limit", [100, 1_000_000])  # a file that Python writes, and one that safetensors does
def test_a_limit_on_file_size_is_not_a_full_disk(tmp_path, model, tokenizer, limit):
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(DoesNotFit, match="File too large") as caught:
            export(model, tokenizer, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "`ulimit -f`" in caught.value.remedy
    assert "--shard-size" not in caught.value.remedy  # no file of 1 GB could be written either
    assert "Free space" not in caught.value.remedy
    assert list(tmp_path.iterdir()) == []
    of_file_system = not_written(tmp_path, OSError(errno.EFBIG, "File too large"))
    assert "--shard-size 1GB" in of_file_system.remedy


@pytest.mark.parametrize("size", ["abc", "0", "1"])
def test_a_file_size_that_is_none_is_refused(tmp_path, model, tokenizer, size):
    with pytest.raises(RecipeError, match=f"--shard-size '{size}': is not a size"):
        export(model, tokenizer, tmp_path / "m", file_size=size)


def test_a_weight_that_differs_is_found_by_name(tmp_path, model, tokenizer):
    export(model, tokenizer, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        _compare(model, tokenizer, tmp_path / "out")


@pytest.mark.parametrize("text", ["null", "[1]"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_model_whose_files_are_not_what_they_should_be_is_damaged(tmp_path, file, text):
    run = make_run_dir(Recipe(output_dir=str(tmp_path / "run")))
    shutil.copytree(DEMO, run / "model")
    (run / "model" / file).write_text(text)
    with pytest.raises(CheckpointError, match="exported model cannot be loaded") as caught:
        export_from(run, tmp_path / "out", file_size="5GB", say=print)
    assert caught.value.remedy.startswith(f"Remove {run / 'model'};")


@pytest.mark.parametrize("text", ["{}", '{"added_tokens": []}'])
def test_a_tokenizer_without_what_it_needs_is_damaged(tmp_path, text):
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory)
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="exported model cannot be loaded"):
        export_from(directory, tmp_path / "out", file_size="5GB", say=print)


def test_want_of_memory_is_no_damage(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(torch.OutOfMemoryError):
        export_from(Path(DEMO), tmp_path / "out", file_size="5GB", say=print)


def test_an_end_token_that_differs_is_found(tmp_path, model, tokenizer):
    export(model, tokenizer, tmp_path / "out")
    path = tmp_path / "out" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7}))
    with pytest.raises(CheckpointError, match="end token differs"):
        _compare(model, tokenizer, tmp_path / "out")


def test_the_attention_that_was_trained_with_is_compared_with_itself(tmp_path, tokenizer):
    """In bf16 another attention rounds otherwise, by more than the comparison allows."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(DEMO, num_hidden_layers=4, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.tensor([tokenizer(PROBE)["input_ids"]])
    logits = {}
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        logits[name] = logits_of(model, ids)
    assert not torch.allclose(logits["sdpa"], logits["eager"], rtol=0, atol=float(logits["sdpa"].abs().max()) * 2**-8)
    export(model, tokenizer, tmp_path / "out")


def test_a_model_that_computes_nothing_finite_has_diverged(tmp_path, model, tokenizer):
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    with pytest.raises(Diverged, match="not finite"):
        export(model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "mended"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),  # Llama 2, Vicuna
        ({"temperature": 0.9, "do_sample": True, "pad_token_id": -1}, {"temperature": 0.9, "pad_token_id": None}),
        ({"pad_token_id": -1}, {"do_sample": False, "pad_token_id": None}),
        ({"length_penalty": 0.5, "pad_token_id": 3}, {"length_penalty": None, "pad_token_id": 3}),
        ({"max_new_tokens": "many"}, {"max_new_tokens": None}),
    ],
)
def test_a_generation_config_that_transformers_refuses_is_mended(tmp_path, model, tokenizer, values, mended):
    for name, value in values.items():
        setattr(model.generation_config, name, value)
    said = []
    mend_generation(model, said.append)
    assert len(said) == 1
    assert mended.items() <= vars(model.generation_config).items()
    export(model, tokenizer, tmp_path / "out")  # which compares the end token
    mend_generation(model, said.append)
    assert len(said) == 1, "what is fine is left alone"


def test_a_checkpoint_with_such_a_generation_config_is_exported(tmp_path, monkeypatch):
    """Of a run of before it was mended at the start, which failed at its end."""
    shutil.copytree(DEMO, tmp_path / "old")
    path = tmp_path / "old" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 2, "temperature": 0.9, "top_p": 0.6}))
    run, changes = tmp_path / "run", {"max_steps": 1, "batch_size": 1, "prompt": None, "dtype": "fp32"}
    recipe = replace(PRESETS["demo"], model=str(tmp_path / "old"), output_dir=str(run), **changes)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.run.loading.mend_generation", lambda *_: None)
        with pytest.raises(ValueError, match="GenerationConfig is invalid"):
            train(recipe, Console(quiet=True))
    export_from(run, tmp_path / "out", file_size="5GB", say=lambda _: None)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["do_sample"], written["temperature"], written["eos_token_id"]) == (True, 0.9, 2)
    train(recipe, Console(quiet=True), overwrite=True)
    assert json.loads((run / "model" / "generation_config.json").read_text()) == written


def test_code_that_comes_in_two_files_is_exported_with_the_model(tmp_path, own_modules, tokenizer):
    recipe = Recipe(model=str(with_own_code(tmp_path / "model")), trust_remote_code=True)
    model = load_model(recipe, load_config(recipe), torch.device("cpu"), lambda _: None)
    export(model, tokenizer, tmp_path / "out", trust_remote_code=True)
    shutil.rmtree(tmp_path / "model")
    shutil.rmtree(tmp_path / "modules")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(again).__name__ == "OwnModel"
