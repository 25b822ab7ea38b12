"""What a resumed run agrees in, and the generators. Whole runs are resumed in test_faults.py and test_damage.py."""

import json
import random

import numpy as np
import pytest
import torch

from penstock.checkpoint.fingerprint import model_fingerprint
from penstock.checkpoint.resume import (
    AS_BEGUN,
    BY_CONTENT,
    FIXED,
    FREE,
    Saved,
    as_begun,
    find_start,
    goes_on_in,
    rng_state,
    set_rng_state,
)
from penstock.checkpoint.store import save
from penstock.errors import CheckpointError
from penstock.offload.saved_tensors import whole
from penstock.plan.report import check_one_gpu
from penstock.recipe.recipe import FIELDS, Recipe, to_dict


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(), torch.rand(3).tolist()


def test_every_generator_goes_on_where_it_was():
    draw()
    state = json.loads(json.dumps(rng_state()))
    expected = draw()
    assert draw() != expected
    set_rng_state(state)
    assert draw() == expected


def test_every_field_is_judged_and_by_one_rule():
    assert set(FIELDS) >= FREE | BY_CONTENT | FIXED
    assert not FREE & BY_CONTENT
    assert not FREE & FIXED
    assert not BY_CONTENT & FIXED


def test_the_fingerprint_of_a_model_tells_names_shapes_and_values_apart():
    def model(*sizes, seed=0):
        torch.manual_seed(seed)
        return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in sizes))

    first = model((3, 4000), (4000, 2))
    prints = [model_fingerprint(first, values=True)]
    with torch.no_grad():
        first[1].weight[-1, -1] += 1
    prints += [model_fingerprint(m, values=True) for m in (first, model((3, 4000), (4000, 2), seed=1), model((2, 3)))]
    assert len(set(prints)) == 4
    same = [model_fingerprint(model((3, 4), seed=seed), values=False) for seed in (0, 1)]
    assert same[0] == same[1], "random weights are known by their seed"
    assert model_fingerprint(model((3, 4)).bfloat16().float(), values=True) == model_fingerprint(
        model((3, 4)).bfloat16(), values=True
    )


def test_a_parameter_with_fewer_rows_than_ranks_is_fingerprinted_by_all(ranks):
    shapes = ((1, 8), (64, 5), (3,))
    (alone,) = ranks("fingerprint", 1, shapes=shapes)
    assert ranks("fingerprint", 2, shapes=shapes) == [alone, alone]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (2,)}, "b: the model has no such tensor"),
        ({"a": (2,), "b": (3,), "c": (1,)}, "c: the checkpoint lacks it"),
        ({"a": (2,), "b": (4,)}, "b is [3] torch.float32 here and [4] torch.float32 in the model"),
    ],
)
def test_all_ranks_refuse_a_checkpoint_of_another_model_alike(ranks, tmp_path, shapes, message):
    tensors = {"weights": [whole("a", torch.ones(2)), whole("b", torch.ones(3))]}
    path = str(save(tmp_path / "checkpoints", 1, tensors, {}, lambda _: None).path)
    first, second = ranks("restoring", 2, checkpoint=path, shapes=shapes)
    assert first == second
    assert first[0] == "CheckpointError"
    assert message in first[1]


def test_a_checkpoint_that_is_a_link_is_still_the_runs_own(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk" / "step-00000004"
    (run / "checkpoints").mkdir(parents=True)
    disk.mkdir(parents=True)
    (run / "checkpoints" / disk.name).symlink_to(disk)
    assert goes_on_in(run, str(run / "checkpoints" / disk.name))
    assert not goes_on_in(run, str(disk))


@pytest.mark.parametrize("place", ["checkpoints/old/step-00000004", "model/step-00000004"])
def test_what_overwriting_would_remove_is_not_gone_on_from(tmp_path, place):
    run, disk = tmp_path / "run", tmp_path / "disk"
    (run / place).mkdir(parents=True)
    disk.symlink_to(run / place)
    for path in (run / place, disk):
        with pytest.raises(CheckpointError, match=r"in the directory that --overwrite clears\n.*Move it out"):
            find_start(run, str(path), overwrite=True)


def test_what_one_gpu_streamed_goes_on_with_several_and_with_resident_weights():
    began = Recipe(weights="streamed", order="layers", inputs="kept", tile="64", recompute="full")
    there = Saved(None, None, to_dict(began), 1, "", "", "", {})
    check_one_gpu(as_begun(Recipe(), there, num_ranks=2), 2)
    assert as_begun(Recipe(), there, num_ranks=2).recompute == "full"
    resident = as_begun(Recipe(weights="resident", order="rows"), there)
    assert (resident.inputs, resident.tile) == ("auto", "auto")
    assert as_begun(Recipe(weights="resident"), there).tile == "64", "since it is computed layer by layer"


@pytest.mark.parametrize("asked", [{"weights": "streamed"}, {"order": "layers"}])
def test_what_was_computed_whole_goes_on_layer_by_layer(asked):
    there = Saved(None, None, to_dict(Recipe(recompute="none")), 1, "", "", "", {})
    assert as_begun(Recipe(), there).recompute == "none"
    assert as_begun(Recipe(**asked), there).recompute == "auto"
    streamed = Saved(None, None, to_dict(Recipe(weights="streamed", recompute="full")), 1, "", "", "", {})
    assert as_begun(Recipe(mode="zerooffload"), streamed).weights == "auto"


def test_what_several_gpus_streamed_row_by_row_one_chooses_anew():
    began = Recipe(weights="30", order="rows", inputs="kept", tile="none", recompute="full")
    there = Saved(None, None, to_dict(began), 1, "", "", "", {}, ranks=16)
    alone = as_begun(Recipe(), there)
    assert {getattr(alone, name) for name in ("weights", "order", "inputs", "tile")} == {"auto"}
    assert alone.recompute == "full"


def test_a_run_goes_on_in_the_tiles_it_began_with():
    def saved(recipe):
        return Saved(None, None, recipe, 1, "", "", "", {})

    begun = to_dict(Recipe(order="layers", tile="64"))
    assert as_begun(Recipe(), saved(begun)).tile == "64"
    assert as_begun(Recipe(tile="none"), saved(begun)).tile == "none", "unless another is asked for"
    assert as_begun(Recipe(), saved({k: v for k, v in begun.items() if k != "tile"})).tile == "none", "before tiles"
    assert as_begun(Recipe(), None) == Recipe()
    other = Recipe(engine="deepspeed", mode="zerooffload")
    begun = {k: v for k, v in to_dict(other).items() if k != "tile"}
    assert as_begun(other, saved(begun)).tile == "auto", "of DeepSpeed, which has none"
    assert "tile" in FREE & set(AS_BEGUN)
