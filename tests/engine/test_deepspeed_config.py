"""DeepSpeed's JSON from a recipe: the reference's values, every field in its place, one's own file over it."""

import dataclasses
import json

import pytest
from torch import nn

from penstock.engine.deepspeed import leaf_classes
from penstock.engine.deepspeed_config import deepspeed_json, settled
from penstock.engine.ranks import World
from penstock.errors import RecipeError
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe

THEIRS = Recipe(engine="deepspeed", dtype="bf16")


def test_it_is_the_references_configuration():
    recipe = dataclasses.replace(PRESETS["llama-8b"], engine="deepspeed", dtype="bf16", max_grad_norm=0.0)
    assert deepspeed_json(recipe, World()) == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 400_000_000,
            "sub_group_size": 400_000_000,
            "offload_optimizer": {
                "device": "cpu",
                "pin_memory": True,
                "ratio": 0.8,
                "super_offload": True,
                "cpuadam_cores_perc": 0.9,
            },
        },
        "wall_clock_breakdown": False,
    }


@pytest.mark.parametrize(
    ("changes", "path", "value"),
    [
        ({"offload_ratio": 0.3}, "zero_optimization.offload_optimizer.ratio", 0.3),
        ({"bucket_size": 7}, "zero_optimization.reduce_bucket_size", 7),
        ({"bucket_size": 7}, "zero_optimization.sub_group_size", 7),
        ({"param_offload": "cpu"}, "zero_optimization.offload_param.device", "cpu"),
        ({"param_offload": "nvme", "nvme_path": "/disk"}, "zero_optimization.offload_param.nvme_path", "/disk"),
        ({"mode": "zerooffload"}, "zero_optimization.offload_optimizer.super_offload", None),
        ({"cpu_adam_cores": 0.5}, "zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.5),
        ({"max_grad_norm": 3.0}, "gradient_clipping", 3.0),
        ({"micro_batch_size": 2}, "train_micro_batch_size_per_gpu", 2),
        ({"reduce_dtype": "fp32"}, "communication_data_type", "fp32"),
        ({"dtype": "fp32"}, "bf16.enabled", False),
    ],
)
def test_every_field_has_its_place(changes, path, value):
    def look(recipe):
        found = deepspeed_json(recipe, World())
        for part in path.split("."):
            found = found.get(part, {})
        return None if found == {} else found

    assert look(dataclasses.replace(THEIRS, **changes)) == value != look(THEIRS)


@pytest.mark.parametrize(
    ("changes", "ranks", "whole", "at_once", "micro_batches"),
    [
        ({"micro_batch_size": 1}, 1, 4, 1, 4),
        ({"micro_batch_size": 1}, 2, 4, 1, 2),
        ({"micro_batch_size": 1, "batch_size": 3}, 2, 4, 1, 2),  # rounded up: DeepSpeed wants their product
        ({}, 4, 4, 1, 1),
    ],
)
def test_the_batch_is_that_of_the_run_however_it_is_cut(changes, ranks, whole, at_once, micro_batches, tmp_path):
    recipe = dataclasses.replace(THEIRS, **changes)
    found = deepspeed_json(recipe, World(0, ranks, 0, ranks))
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [found[name] for name in names] == [whole, at_once, micro_batches]
    file = own(tmp_path, {"train_batch_size": recipe.batch_size, "gradient_accumulation_steps": 1}, **changes)
    assert deepspeed_json(file, World(0, ranks, 0, ranks)) == found


def test_ranks_multiply_the_batch_that_deepspeed_checks():
    """Their product must be exact; a rank runs its share of the batch at once."""
    found = deepspeed_json(THEIRS, World(1, 2, 1, 2))
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (4, 2)


def own(tmp_path, values, **changes):
    path = tmp_path / "own.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return dataclasses.replace(THEIRS, deepspeed_config=str(path), **changes)


def offload(**values):
    return {"zero_optimization": {"offload_optimizer": values}}


@pytest.mark.parametrize(
    ("section", "mode"),
    [
        ({"device": "cpu", "ratio": 0.9, "super_offload": True}, "superoffload"),
        ({"device": "cpu", "ratio": 0.9}, "zerooffload"),  # the documented way back
        ({"device": "cpu", "super_offload": False}, "zerooffload"),
        ({"super_offload": False}, "zerooffload"),
        ({"device": "cpu", "super_offload": "auto"}, "superoffload"),
        ({"ratio": 0.5}, "superoffload"),  # only changes a value
    ],
)
def test_the_file_decides_the_mode(tmp_path, section, mode):
    recipe = own(tmp_path, offload(**section))
    assert settled(recipe).mode == mode
    assert settled(settled(recipe)) == settled(recipe)
    made = deepspeed_json(recipe, World())["zero_optimization"]["offload_optimizer"]
    assert bool(made.get("super_offload")) == (mode == "superoffload")


def test_a_mode_that_was_asked_for_is_not_overruled(tmp_path):
    recipe = own(tmp_path, offload(device="cpu", super_offload=True), mode="zerooffload")
    with pytest.raises(RecipeError, match=r"super_offload is true in the file(.|\n)*Leave --mode out"):
        settled(recipe)


def test_a_section_with_a_device_is_whole_and_one_without_is_not(tmp_path):
    whole = deepspeed_json(own(tmp_path, offload(device="cpu", pin_memory="auto"), offload_ratio=0.9), World())
    assert whole["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    part = deepspeed_json(own(tmp_path, offload(pin_memory=False), offload_ratio=0.9), World())
    assert part["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu", "pin_memory": False, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "ratio", "cores"),
    [
        ({"ratio": 0.5}, 0.5, 0.9),
        ({"device": "cpu", "ratio": 0.5, "cpuadam_cores_perc": 0.25}, 0.5, 0.25),
        ({"device": "cpu"}, 1.0, 0.9),
        ({"device": "cpu", "ratio": "auto"}, 0.3, 0.9),
        ({"pin_memory": False}, 0.3, 0.9),
    ],
)
def test_the_recipe_has_the_shares_that_the_file_has(tmp_path, section, ratio, cores):
    found = settled(own(tmp_path, offload(**section), offload_ratio=0.3))
    assert (found.offload_ratio, found.cpu_adam_cores) == (ratio, cores)
    made = deepspeed_json(found, World())["zero_optimization"]["offload_optimizer"]
    assert made.get("ratio", 1.0) == ratio


@pytest.mark.parametrize(("enabled", "dtype"), [(True, "bf16"), (False, "fp32"), ("auto", "auto")])
def test_the_file_decides_the_precision_that_the_recipe_leaves_open(tmp_path, enabled, dtype):
    recipe = own(tmp_path, {"bf16": {"enabled": enabled}}, dtype="auto")
    assert settled(recipe).dtype == dtype
    assert deepspeed_json(recipe, World())["bf16"]["enabled"] == (dtype == "bf16")


def test_the_file_decides_where_weights_lie(tmp_path):
    on_host = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    assert settled(own(tmp_path, on_host)).param_offload == "cpu"
    on_disk = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/disk"}}}
    assert settled(own(tmp_path, on_disk)).nvme_path == "/disk"
    with pytest.raises(RecipeError, match="Say it in one of the two"):
        settled(own(tmp_path, on_host, param_offload="nvme", nvme_path="/disk"))


def test_ones_own_values_replace_generated_ones_and_the_rest_stays(tmp_path):
    values = {
        "train_batch_size": "auto",
        "zero_optimization": {"overlap_comm": True, "offload_optimizer": {"ratio": 0.5, "pin_memory": "auto"}},
        "flops_profiler": {"enabled": True},
        "fp16": {"enabled": False},
    }
    merged, generated = deepspeed_json(own(tmp_path, values), World()), deepspeed_json(THEIRS, World())
    generated["zero_optimization"]["overlap_comm"] = True
    generated["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    assert merged == {**generated, "flops_profiler": {"enabled": True}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "optimizer: the recipe decides this(.|\n)*--lr"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: the recipe decides this(.|\n)*--warmup"),
        ({"train_batch_size": 32}, "train_batch_size = 32, and by the recipe it is 4(.|\n)*--batch-size"),
        ({"gradient_clipping": 5.0}, "gradient_clipping(.|\n)*--max-grad-norm"),
        ({"fp16": {"enabled": True}}, "fp16: the recipe decides this"),
        ({"bf16": {"enabled": False}}, "bf16: the recipe decides this(.|\n)*--dtype"),
        ({"zero_optimization": {"stage": 2}}, "stage is not 3"),
        ({"zero_optimization": 3}, "zero_optimization must be a section"),
        (offload(device="nvme"), "offload_optimizer.device is 'nvme'(.|\n)*on the host"),
        (offload(ratio=1.5), "offload_ratio = 1.5: must be between 0 and 1"),
        (offload(ratio="all"), "offload_optimizer.ratio is 'all'"),
        (offload(super_offload="yes"), "super_offload is 'yes'"),
        ({"zero_optimization": {"offload_optimizer": True}}, "offload_optimizer must be a section"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "'disk' is not none, cpu or nvme"),
        ({"gradient_accumulation_steps": 2}, "by the recipe it is 1(.|\n)*--micro-batch-size"),
        ("[1]", "must hold one JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_what_the_recipe_decides_is_not_ignored_but_refused(tmp_path, values, message):
    with pytest.raises(RecipeError, match=message):
        deepspeed_json(own(tmp_path, values), World())


def test_a_file_that_is_not_there():
    with pytest.raises(RecipeError, match=r"nowhere\.json: cannot be read"):
        deepspeed_json(dataclasses.replace(THEIRS, deepspeed_config="nowhere.json"), World())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "penstock", "deepspeed_config": "a.json"}, "only the engine deepspeed knows it"),
        ({"engine": "penstock", "param_offload": "cpu"}, "only the engine deepspeed knows it"),
        ({"engine": "penstock", "leaf_module": "LlamaMLP"}, "only the engine deepspeed knows it"),
        ({"param_offload": "nvme"}, "goes with param_offload = nvme"),
        ({"nvme_path": "/disk"}, "goes with param_offload = nvme"),
        ({"offload_ratio": 1.5}, "between 0 and 1"),
        ({"bucket_size": 0}, "must be positive"),
        ({"homes": "stream"}, "offload_ratio"),
        ({"states": "int8"}, "fp32 moments"),
        ({"update": "in-backward", "max_grad_norm": 0.0}, "DeepSpeed chooses"),
        ({"save_every": 5}, "cannot save this run"),
        ({"save_every": 5, "mode": "zerooffload", "param_offload": "nvme", "nvme_path": "/disk"}, "cannot save"),
    ],
)
def test_recipes_that_this_engine_cannot_run(changes, message):
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(THEIRS, **changes)


