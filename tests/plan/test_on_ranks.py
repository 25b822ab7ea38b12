"""Weights that stream on several GPUs, as they are planned."""

from dataclasses import replace

import pytest

from penstock.machine.known import MACHINES
from penstock.plan.job import Job, Settings
from penstock.plan.layout import FORMATS, Chunk, layer_parameters
from penstock.plan.memory import peaks, work_of
from penstock.plan.predict import predict
from penstock.plan.shares import by_unit
from penstock.plan.solve import fitting
from penstock.plan.split import Split
from penstock.recipe.presets import ARCHITECTURES, PRESETS


def plan_of(preset, streamed, gpus=4, rows=4, micro_batch=1, machine="rtx4090", host=2**40, **more):
    job = Job(ARCHITECTURES[PRESETS[preset].model], rows, 4096, compiled=True, weights="auto", **more)
    settings = Settings("fp32", micro_batch, "full", streamed=streamed)
    return predict(job, settings, replace(MACHINES[machine], host_bytes=host), gpus)


@pytest.mark.parametrize(("preset", "layers"), [("seed-oss-36b", 64), ("llama-70b", 80)])
def test_what_fits_no_four_small_gpus_fits_if_its_weights_stream(preset, layers):
    resident, streamed = plan_of(preset, 0), plan_of(preset, layers)
    assert not resident.has_room
    assert streamed.fits
    assert streamed.peak_bytes("gpu") < 24e9


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_weights_come_for_forward_and_backward_of_every_micro_batch_and_gradients_leave_or_add_up(micro_batches):
    plan = plan_of("llama-8b", 32, rows=4 * micro_batches, homes=(("host", 1.0),))
    a = plan.job.architecture
    rows, rest = (a.num_parameters() - 2 * a.vocab * a.hidden) / 4, 2 * a.vocab * a.hidden / 4
    weights = next(c for c in plan.crossings if c.name == "weights")
    assert weights.in_bytes == pytest.approx(2 * micro_batches * 2 * rows + 2 * rest, rel=0.01)
    alone = plan_of("llama-8b", 32, homes=(("host", 1.0),))
    waiting = {1: 0, 2: 2, 3: 4}[micro_batches] * (rows + rest)
    assert plan.peak_step_bytes == pytest.approx(alone.activation_bytes + waiting, rel=0.05)


@pytest.mark.parametrize(
    ("preset", "machine", "gpus", "streamed"),
    [("phi-4", "h100", 2, 0), ("phi-4", "h100", 2, 10), ("gpt-oss-20b", "h100", 2, 12), ("llama-70b", "h100", 4, 40),
     ("qwen3-30b-a3b", "a100", 2, 36), ("qwen3-14b", "rtx5090", 2, 30)],
)  # fmt: skip
@pytest.mark.parametrize("clip", [True, False])
def test_what_has_room_fits_once_it_is_dealt(preset, machine, gpus, streamed, clip):
    """With slots for what streams beside state, and if need be with a little less on the GPU."""
    plan = fitting(plan_of(preset, streamed, gpus, machine=machine, clip=clip))
    assert plan.has_room
    assert plan.fits


def test_slots_are_left_out_where_they_take_the_last_room():
    """State of all that streams is with the host then, as the engine has it."""
    larger = [replace(MACHINES["rtx4090"], gpu_bytes=size * 10**8, host_bytes=2**40) for size in range(100, 400, 3)]
    job, settings = plan_of("llama-8b", 16).job, plan_of("llama-8b", 16).settings
    fitting = [plan for machine in larger if (plan := predict(job, settings, machine, 2)).has_room]
    assert fitting[0].streamed_split.stream == 0 < fitting[-1].streamed_split.stream


def test_units_are_those_that_are_resident():
    plan = plan_of("llama-8b", 30, 2, machine="h100", homes=(("stream", 0.5), ("host", 0.5)))
    cuts = [[Chunk(i, 0, 1, FORMATS["fp32"], 2)] for i in range(291) if i not in plan.streamed]
    assert [len(unit) for unit in by_unit(cuts, plan.job.architecture, 2)] == [1, 9, 9, 1, 1]
    assert sum(c.size for chunks in plan.dealt.values() for c in chunks) == pytest.approx(8.03e9 / 2, rel=0.01)


