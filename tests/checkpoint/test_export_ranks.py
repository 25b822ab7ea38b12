"""A model in shards on two ranks becomes the directory that one rank would write."""

import json

import pytest
import torch
from own_code import with_own_code
from rank_jobs import tiny
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from penstock.model.load import load_config


def stored_names(directory):
    names = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.parametrize("preset", ["llama-8b", "qwen3-30b-a3b", "demo"])
@pytest.mark.slow
def test_two_ranks_export_what_one_would(ranks, tmp_path, preset):
    directory, reference = tmp_path / "model", tmp_path / "reference"
    weights = ranks("exporting", 2, directory=str(directory), preset=preset)[0]
    AutoModelForCausalLM.from_config(load_config(tiny(preset, init="random"))).save_pretrained(reference)
    assert stored_names(directory) == stored_names(reference), "experts one by one, tied weights once"
    configs = [json.loads((path / "config.json").read_text()) for path in (directory, reference)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert len(list(directory.glob("model-*.safetensors"))) > 1, "in several files"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, weights[name]), name
    assert not (tmp_path / "model.unchecked").exists()


@pytest.mark.slow
def test_two_ranks_export_code_that_comes_in_two_files(ranks, tmp_path, own_modules):
    model, directory = with_own_code(tmp_path / "own"), tmp_path / "model"
    places = {"directory": str(directory), "model": str(model), "modules": str(tmp_path / "modules")}
    ranks("exporting", 2, preset="demo", **places)
    loaded = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnModel"
