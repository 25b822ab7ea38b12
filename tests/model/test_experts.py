"""Experts computed here: transformers' results to the bit, and gradients that are rounded once."""

import copy

import pytest
import torch
from tiny import tiny_model

from penstock.engine.packed import PackedModel
from penstock.model.experts import NAME, use_experts
from penstock.recipe.presets import PRESETS

MODELS = ["gpt_oss", "qwen3_moe", "mixtral"]


def experts_of(name, **changes):
    """The experts of the first layer, as transformers computes them and as we do, with the same random weights."""
    model = tiny_model(name, **changes)
    (theirs, *_) = [part for part in model.modules() if hasattr(part, "has_gate")]
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    ours = copy.deepcopy(theirs)
    ours.config = copy.deepcopy(theirs.config)
    theirs.config._experts_implementation = "grouped_mm"
    ours.config._experts_implementation = NAME
    use_experts(model)  # registers ours
    theirs.config._experts_implementation = "grouped_mm"
    return theirs, ours


def inputs(experts, tokens, each=3):
    generator, place = torch.Generator().manual_seed(1), experts.down_proj
    width = place.shape[-1 if experts.is_transposed else 1]
    hidden, gradient = (torch.randn(tokens, width, generator=generator).to(place) for _ in range(2))
    scores = torch.rand(tokens, experts.num_experts, generator=generator)
    scores[:, 0] = 0  # one expert gets nothing
    weights, chosen = torch.topk(scores, each)
    return hidden, chosen.to(place.device), weights.to(place), gradient


def run(experts, hidden, chosen, weights, gradient):
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad()
    result = experts(hidden, chosen, weights)
    result.backward(gradient)
    grads = {name: p.grad.clone() for name, p in experts.named_parameters()}
    return result.detach(), {"hidden": hidden.grad, "weights": weights.grad, **grads}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [50, 1, 0])
def test_results_are_those_of_transformers_and_gradients_to_rounding(name, dtype, tokens, device):
    theirs, ours = (experts.to(device, dtype) for experts in experts_of(name))
    given = inputs(theirs, tokens)
    (a, by_them), (b, by_us) = run(theirs, *given), run(ours, *given)
    assert torch.equal(a, b)
    assert by_us.keys() == by_them.keys()
    for key, gradient in by_us.items():
        assert gradient.dtype is dtype
        error = (gradient - by_them[key]).double().norm()
        assert error <= (1e-6 if dtype is torch.float32 else 2e-2) * by_them[key].double().norm(), key


def test_sums_over_tokens_and_copies_are_rounded_once(device):
    theirs, ours = (
        experts.to(device, torch.bfloat16) for experts in experts_of("gpt_oss", num_local_experts=16, num_experts=16)
    )
    given = inputs(theirs, 8000, each=8)
    found = [run(experts, *given)[1] for experts in (ours, theirs)]
    _, exact = run(theirs.float(), *(t.float() if t.is_floating_point() else t for t in given))
    for key, at_least in {"gate_up_proj_bias": 4, "down_proj_bias": 4, "hidden": 1.1}.items():
        mine, stock = (float((g[key].float() - exact[key]).norm() / exact[key].norm()) for g in found)
        assert mine < 0.01, key
        if device == "cpu":  # what autograd does by itself; on a GPU it may know better some day
            assert stock > at_least * mine, key


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_computes_them_so_and_a_config_does_not_say_it(name):
    model = tiny_model(name)
    PackedModel(model, PRESETS["demo"], print)
    assert model.config._experts_implementation == NAME
    assert NAME not in str(model.config.to_dict())
    use_experts(model)


def test_what_somebody_chose_stays():
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("eager")
    use_experts(model)
    assert model.config._experts_implementation == "eager"
    dense = tiny_model("llama")
    before = dense.config._experts_implementation
    use_experts(dense)
    assert dense.config._experts_implementation == before