def test_memory_is_where_rows_lie():
    streamed, resident = plan_of("llama-8b", 32), plan_of("llama-8b", 0)
    buffers = {b.name: b for b in streamed.buffers}
    a = streamed.job.architecture
    layers = 2 * (a.num_parameters() - 2 * a.vocab * a.hidden) / 4
    assert buffers["streamed weights"].num_bytes == pytest.approx(layers, rel=0.01)
    assert buffers["weights"].num_bytes == pytest.approx(2 * 2 * a.vocab * a.hidden / 4, rel=0.01)
    assert "streamed weights" not in {b.name for b in resident.buffers}


@pytest.mark.parametrize(
    ("gpus", "rows", "micro_batch", "taken"), [(2, 4, 2, 12.85), (2, 8, 1, 17.97), (4, 4, 1, 9.23), (4, 8, 1, 10.62)]
)
def test_memory_is_what_ranks_took_on_an_h200(gpus, rows, micro_batch, taken):
    """benchmarks/results/2026-11-18-h200/ranks/streamed.txt; state of layers was on the host."""
    eight = replace(ARCHITECTURES[PRESETS["llama-8b"].model], layers=8)
    job = Job(eight, rows, 4096, compiled=True, weights="auto")
    plan = predict(job, Settings("fp32", micro_batch, "full", streamed=8), MACHINES["h200"], gpus)
    away = plan.streamed_split
    params = away.stream + away.host
    split = replace(plan.split, stream=plan.split.stream - away.stream, host=plan.split.host - away.host + params)
    plan = replace(plan, split=split, streamed_split=Split(0.0, 0.0, params, 0.0))
    assert plan.peak_bytes("gpu") == pytest.approx(taken * 1e9, rel=0.005)


def test_rows_come_where_a_layer_is_gathered():
    """Beside three whole layers, where those are more than what the loss takes."""
    job = Job(replace(ARCHITECTURES[PRESETS["llama-8b"].model], vocab=1000), 4, 256, compiled=True, weights="auto")
    stays, comes = (work_of(job, Settings("fp32", 1, "full", streamed=count), 4) for count in (0, 32))
    a, layer = job.architecture, 2 * sum(p.size for p in layer_parameters(job.architecture))
    assert peaks(a, comes, 4).activation_bytes == peaks(a, stays, 4).activation_bytes + layer / 4
    assert peaks(a, comes, 1) == peaks(a, stays, 1)
    assert "unit slots" not in {b.name for b in plan_of("llama-8b", 32).buffers}
    assert "unit slots" in {b.name for b in plan_of("llama-8b", 32, gpus=1).buffers}


@pytest.mark.parametrize("machine", ["gb10", "mi300a"])
def test_one_memory_holds_what_streams_too(machine):
    plan = plan_of("llama-8b", 32, gpus=2, machine=machine, host=128 * 10**9)
    assert plan.fits
    assert plan.has_room
    assert not plan_of("llama-8b", 32, gpus=2, machine=machine, host=60 * 10**9).has_room


def test_in_backward_gradients_leave_only_for_updates_on_the_host():
    for away, share in ((("stream", 1.0),), 0.0), ((("host", 1.0),), 1.0):
        plan = plan_of("llama-8b", 32, homes=away, clip=False, update="in-backward")
        (gradients,) = [c.out_bytes for c in plan.crossings if c.name == "gradients"] or [0.0]
        assert gradients == pytest.approx(share * 2 * plan.num_params / 4, rel=0.01)


def test_links_share_the_memory_of_their_host_and_without_a_link_of_their_own_gpus_share_them():
    alone, four = plan_of("llama-8b", 32, gpus=1), plan_of("llama-8b", 32)
    assert four.seconds.link > alone.seconds.link * sum(c.in_bytes for c in four.crossings) / sum(
        c.in_bytes for c in alone.crossings
    )
    slow, fast = plan_of("llama-70b", 80), plan_of("llama-70b", 80, machine="h100")
    busy = slow.seconds.link + slow.seconds.exchange
    assert slow.seconds.step >= busy
    assert fast.seconds.step < fast.seconds.link + fast.seconds.exchange + fast.seconds.forward + fast.seconds.backward
