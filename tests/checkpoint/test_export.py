import errno
import json
import os
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.checkpoint.export import PROBE, _compare, export, logits_of
from penstock.errors import CheckpointError, Diverged, DoesNotFit, OutputError, RecipeError

DEMO = str(files("penstock.demo") / "model")


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def test_what_is_written_loads_and_is_the_same(tmp_path, model, tokenizer):
    export(model, tokenizer, tmp_path / "out", shard_size="2MB")
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


@pytest.mark.parametrize("size", ["abc", "0", "1"])
def test_a_shard_size_that_is_none_is_refused(tmp_path, model, tokenizer, size):
    with pytest.raises(RecipeError, match=f"--shard-size '{size}': is not a size"):
        export(model, tokenizer, tmp_path / "m", shard_size=size)


def test_a_weight_that_differs_is_found_by_name(tmp_path, model, tokenizer):
    export(model, tokenizer, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        _compare(model, tokenizer, tmp_path / "out")


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
