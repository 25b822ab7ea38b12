"""Every weight in exactly one unit, in the order forward needs them, or a refusal that says why."""

import pytest
import torch
from tiny import COMMON, OTHERS, SEVEN, packed, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from penstock.errors import ModelError
from penstock.model.attention import use_attention
from penstock.model.loss import packed_loss
from penstock.model.units import find_units


@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_every_parameter_is_in_exactly_one_unit(name):
    model = tiny_model(name)
    units = find_units(model)
    listed = [(n, id(p)) for unit in units.units for n, p in unit.parameters]
    assert sorted(listed) == sorted((n, id(p)) for n, p in model.named_parameters())
    assert [u.name for u in units.units][:3] == ["embedding", "layer 0", "layer 1"]
    assert len(units.layers) == 2
    assert units.backbone is model.base_model
    assert units.head.weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_forward_needs_units_in_their_order(name):
    """The modules that a unit names run before any of its weights is used, and units come first to last."""
    model = tiny_model(name)
    units = find_units(model)
    use_attention(model, "auto")
    called: list[str] = []
    for unit in units.units:
        for module in unit.modules:
            module.register_forward_pre_hook(lambda *_, name=unit.name: called.append(name))
    batch = packed()
    packed_loss(units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    first_calls = list(dict.fromkeys(called))
    assert first_calls == [unit.name for unit in units.units]


def test_tied_weight_is_listed_once_where_it_is_first_needed():
    model = tiny_model("llama-tied")
    units = find_units(model)
    assert units.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert [u.name for u in units.units] == ["embedding", "layer 0", "layer 1", "norm"]
    assert units.head.weight is model.model.embed_tokens.weight


def test_untied_model_has_no_other_names():
    assert find_units(tiny_model("llama")).tied == {}


def test_frozen_parameters_are_left_out():
    model = tiny_model("llama")
    model.model.layers[0].requires_grad_(False)
    names = [n for unit in find_units(model).units for n, _ in unit.parameters]
    assert names
    assert not any(n.startswith("model.layers.0.") for n in names)


def test_finds_units_without_weights_in_memory():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SEVEN["qwen3"]))
    assert len(find_units(model).units) == 5


def test_a_weight_that_belongs_nowhere_is_refused_by_name():
    model = tiny_model("llama")
    model.value_head = nn.Linear(32, 1)
    with pytest.raises(ModelError, match=r"belong to no embedding.*value_head\.weight, value_head\.bias"):
        find_units(model)


def test_two_lists_of_layers_are_refused():
    model = tiny_model("llama")
    model.model.more_layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(ModelError, match="one list of 2 layers was expected, found: layers, more_layers"):
        find_units(model)


def test_encoder_and_decoder_is_refused():
    config = AutoConfig.for_model("t5", vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="encoder and a decoder"):
        find_units(AutoModelForSeq2SeqLM.from_config(config))


def test_backbone_without_head_is_refused():
    with pytest.raises(ModelError, match="not a backbone with a head"):
        find_units(tiny_model("llama").base_model)


def test_auxiliary_loss_is_refused():
    config = AutoConfig.for_model("qwen3_moe", **SEVEN["qwen3_moe"], output_router_logits=True)
    with pytest.raises(ModelError, match="auxiliary loss"):
        find_units(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("name", "scale", "softcap"),
    [("llama", 1.0, None), ("granite", 1 / 3.0, None), ("cohere", 0.25, None), ("gemma2", 1.0, 30.0)],
)
def test_head_knows_what_the_model_does_to_its_logits(name, scale, softcap):
    head = find_units(tiny_model(name)).head
    assert (head.scale, head.softcap) == (pytest.approx(scale), softcap)


def test_common_values_are_taken():
    assert find_units(tiny_model("llama")).head.weight.shape == (COMMON["vocab_size"], COMMON["hidden_size"])
