"""Every weight in exactly one unit, in the order forward needs them, or a refusal that says why."""

import pytest
import torch
from tiny import COMMON, OTHERS, SEVEN, packed, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from penstock.errors import ModelError
from penstock.model.attention import use_attention
from penstock.model.decoder import find_decoder
from penstock.model.loss import packed_loss


@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_every_parameter_is_in_exactly_one_unit(name):
    model = tiny_model(name)
    decoder = find_decoder(model)
    listed = [id(p) for unit in decoder.units for p in unit.parameters]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    assert all(model.get_submodule(unit.name) is unit.module for unit in decoder.units)
    assert decoder.units[0].module is model.get_input_embeddings()
    assert [unit.module for unit in decoder.units if unit.module in decoder.layers] == list(decoder.layers)
    assert len(decoder.layers) == 2
    assert decoder.backbone is model.base_model
    assert decoder.head.weight is model.get_output_embeddings().weight


def parts_of(decoder):
    """The part that each unit belongs to: 0 before the layers, each layer, what is registered after them, the head."""
    found, layers = {}, 0
    for unit in decoder.units:
        layers += unit.module in decoder.layers
        last = len(decoder.layers) + 1
        after = layers == len(decoder.layers) and unit.module not in decoder.layers
        found[unit.name] = last + (unit.module is decoder.head.module) if after else layers
    return found


@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_forward_needs_units_in_their_order(name):
    """The module that a unit names runs before any of its weights is used, and units come first to last."""
    model = tiny_model(name)
    decoder = find_decoder(model)
    use_attention(model, "auto")
    called: list[str] = []
    for unit in decoder.units:
        unit.module.register_forward_pre_hook(lambda *_, name=unit.name: called.append(name))
    batch = packed()
    packed_loss(decoder, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    first_calls = list(dict.fromkeys(called))
    parts = parts_of(decoder)
    assert set(first_calls) == set(parts)
    assert list(dict.fromkeys(parts[call] for call in first_calls)) == sorted(set(parts.values()))
    if name != "opt":  # which registers its final norm before its layers
        assert first_calls == [unit.name for unit in decoder.units]


def test_tied_weight_is_listed_once_where_it_is_first_needed():
    model = tiny_model("llama-tied")
    decoder = find_decoder(model)
    assert decoder.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert [unit.name for unit in decoder.units] == names
    assert decoder.head.weight is model.model.embed_tokens.weight


def test_untied_model_has_no_other_names():
    assert find_decoder(tiny_model("llama")).tied == {}


def test_frozen_parameters_are_left_out():
    model = tiny_model("llama")
    model.model.layers[0].requires_grad_(False)
    listed = {id(p) for unit in find_decoder(model).units for p in unit.parameters}
    names = [n for n, p in model.named_parameters() if id(p) in listed]
    assert names
    assert not any(n.startswith("model.layers.0.") for n in names)
    assert len(names) == len(listed)


def test_finds_units_without_weights_in_memory():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SEVEN["qwen3"]))
    assert len(find_decoder(model).units) == 5


def test_a_weight_that_belongs_nowhere_is_refused_by_name():
    model = tiny_model("llama")
    model.value_head = nn.Linear(32, 1)
    with pytest.raises(ModelError, match=r"belong to no embedding.*value_head\.weight, value_head\.bias"):
        find_decoder(model)


def test_two_lists_of_layers_are_refused():
    model = tiny_model("llama")
    model.model.more_layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(ModelError, match="one list of 2 layers was expected, found: layers, more_layers"):
        find_decoder(model)


def test_encoder_and_decoder_is_refused():
    config = AutoConfig.for_model("t5", vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="encoder and a decoder"):
        find_decoder(AutoModelForSeq2SeqLM.from_config(config))


def test_backbone_without_head_is_refused():
    with pytest.raises(ModelError, match="not a backbone with a head"):
        find_decoder(tiny_model("llama").base_model)


def test_auxiliary_loss_is_refused():
    config = AutoConfig.for_model("qwen3_moe", **SEVEN["qwen3_moe"], output_router_logits=True)
    with pytest.raises(ModelError, match="auxiliary loss"):
        find_decoder(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("name", "scale", "softcap"),
    [("llama", 1.0, None), ("granite", 1 / 3.0, None), ("cohere", 0.25, None), ("gemma2", 1.0, 30.0)],
)
def test_head_knows_what_the_model_does_to_its_logits(name, scale, softcap):
    head = find_decoder(tiny_model(name)).head
    assert (head.scale, head.softcap) == (pytest.approx(scale), softcap)


def test_common_values_are_taken():
    assert find_decoder(tiny_model("llama")).head.weight.shape == (COMMON["vocab_size"], COMMON["hidden_size"])


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2", "gpt2"])
def test_a_trial_of_two_layers_passes_them_and_leaves_all(name):
    model = tiny_model(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 4})
    decoder, batch, called = find_decoder(model), packed(), []
    use_attention(model, "auto")
    for index, layer in enumerate(decoder.layers):
        layer.register_forward_hook(lambda *_, index=index: called.append(index))

    def loss():
        called.clear()
        return packed_loss(
            decoder, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets
        )

    before = loss()
    with decoder.only([0, 3]):
        loss().backward()
        assert called == [0, 3]
    assert torch.equal(loss(), before)
    assert called == [0, 1, 2, 3]
    assert find_decoder(model).layers == decoder.layers