def test_leaf_classes_are_those_that_are_known_and_those_that_are_named():
    class GptOssExperts(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), GptOssExperts(2, 2))
    assert leaf_classes(model, THEIRS) == [GptOssExperts]
    assert leaf_classes(model, dataclasses.replace(THEIRS, leaf_module="Linear, Sequential")) == [
        GptOssExperts, nn.Linear, nn.Sequential
    ]  # fmt: skip
    with pytest.raises(RecipeError, match=r"no module of the class 'Linaer'(.|\n)*Did you mean 'Linear'"):
        leaf_classes(model, dataclasses.replace(THEIRS, leaf_module="Linaer"))


def test_zerooffload_saves():
    assert dataclasses.replace(THEIRS, mode="zerooffload", save_every=5).save_every == 5


def test_presets_carry_the_references_ratios_and_buckets():
    ratios = {name: recipe.offload_ratio for name, recipe in PRESETS.items() if recipe.offload_ratio != 1.0}
    large = ("qwen3-14b", "phi-4", "gpt-oss-20b", "seed-oss-36b", "qwen3-30b-a3b", "llama-70b")
    assert ratios == {"llama-8b": 0.8, **dict.fromkeys(large, 0.9)}
    assert {n for n, r in PRESETS.items() if r.bucket_size != 400_000_000} == {"gpt-oss-20b"}
    assert PRESETS["gpt-oss-20b"].bucket_size == 800_000_000
