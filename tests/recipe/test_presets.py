"""Presets are valid recipes, and the architectures are those of the real models."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.recipe.presets import ARCHITECTURES, PRESETS

BILLIONS = {
    "smollm2-135m": 0.1345,
    "llama-8b": 8.03,
    "qwen3-14b": 14.77,
    "phi-4": 14.66,
    "gpt-oss-20b": 20.91,
    "qwen3-30b-a3b": 30.53,
    "seed-oss-36b": 36.15,
    "llama-70b": 70.55,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_parameter_count_is_that_of_the_hugging_face_model(name):
    architecture = ARCHITECTURES[PRESETS[name].model]
    config = AutoConfig.for_model(architecture.model_type, **architecture.config_values())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert architecture.num_parameters() == sum(p.numel() for p in model.parameters())
    assert architecture.num_parameters() / 1e9 == pytest.approx(BILLIONS[name], rel=1e-3)


@pytest.mark.parametrize("name", BILLIONS)
def test_config_takes_every_value(name):
    """A misspelt name would be kept by the config class as an unknown extra, and the default would be used."""
    architecture = ARCHITECTURES[PRESETS[name].model]
    config = AutoConfig.for_model(architecture.model_type, **architecture.config_values())
    text = config.get_text_config()
    assert text.num_hidden_layers == architecture.layers
    assert text.num_key_value_heads == architecture.kv_heads
    assert text.vocab_size == architecture.vocab
    assert text.rope_parameters == dict(architecture.rope)
    if architecture.experts:
        assert text.num_local_experts == architecture.experts
        assert text.num_experts_per_tok == architecture.experts_per_token
    if architecture.sliding_window:
        assert text.layer_types[:2] == ["sliding_attention", "full_attention"]


def test_active_parameters_are_all_of_a_dense_model_and_few_of_a_sparse_one():
    dense, sparse = ARCHITECTURES["Qwen/Qwen3-14B"], ARCHITECTURES["Qwen/Qwen3-30B-A3B"]
    assert dense.num_active_parameters() == dense.num_parameters()
    assert sparse.num_active_parameters() / 1e9 == pytest.approx(3.35, rel=1e-2)


def test_presets_are_those_of_the_reference():
    assert set(PRESETS) == {"demo", *BILLIONS}
    for name in set(BILLIONS) - {"smollm2-135m"}:
        recipe = PRESETS[name]
        assert recipe.name == name
        assert (recipe.batch_size, recipe.lr, recipe.warmup, recipe.weight_decay) == (4, 1e-5, 0.05, 0.01)
        assert (recipe.seed, recipe.data, recipe.data_percent, recipe.epochs) == (42, "tatsu-lab/alpaca", 10.0, 1.0)
        assert recipe.max_length == (8192 if name == "gpt-oss-20b" else 4096)
        assert recipe.recompute == "auto"


def test_presets_need_no_torch():
    code = "import sys, penstock.recipe.presets; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
