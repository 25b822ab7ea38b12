"""Weights that stream on several GPUs, as they are planned."""

from dataclasses import replace

import pytest

from penstock.machine.known import MACHINES
from penstock.plan.job import Job, Settings
from penstock.plan.predict import predict
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


def test_memory_is_where_rows_lie():
    streamed, resident = plan_of("llama-8b", 32), plan_of("llama-8b", 0)
    buffers = {b.name: b for b in streamed.buffers}
    a = streamed.job.architecture
    layers = 2 * (a.num_parameters() - 2 * a.vocab * a.hidden) / 4
    assert buffers["streamed weights"].num_bytes == pytest.approx(layers, rel=0.01)
    assert buffers["weights"].num_bytes == pytest.approx(2 * 2 * a.vocab * a.hidden / 4, rel=0.01)
    assert "streamed weights" not in {b.name for b in resident.buffers}


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
