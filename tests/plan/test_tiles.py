"""Tiles in the plan: they take less, cost a little, and are chosen where rows are long or nothing else fits."""

import dataclasses

import pytest

from penstock.machine.known import MACHINES
from penstock.plan.job import Settings
from penstock.plan.memory import Work, in_flight_bytes, saved_in_layer
from penstock.plan.predict import predict
from penstock.plan.report import headline, job_on, make_plan, with_recompute
from penstock.plan.speed import arithmetic
from penstock.plan.tiles import sum_bytes, sum_traffic, tiled_bytes
from penstock.recipe.presets import ARCHITECTURES, PRESETS

H200 = dataclasses.replace(MACHINES["h200"], host_bytes=125 * 2**30)
NAMES = [name for name in PRESETS if name != "demo"]


def long_row(name, length, **changes):
    return dataclasses.replace(PRESETS[name], batch_size=1, max_length=length, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_takes_a_few_times_its_input(name):
    a = ARCHITECTURES[PRESETS[name].model]
    work = Work(1, 131_072, "full", tile=16_384)
    whole = saved_in_layer(a, work) + in_flight_bytes(a, work)
    row = 2 * work.tokens * max(a.hidden, a.heads * a.head_dim)
    tiled = tiled_bytes(a, work) - sum_bytes(a, work)
    assert tiled < 0.75 * whole
    assert tiled < 15 * row
    assert tiled_bytes(a, dataclasses.replace(work, tile=2048)) <= tiled_bytes(a, work)


def test_what_is_done_twice_costs_time():
    a = ARCHITECTURES[PRESETS["llama-8b"].model]
    seconds = [arithmetic(a, Work(1, 131_072, "full", tile=tile), H200).total_s for tile in (0, 16_384, 2048)]
    assert seconds == sorted(seconds)
    assert seconds[1] < 1.02 * seconds[0]
    assert sum_traffic(a, Work(1, 4096, "full", tile=4096)) == 0


def test_the_plan_chooses_tiles_where_nothing_fits_without():
    recipe = with_recompute(long_row("llama-8b", 393_216), H200)
    assert (recipe.tile, recipe.inputs) == ("16384", "parked")
    plan = make_plan(recipe, H200)
    assert plan.fits
    assert "tiles of 16,384 tokens" in headline(plan)
    without = dataclasses.replace(recipe, tile="none")
    assert not make_plan(without, H200).fits


def test_a_long_row_on_a_small_gpu_has_tiles():
    """A whole layer of it takes 14 GB while its MLP runs backward."""
    recipe = with_recompute(long_row("llama-8b", 65_536, gpu_memory="24GB"), H200)
    assert recipe.tile == "16384"
    assert make_plan(recipe, H200).fits


def test_ordinary_rows_have_none():
    recipe = with_recompute(dataclasses.replace(PRESETS["llama-8b"], weights="streamed"), H200)
    assert recipe.tile == "none"


def test_a_tile_that_is_named_is_planned():
    recipe = long_row("llama-8b", 65_536, order="layers", tile="4096")
    job = job_on(recipe, H200)
    assert job.tile_choices == [(4096,)]
    assert make_plan(recipe, H200).settings.tile == 4096
    small, whole = (predict(job, Settings("fp32", 1, "full", 32, "layers", "parked", tile), H200) for tile in (4096, 0))
    assert small.activation_bytes < whole.activation_bytes


def test_half_a_million_tokens_save_fewer_inputs():
    """137 GB of inputs do not fit the host: those of every fourth layer do, and the layers between cost a forward."""
    recipe = with_recompute(long_row("llama-8b", 524_288), H200)
    assert recipe.inputs in ("parked:2", "parked:4")
    plan = make_plan(recipe, H200)
    assert plan.fits
    parked = next(b.num_bytes for b in plan.buffers if b.name == "parked inputs")
    every = plan.settings.every
    assert parked == 32 // every * 524_288 * 4096 * 2
    assert next(c for c in plan.crossings if c.name == "inputs").in_bytes == parked
    all_saved = predict(plan.job, dataclasses.replace(plan.settings, inputs="parked"), H200)
    assert plan.seconds.recompute > all_saved.seconds.recompute * 1.4
    assert plan.input_bytes > all_saved.input_bytes, "those between are on the GPU together"
    assert f"inputs parked:{every}" in headline(plan)


def test_rows_of_ordinary_length_save_all_inputs():
    assert job_on(PRESETS["llama-8b"], H200).input_choices == [("kept", "parked")]
