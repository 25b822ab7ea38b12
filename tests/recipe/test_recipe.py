import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RecipeError
from penstock.recipe.file import find_recipe
from penstock.recipe.lists import parse_homes
from penstock.recipe.recipe import FIELDS, Recipe, to_dict, with_values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0), ("lr", -1e-5), ("lr", float("nan")), ("eps", 0.0), ("weight_decay", -0.1), ("warmup", 5.0),
        ("warmup", -0.1), ("betas", (0.9, 1.0)), ("max_grad_norm", -1.0), ("epochs", 0.0), ("epochs", float("inf")),
        ("max_steps", -1), ("batch_size", 0), ("micro_batch_size", -1), ("micro_batch_size", 5), ("max_length", 1),
        ("data_percent", 0.0), ("data_percent", 101.0), ("validation", 0.6), ("eval_every", -1), ("eval_every", 5),
        ("log_every", 0), ("skip_limit", 0), ("seed", -1), ("recompute", "8"), ("shape", "hidden_size=8"),
        ("name", " "), ("name", "a/b"), ("name", ".."), ("data", "a\0"), ("homes", "disk"),
        ("homes", "gpu=0.5,disk=0.5"), ("homes", "gpu=half"),
        ("homes", "gpu=2"), ("homes", "gpu=0.5,host=0.25"), ("homes", "gpu=0.2,gpu=0.8"), ("update", "in-backward"),
        ("cpu_adam_cores", 0.0), ("cpu_adam_cores", 1.5),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RecipeError, match=rf"^{field} = "):
        Recipe(**{field: value})


def test_zerooffload_leaves_no_choice_of_homes_and_update():
    assert Recipe(mode="zerooffload", homes="host").mode == "zerooffload"
    with pytest.raises(RecipeError, match=r"^homes = 'gpu': zerooffload keeps all state in host"):
        Recipe(mode="zerooffload", homes="gpu")
    with pytest.raises(RecipeError, match=r"^update = 'in-backward': zerooffload updates after backward"):
        Recipe(mode="zerooffload", update="in-backward", max_grad_norm=0.0)


def test_homes_are_read_as_shares():
    assert parse_homes("gpu=0.75, host=0.25") == {"gpu": 0.75, "host": 0.25}
    assert parse_homes("gpu=0.33,stream=0.33,host=0.33") is None
    assert parse_homes("gpu=0.333,stream=0.333,host=0.333") is not None, "people round"
    assert parse_homes("stream") == "stream"


def test_yaml_numbers_written_without_a_dot_are_numbers():
    assert with_values(Recipe(), {"lr": "2e-5"}, "my.yaml").lr == 2e-5
    assert with_values(Recipe(), {"epochs": 3}, "my.yaml").epochs == 3.0


def test_yaml_numbers_are_text_where_a_field_takes_text():
    recipe = with_values(Recipe(), {"weights": 16, "tile": 16384, "revision": 1234567}, "my.yaml")
    assert (recipe.weights, recipe.tile, recipe.revision) == ("16", "16384", "1234567")
    for value in (True, 1.5):
        with pytest.raises(RecipeError, match=f"my.yaml: weights: {value} is not text"):
            with_values(Recipe(), {"weights": value}, "my.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 1}, "unknown key 'learning_rate'"),
        ({"batchsize": 1}, "Did you mean 'batch_size'"),
        ({"batch_size": "four"}, "my.yaml: batch_size: 'four' is not a whole number"),
        ({"batch_size": 4.5}, "4.5 is not a whole number"),
        ({"batch_size": True}, "True is not a whole number"),
        ({"packing": "yes"}, "'yes' is not true or false"),
        ({"betas": [0.9]}, r"\[0.9\] is not a list of 2 numbers"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"recompute": "some"}, "my.yaml: recompute = 'some': must be auto, none, selected, full"),
        ({"lr": None}, "None is not a number"),
        ({"lr": 10**400}, "0 is not a number"),
        ({"warmup": 100}, "my.yaml: warmup = 100.0: must be between 0 and 1"),
    ],
)
def test_a_wrong_yaml_value_names_file_field_and_type(values, message):
    with pytest.raises(RecipeError, match=message):
        with_values(Recipe(), values, "my.yaml")


@given(st.sampled_from(["full", "none", "auto", "selected:3"]), st.floats(1e-8, 1.0), st.booleans(), st.integers(1, 99))
def test_a_recipe_survives_being_written_down(recompute, lr, packing, batch_size):
    recipe = Recipe(recompute=recompute, lr=lr, packing=packing, batch_size=batch_size)
    assert with_values(Recipe(), to_dict(recipe), "x") == recipe


def test_every_field_has_a_help_text():
    source = __import__("inspect").getsource(Recipe)
    for name in FIELDS:
        after = source.split(f"\n    {name}: ")[1].splitlines()[1].strip()
        assert len(after.removeprefix('"""')) == len(after) - 3 > 9, name


def test_run_dir_follows_the_name():
    assert str(Recipe(name="mine").run_dir) == "runs/mine"
    assert str(dataclasses.replace(Recipe(), output_dir="x/y").run_dir) == "x/y"
    assert Recipe(output_dir="~/x").run_dir == Path.home() / "x"
    assert str(Recipe(output_dir="~nobody-here/x").run_dir) == "~nobody-here/x"


def test_a_word_that_is_no_preset_may_be_data_or_a_model(tmp_path):
    data = tmp_path / "my data.jsonl"
    data.touch()
    for word, remedy in {
        str(data): f"Data is named with --data '{data}'.",
        str(tmp_path): f"A model is named with --model {tmp_path}, data with --data.",
        "meta-llama/Llama-3.1-8B": "A model is named with --model meta-llama/Llama-3.1-8B, data with --data.",
        "lama-8b": "Did you mean 'llama-8b'? Or name a .yaml file.",
    }.items():
        with pytest.raises(RecipeError, match="no such preset") as caught:
            find_recipe(word)
        assert caught.value.remedy == remedy
