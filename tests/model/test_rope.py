"""Examples beyond a model's positions are refused, or scaled as asked, in the model that is exported too."""

import dataclasses

import pytest
import torch
from tiny import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.errors import ModelError, RecipeError
from penstock.model.load import load_config, load_tokenizer
from penstock.model.rope import check_positions, positions_of, with_rope
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 100}


def test_positions_count_the_models_own_scaling():
    assert positions_of(tiny_config("llama")) == 128
    assert positions_of(tiny_config("llama", rope_parameters=YARN)) == 400
    known = {
        name: positions_of(load_config(dataclasses.replace(PRESETS[name], init="random")))
        for name in ("llama-8b", "qwen3-14b", "phi-4", "gpt-oss-20b", "seed-oss-36b")
    }
    assert list(known.values()) == [131_072, 40_960, 16_384, 131_072, 524_288]


def test_longer_examples_are_refused_and_longer_rows_are_not():
    config = tiny_config("llama")
    check_positions(Recipe(max_length=4096), config, longest=128)
    check_positions(Recipe(max_length=128), config, longest=5000)
    check_positions(Recipe(max_length=4096, rope="as-is"), config, longest=5000)
    with pytest.raises(ModelError, match="knows 128 positions, and an example would have 300") as error:
        check_positions(Recipe(max_length=4096), config, longest=300)
    assert "--rope yarn:3" in error.value.remedy
    with pytest.raises(ModelError, match="knows 128") as error:
        check_positions(Recipe(max_length=4096, rope="as-is"), tiny_config("gpt2"), longest=3)
    assert "rope" not in error.value.remedy, "learned positions end where they end"


@pytest.mark.parametrize(
    ("rope", "longest", "enough"),
    [
        ("yarn:4", 1024, "yarn:8"),
        ("yarn:4", 513, "yarn:5"),
        ("linear:2.5", 384, "linear:3"),
        ("yarn:1.3", 384, "yarn:3"),
    ],
)
def test_too_small_a_factor_is_refused_with_one_that_is_enough(rope, longest, enough):
    config, asked = tiny_config("llama"), Recipe(max_length=4096, rope=rope)
    with pytest.raises(ModelError, match=f"an example would have {longest:,}") as error:
        check_positions(asked, with_rope(config, asked), longest)
    assert f"--rope {enough} scales" in error.value.remedy
    better = Recipe(max_length=4096, rope=enough)
    check_positions(better, with_rope(config, better), longest)


def test_a_scaling_of_the_models_own_is_not_scaled_again():
    with pytest.raises(ModelError, match="knows 400 positions") as error:
        check_positions(Recipe(max_length=4096), tiny_config("llama", rope_parameters=YARN), longest=500)
    assert error.value.remedy == "--rope as-is goes on beyond them. Or lower --max-length to 400."


@pytest.mark.parametrize("rope", ["yarn:4", "linear:2.5"])
def test_the_scaling_is_in_the_model(rope, tmp_path):
    config = tiny_config("qwen3")
    scaled = with_rope(config, Recipe(rope=rope))
    factor = float(rope.partition(":")[2])
    assert scaled.max_position_embeddings == positions_of(scaled) == 128 * factor
    assert config.max_position_embeddings == 128, "the other one is as it was"
    check_positions(Recipe(max_length=int(128 * factor), rope=rope), scaled, longest=5000)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(scaled)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.rope_parameters == scaled.rope_parameters
    torch.testing.assert_close(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    plain = AutoModelForCausalLM.from_config(config)
    assert not torch.equal(plain.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(("rope", "positions"), [("yarn:4", 4096), ("as-is", 1024), (None, 1024)])
def test_the_tokenizer_knows_as_many_positions_as_the_model(rope, positions, tmp_path):
    recipe = Recipe(rope=rope)
    load_tokenizer(recipe).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == positions == positions_of(load_config(recipe))


def test_what_cannot_be_scaled_is_refused():
    with pytest.raises(RecipeError, match="a scaling of its own, yarn, for 400 positions"):
        with_rope(tiny_config("llama", rope_parameters=YARN), Recipe(rope="yarn:2"))
    with pytest.raises(RecipeError, match="no rotary positions"):
        with_rope(tiny_config("gpt2"), Recipe(rope="yarn:2"))
    for rope in ("", "yarn", "more:2", "yarn:-1"):
        with pytest.raises(RecipeError, match="must be as-is"):
            Recipe(rope=rope)
    for rope in ("yarn:0", "linear:0.5", "yarn:1", "yarn:1.0"):
        with pytest.raises(RecipeError, match="the factor must be greater than 1"):
            Recipe(rope=rope)
