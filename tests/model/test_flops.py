"""Two counts of a step's FLOPs. That the model's is what torch counts is in tests/bench/test_run.py."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.model.flops import count_flops, flops_per_token, reference_flops_per_token, token_flops
from penstock.plan.memory import Work
from penstock.plan.speed import _attended, model_flops
from penstock.recipe.presets import ARCHITECTURES, PRESETS


def on_meta(preset):
    architecture = ARCHITECTURES[PRESETS[preset].model]
    config = AutoConfig.for_model(architecture.model_type, **architecture.config_values())
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def llama():
    return on_meta("llama-8b")


@pytest.mark.parametrize(("recompute", "k"), [("none", 3), ("selected:4", 3), ("full", 4)])
def test_the_references_formula_is_its_own(llama, recompute, k):
    """Of a step: batch x (2 k N s + 4 k L h s^2)."""
    batch, s, parameters, layers, hidden = 4, 4096, 8_030_261_248, 32, 4096
    of_step = batch * (2 * k * parameters * s + 4 * k * layers * hidden * s**2)
    assert reference_flops_per_token(llama, s, recompute) * batch * s == pytest.approx(of_step, rel=1e-12)


@pytest.mark.parametrize("preset", ["llama-8b", "gpt-oss-20b"])
def test_attention_of_an_example_is_what_the_plan_counts(preset):
    """With the windows of every second layer of gpt-oss; the plan has the causal half."""
    flops, architecture = token_flops(on_meta(preset)), ARCHITECTURES[PRESETS[preset].model]
    for length in (100, 300, 4096):
        planned = 2 * length * _attended(architecture, Work(1, length, "none"))
        assert flops.pairs(np.array([length])).tolist() == [planned]
    assert flops.pair == 12 * architecture.heads * architecture.head_dim


def test_rows_of_one_example_cost_what_is_counted_by_the_token(llama):
    flops = token_flops(llama)
    (pairs,) = flops.pairs(np.array([4096])).tolist()
    of_row = flops.products * 4096 + flops.pair * pairs
    assert of_row == pytest.approx(flops_per_token(llama, 4096) * 4096, rel=1e-12)
    assert of_row == pytest.approx(model_flops(ARCHITECTURES[PRESETS["llama-8b"].model], 1, 4096), rel=1e-12)


def test_a_window_without_kinds_of_layers_is_in_all_of_them():
    config = AutoConfig.for_model(
        "mistral", sliding_window=64, num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert (token_flops(model).windowed, token_flops(model).window) == (2, 64)


def test_both_are_of_one_gpu(llama):
    one = count_flops(llama, row=4000.0, recompute="full")
    two = count_flops(llama, row=4000.0, recompute="full", gpus=2)
    counted = flops_per_token(llama, 100.0), reference_flops_per_token(llama, 4000.0, "full")
    assert (one.model(100.0), one.reference) == counted
    assert (two.model(100.0), two.reference) == (one.model(100.0) / 2, one.reference / 2)


def test_it_counts_no_experts():
    model = on_meta("qwen3-30b-a3b")
    assert math.isnan(reference_flops_per_token(model, 4096, "full"))
    assert flops_per_token(model, 4096) > 0
