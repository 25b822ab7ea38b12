"""Of which weights a model's products run in fp8, and that every other one is named with the reason that is its own."""

import dataclasses

import pytest
import torch
from tiny import COMMON, EXPERTS, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import ModelError
from penstock.model.decoder import find_decoder
from penstock.model.fp8 import Fp8Linear
from penstock.model.matmul import check_matmul, choose, describe, set_matmul
from penstock.recipe.presets import PRESETS

UNEVEN = "both sides must be multiples of 16"
FOREIGN = "only an nn.Linear is known to be nothing but a product"


def chosen_of(model):
    return choose(model, find_decoder(model).layers)


def built(name, **values):
    config = AutoConfig.for_model(name, **COMMON | values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def refusal(config):
    recipe = dataclasses.replace(PRESETS["demo"], matmul="fp8", init="random")
    with pytest.raises(ModelError) as caught:
        check_matmul(recipe, config, torch.device("cpu"))
    return str(caught.value)


def test_linear_layers_of_a_class_of_their_own_are_refused_for_that():
    said = refusal(AutoConfig.for_model("falcon", **COMMON | {"num_hidden_layers": 4}))
    assert f"({FOREIGN}: mlp.dense_4h_to_h (FalconLinear), " in said
    assert UNEVEN not in said


def test_each_reason_has_its_own_names():
    model = tiny_model("llama", intermediate_size=40)
    layer = find_decoder(model).layers[1]
    layer.self_attn.o_proj = type("Scaled", (nn.Linear,), {})(32, 32)
    layer.extra = nn.Parameter(torch.ones(32, 32))
    left_out = choose(model, [layer]).left_out
    assert left_out == {
        UNEVEN: ("mlp.gate_proj (40 x 32)", "mlp.up_proj (40 x 32)", "mlp.down_proj (32 x 40)"),
        FOREIGN: ("extra (LlamaDecoderLayer)", "self_attn.o_proj (Scaled)"),
    }
    recipe = dataclasses.replace(PRESETS["llama-8b"], matmul="fp8", dtype="fp32", max_length=64)
    model.config.num_hidden_layers = 4
    layers = [nn.Identity(), layer, layer, nn.Identity()]
    said = describe(model, layers, recipe, torch.device("cpu"))
    assert f"; 6 weights too, since {UNEVEN}: mlp.down_proj (32 x 40), mlp.gate_proj (40 x 32), " in said
    assert f"; 4 weights too, since {FOREIGN}: extra (LlamaDecoderLayer), self_attn.o_proj (Scaled)" in said


def test_products_that_no_linear_layer_makes_are_named():
    """Conv1D of gpt2 is a product too, and once was missing from the line."""
    chosen = chosen_of(tiny_model("gpt2"))
    assert not chosen.linears
    assert set(chosen.left_out[FOREIGN]) == {
        f"{name} (Conv1D)" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


@pytest.mark.parametrize(
    ("name", "values", "weights"),
    [
        ("jetmoe", {"kv_channels": 8}, 96 * 32 + 32 * 48 + 16 * 32 + 32 * 16),  # of its MLP by another name
        ("qwen3_moe", {"head_dim": 8}, 48 * 32 + 32 * 24),
        ("qwen3_next", {"head_dim": 8, "shared_expert_intermediate_size": 48}, 48 * 32 + 32 * 24),
    ],
)
def test_experts_are_counted_whatever_they_are_called(name, values, weights):
    model = built(name, **EXPERTS | values)
    chosen = chosen_of(model)
    routed = 2 * 2 * weights  # two experts a token, two layers
    assert routed <= chosen.experts <= 1.01 * routed, "jetmoe has a router among them"
    assert "experts" not in str(chosen.left_out)
    assert ("linear_attn.conv1d (Conv1d)" in str(chosen.left_out)) == (name == "qwen3_next"), "not an expert"


def test_experts_that_every_token_has_count_whole():
    model = tiny_model("qwen3_moe")
    layer = find_decoder(model).layers[1]
    before = choose(model, [layer]).experts
    layer.mlp.shared_experts = nn.ParameterList([nn.Parameter(torch.ones(3, 32, 48))])
    assert choose(model, [layer]).experts == before + 3 * 32 * 48


def test_routers_and_experts_stay_and_everything_else_runs():
    model = tiny_model("qwen3_moe")
    layers = find_decoder(model).layers
    set_matmul(model, layers, "fp8")
    running = [name for name, module in layers[0].named_modules() if isinstance(module, Fp8Linear)]
    assert running == [f"self_attn.{part}_proj" for part in "qkvo"]
