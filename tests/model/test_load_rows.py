"""Loading in rows: every rank reads its own, and what cannot be read so is refused."""

import json

import pytest
import torch
from rank_jobs import DEVICE, silent, tiny
from tiny import tiny_model

from penstock.model.load import load_config, load_model
from penstock.update.master import join


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A model on disk in fp32, with experts that its file keeps one by one."""
    recipe = tiny("qwen3-30b-a3b")
    model = load_model(recipe, load_config(recipe), DEVICE, silent)
    directory = tmp_path_factory.mktemp("stored") / "model"
    model.save_pretrained(directory)
    names = json.loads((directory / "config.json").read_text())["architectures"]
    assert names == ["Qwen3MoeForCausalLM"]
    return directory, {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rank_loads_its_rows_and_never_more(ranks, stored, dtype):
    directory, weights = stored
    (one,) = ranks("loading", 1, directory=str(directory), dtype=dtype)
    results = ranks("loading", 2, directory=str(directory), dtype=dtype)
    for result in results:
        assert result["own"] <= 0.55 * result["all"]
        assert result["largest"] <= max(w.nbytes for w in weights.values()) * 0.6, "half of the largest parameter"
        assert result["fingerprint"] == one["fingerprint"], "the same model, whoever loads it"
        assert all(torch.equal(result["buffers"][name], buffer) for name, buffer in one["buffers"].items())
        for name, weight in weights.items() if dtype == "fp32" else ():
            assert torch.equal(result["weights"][name], weight), name
    if dtype == "bf16":  # what rounding leaves is kept: together they are the fp32 weights
        for name, weight in weights.items():
            remainder = torch.cat([result["remainders"][name] for result in results])
            assert torch.equal(join(results[0]["weights"][name].view(-1), remainder).view(weight.shape), weight), name


@pytest.mark.parametrize(("method", "packed"), [("mxfp4", "MXFP4"), ("", "model.gguf")])
def test_what_is_unpacked_whole_is_refused_on_ranks(ranks, stored, tmp_path, method, packed):
    directory, _ = stored
    for message in ranks("refused", 2, directory=str(directory), gguf="" if method else packed, method=method):
        assert packed in message
        assert "cannot be read in rows by several ranks" in message


def test_buffers_beside_weights_and_tied_weights_are_right(ranks, tmp_path):
    """Gemma scales its embedding by a buffer that no checkpoint holds, in the module that holds the tied weight."""
    tiny_model("gemma3_text").save_pretrained(tmp_path / "model")
    (one,) = ranks("loading", 1, directory=str(tmp_path / "model"), dtype="fp32")
    for result in ranks("loading", 2, directory=str(tmp_path / "model"), dtype="fp32"):
        assert result["buffers"].keys() == one["buffers"].keys()
        assert all(torch.equal(result["buffers"][name], buffer) for name, buffer in one["buffers"].items())
        assert all(torch.equal(result["weights"][name], weight) for name, weight in one["weights"].items())
