"""Shapes for random weights."""

import pytest
from tiny import tiny_config

from penstock.errors import RecipeError
from penstock.model.shape import with_shape


def test_changes_values_and_keeps_the_rest():
    config = with_shape(
        tiny_config("llama"), "num_hidden_layers=5, hidden_size=64,rms_norm_eps=1e-3,attention_bias=true"
    )
    assert (config.num_hidden_layers, config.hidden_size, config.rms_norm_eps) == (5, 64, 1e-3)
    assert config.attention_bias is True
    assert config.num_attention_heads == 4


@pytest.mark.parametrize(("layers", "expected"), [(1, ["s"]), (3, ["s", "f", "s"]), (5, ["s", "f", "s", "f", "s"])])
def test_kinds_of_layers_keep_their_pattern(layers, expected):
    kinds = with_shape(tiny_config("gpt_oss"), f"num_hidden_layers={layers}").layer_types
    assert [kind[0] for kind in kinds] == expected


def test_other_names_of_a_setting_work():
    assert with_shape(tiny_config("qwen3_moe"), "num_experts=8").num_local_experts == 8
    assert with_shape(tiny_config("gpt2"), "num_hidden_layers=3").n_layer == 3


def test_special_tokens_outside_a_smaller_vocabulary_are_dropped():
    config = with_shape(tiny_config("llama"), "vocab_size=2")
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, None)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("num_hidden_layer=2", "no setting 'num_hidden_layer'\n  Did you mean 'num_hidden_layers'"),
        ("hidden_size", "is not NAME=VALUE"),
        ("hidden_size=abc", "does not fit llama"),
        ("num_attention_heads=3", "does not fit llama"),
        ("num_hidden_layers=0", "must be a positive number"),
    ],
)
def test_bad_shapes_say_what_is_wrong(shape, message):
    with pytest.raises(RecipeError, match=message):
        with_shape(tiny_config("llama"), shape)
