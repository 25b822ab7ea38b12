import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import ModelError, RecipeError
from penstock.machine.known import H200
from penstock.model.flops import token_flops
from penstock.model.load import load_config
from penstock.model.matmul import check_matmul
from penstock.model.rope import check_positions, positions_of
from penstock.plan.architecture import KNOWN, architecture_of, check_fp8, check_rope, from_config
from penstock.plan.layout import parameters
from penstock.plan.memory import Work
from penstock.plan.report import make_plan
from penstock.plan.speed import arithmetic
from penstock.recipe.presets import ARCHITECTURES, PRESETS
from penstock.recipe.recipe import Recipe

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False, "num_experts_per_tok": 2,
    "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 24,
}  # fmt: skip


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("tied", [False, True])
def test_a_config_file_gives_the_models_own_parameters(kind, tied, tmp_path):
    config = AutoConfig.for_model(kind, **SMALL | {"tie_word_embeddings": tied})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = architecture_of(Recipe(model=str(tmp_path)))
    assert [p.size for p in parameters(found)] == [p.numel() for p in model.parameters()]


WINDOWS = [{}, {"sliding_window": 16}, {"sliding_window": None}, {"use_sliding_window": True, "max_window_layers": 1}]


@pytest.mark.parametrize("kind", [kind for kind in KNOWN if kind not in ("llama", "seed_oss")])
@pytest.mark.parametrize("asked", WINDOWS, ids=["as is", "asked for", "none", "of qwen"])
def test_windows_are_those_of_the_model(kind, asked, tmp_path):
    """Whether its config was saved by the library, or says no more than it must."""
    asked = {**SMALL, **asked, "num_hidden_layers": 5}
    config = AutoConfig.for_model(kind, **asked)
    config.save_pretrained(tmp_path)
    if kind == "gpt_oss" and config.sliding_window is None:
        return  # it has no layers without
    with torch.device("meta"):
        flops = token_flops(AutoModelForCausalLM.from_config(config))
    for found in (architecture_of(Recipe(model=str(tmp_path))), from_config({"model_type": kind, **asked}, kind)):
        assert (found.windowed, found.sliding_window or 0) == (flops.windowed, flops.window)


def test_windows_are_planned_as_attention_keeps_to_them():
    """A row of 131,072 tokens of Mistral-7B, of which one attends to 4,096."""
    shape = {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    }  # fmt: skip
    work = Work(1, 131_072, "full", compiled=True)
    within, whole, wide = (
        arithmetic(from_config({**shape, "sliding_window": window}, "mistral"), work, H200).total_s
        for window in (4096, None, 131_072)
    )
    assert within < 0.4 * whole
    assert wide == pytest.approx(whole)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_presets_numbers_survive_the_way_through_a_config(name):
    known = ARCHITECTURES[name]
    found = from_config({"model_type": known.model_type, **known.config_values()}, name)
    assert found.num_parameters() == known.num_parameters()
    assert found.num_active_parameters() == known.num_active_parameters()
    assert (found.sliding_window, found.windowed) == (known.sliding_window, known.windowed)


def test_the_demo_and_a_shape():
    demo = architecture_of(PRESETS["demo"])
    assert 1e6 < demo.num_parameters() < 1e7
    smaller = architecture_of(Recipe(model="meta-llama/Llama-3.1-8B", init="random", shape="num_hidden_layers=2"))
    assert smaller.layers == 2
    assert smaller.hidden == 4096


def test_what_is_not_known_is_refused(tmp_path):
    with pytest.raises(ModelError, match="neither here nor in Hugging Face's cache"):
        architecture_of(Recipe(model="nobody/nothing-here"))
    for model, what in (("/no/such/place", "no such directory"), (str(tmp_path), "has no config.json")):
        with pytest.raises(ModelError, match=what) as caught:
            architecture_of(Recipe(model=model))
        assert "hf download" not in caught.value.remedy
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(RecipeError, match="plan does not know models of type 'gpt2'"):
        architecture_of(Recipe(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        architecture_of(Recipe(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("", ""),
        ("hidden_size=100,num_attention_heads=5,num_key_value_heads=5,head_dim=20", "hidden 100"),
        ("intermediate_size=100,num_attention_heads=2,num_key_value_heads=2,head_dim=18", "intermediate 100"),
        ("intermediate_size=100", ""),
        ("num_hidden_layers=2", "it has no other"),
        ("num_hidden_layers=3", ""),
    ],
)
def test_plan_refuses_fp8_where_training_does(shape, said):
    recipe = replace(PRESETS["demo"], matmul="fp8", init="random", shape=shape or None)
    refusals = []
    for check in (
        lambda: check_fp8(architecture_of(recipe), recipe.model),
        lambda: check_matmul(recipe, load_config(recipe), torch.device("cpu")),
    ):
        try:
            check()
        except ModelError as error:
            refusals.append(str(error))
    assert len(refusals) == (2 if said else 0)
    if said:
        assert said in refusals[0]
        assert all("no product can run in fp8" in refusal for refusal in refusals)
        with pytest.raises(ModelError, match="no product can run in fp8"):
            make_plan(recipe, H200)


@pytest.mark.parametrize("preset", ["llama-8b", "qwen3-14b", "gpt-oss-20b", "phi-4"])
@pytest.mark.parametrize("rope", [None, "as-is", "yarn:2", "linear:1.5"])
@pytest.mark.parametrize("beyond", [0.9, 1.4, 3.0])
def test_plan_knows_the_positions_that_training_refuses(preset, rope, beyond):
    """The same refusal of a scaling; and a note, with the same remedy, where an example could not fill its row."""
    recipe = replace(PRESETS[preset], init="random", rope=rope)
    recipe = replace(recipe, max_length=int(beyond * positions_of(load_config(replace(recipe, rope=None)))))

    def said(check):
        try:
            return check() or ""
        except (RecipeError, ModelError) as error:
            return str(error)

    planned = said(lambda: check_rope(architecture_of(recipe), recipe))
    trained = said(lambda: check_positions(recipe, load_config(recipe), recipe.max_length))
    assert bool(planned) == bool(trained)
    if "scaling of its own" in trained:
        assert planned == trained
    elif trained:
        known, ways = re.search(r"knows ([\d,]+) positions", trained), re.search(r"--rope.*beyond them\.", trained)
        assert known is not None
        assert ways is not None
        assert known[0] in planned
        assert ways[0] in planned


@pytest.mark.parametrize("word", ["rope_type", "type"])  # newer, older
def test_a_config_files_own_scaling_is_known(word, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "llama", **SMALL, "max_position_embeddings": 64,
         "rope_scaling": {word: "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    ))  # fmt: skip
    recipe = Recipe(model=str(tmp_path), max_length=1024)
    assert "knows 256 positions" in check_rope(architecture_of(recipe), recipe)
    with pytest.raises(RecipeError, match="a scaling of its own, yarn"):
        check_rope(architecture_of(recipe), replace(recipe, rope="yarn:2"))


@pytest.mark.parametrize("old", [{}, {"rope_scaling": None}])
def test_a_config_that_names_no_scaling_has_rotary_positions_all_the_same(old, tmp_path):
    config = {"model_type": "llama", **SMALL, "max_position_embeddings": 64, **old}
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = Recipe(model=str(tmp_path), max_length=100)
    assert "--rope yarn:2 scales its positions" in check_rope(architecture_of(recipe), recipe)
    assert not check_rope(architecture_of(recipe), replace(recipe, rope="yarn:2"))
