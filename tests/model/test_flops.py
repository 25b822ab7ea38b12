"""Two counts of a step's FLOPs. That the model's is what torch counts is in tests/bench/test_run.py."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.model.flops import count_flops, flops_per_token, reference_flops_per_token
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


def test_both_are_of_one_gpu(llama):
    one = count_flops(llama, example=100.0, row=4000.0, recompute="full")
    two = count_flops(llama, example=100.0, row=4000.0, recompute="full", gpus=2)
    assert (one.model, one.reference) == (
        flops_per_token(llama, 100.0),
        reference_flops_per_token(llama, 4000.0, "full"),
    )
    assert (two.model, two.reference) == (one.model / 2, one.reference / 2)


def test_it_counts_no_experts():
    model = on_meta("qwen3-30b-a3b")
    assert math.isnan(reference_flops_per_token(model, 4096, "full"))
    assert flops_per_token(model, 4096) > 0
