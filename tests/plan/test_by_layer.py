"""A step layer by layer against sums by hand, against what was measured, and its promises on invented machines."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.machine.known import H200, MACHINES
from penstock.plan import memory
from penstock.plan.job import Job, Settings
from penstock.plan.layout import ALIGNMENT, UNIT_SLOTS, layer_parameters, padded, unit_buffers, unit_bytes
from penstock.plan.predict import QUEUE, gpu_shortage, predict
from penstock.plan.solve import Free, solve
from penstock.recipe.presets import ARCHITECTURES, PRESETS, Architecture

LLAMA_8B = ARCHITECTURES["meta-llama/Llama-3.1-8B"]
QWEN3_14B = ARCHITECTURES["Qwen/Qwen3-14B"]
LLAMA_70B = ARCHITECTURES[PRESETS["llama-70b"].model]
LARGE_HOST = replace(H200, host_bytes=2 * 2**40)


def streamed(architecture, rows, *, count=None, order="layers", inputs="kept", states="fp32", micro=None):
    count = architecture.layers if count is None else count
    return Settings(states, micro or rows, "full", count, order, inputs)


def parts(plan, place):
    return {b.name: b.num_bytes for b in plan.buffers if b.place == place}


# --- by hand ------------------------------------------------------------------------------------------------------


def test_llama_8b_by_hand():
    """A layer: 2 x 4096 x 4096 + 2 x 4096 x 1024 + 3 x 4096 x 14336 + 2 x 4096; tables of 128,256 x 4096 twice."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    around = 2 * 128_256 * 4096 + 4096
    job = Job(LLAMA_8B, 8, 4096, compiled=True, homes=(("host", 1.0),))
    plan = predict(job, streamed(LLAMA_8B, 8, count=20, inputs="parked", micro=2), LARGE_HOST)
    assert plan.fits
    gpu, host = parts(plan, "gpu"), parts(plan, "host")
    assert gpu["weights"] == 2 * (around + 12 * layer)
    assert gpu["unit slots"] == 3 * 2 * layer
    assert host["streamed weights"] == 20 * 2 * layer
    assert host["gradient landings"] == 20 * 2 * layer
    assert host["pinned copies"] == 2 * 2 * (around + 12 * layer)
    assert host["host state"] == 10 * (around + 32 * layer)
    assert host["parked inputs"] == 32 * 8 * 4096 * 4096 * 2
    assert "streamed state" not in host
    weights, gradients, inputs = plan.crossings
    assert weights.in_bytes == 2 * (20 + 20 - UNIT_SLOTS) * layer + 2 * (around + 12 * layer)
    assert (weights.out_bytes, gradients.in_bytes) == (0, 0)
    assert gradients.out_bytes == 2 * (around + 32 * layer)
    assert inputs.in_bytes == inputs.out_bytes == host["parked inputs"]


def test_rows_carry_weights_for_every_micro_batch():
    job = Job(LLAMA_8B, 8, 4096, compiled=True, homes=(("host", 1.0),))
    once, often = (
        predict(job, streamed(LLAMA_8B, 8, order=order, micro=2), LARGE_HOST) for order in ("layers", "rows")
    )
    up = 2 * (LLAMA_8B.num_parameters() - 32 * once.job.sizes[1])  # smaller than all that is resident
    first, second = (next(c for c in plan.crossings if c.name == "weights").in_bytes for plan in (once, often))
    assert 3.5 * first - 4 * up < second <= 4 * first
    assert often.peak_bytes("gpu") > once.peak_bytes("gpu"), "its sums are there from one micro-batch to the next"
    assert once.input_bytes > 0


def test_inputs_of_the_whole_batch_are_kept_or_parked():
    job = Job(LLAMA_8B, 16, 4096, compiled=True)
    kept, parked = (predict(job, streamed(LLAMA_8B, 16, micro=2, inputs=i), LARGE_HOST) for i in ("kept", "parked"))
    every = 32 * 16 * 4096 * 4096 * 2
    assert parts(kept, "gpu")["saved inputs"] == every
    assert parts(parked, "host")["parked inputs"] == every
    assert kept.peak_step_bytes - parked.peak_step_bytes > 0.8 * every
    in_flight = 4 * 2 * 4096 * 4096 * 2
    assert parts(parked, "gpu")["saved inputs"] == 16 * 4096 * 4096 * 2 + in_flight


@pytest.mark.parametrize(("compiled", "rows"), [(True, 6), (False, 5)])
def test_compiled_the_last_micro_batch_has_as_many_rows_as_the_others(compiled, rows):
    """Five rows, two at once: inputs of an empty one are kept too, if layers do not go row by row."""
    job = Job(LLAMA_8B, 5, 4096, compiled=compiled)
    kept, in_turn = (
        parts(predict(job, streamed(LLAMA_8B, 2, order=order), LARGE_HOST), "gpu")["saved inputs"]
        for order in ("layers", "rows")
    )
    assert (kept, in_turn) == (32 * rows * 4096 * 4096 * 2, 32 * 2 * 4096 * 4096 * 2)


def test_state_that_travels_with_its_weight():
    """Half of the streamed layers in `stream`: state, weight and gradient come, state and weight go."""
    layer = sum(p.size for p in layer_parameters(LLAMA_8B))
    around = LLAMA_8B.num_parameters() - 32 * layer
    homes = (("stream", 0.5), ("host", 0.5))
    plans = [
        predict(Job(LLAMA_8B, 4, 4096, clip=clip, homes=homes), streamed(LLAMA_8B, 4), LARGE_HOST)
        for clip in (True, False)
    ]
    weights, state, gradients = plans[0].crossings
    assert state.in_bytes == state.out_bytes == 10 * (16 * layer + around / 2)
    assert gradients.in_bytes == 2 * 16 * layer
    assert gradients.out_bytes == 2 * (32 * layer + around / 2)
    assert weights.out_bytes == 2 * 16 * layer
    assert weights.in_bytes == 2 * (32 + 29 + 16) * layer + around
    assert parts(plans[0], "host")["gradient landings"] == 2 * 32 * layer
    in_backward = next(c for c in plans[1].crossings if c.name == "gradients")
    assert (in_backward.in_bytes, in_backward.out_bytes) == (0, 2 * (16 * layer + around / 2)), "made where it is used"
    assert parts(plans[1], "host")["gradient landings"] < 2 * 20 * layer


def test_state_of_streamed_layers_is_never_on_the_gpu():
    for homes in ((), (("gpu", 1.0),), (("gpu", 0.5), ("stream", 0.5))):
        plan = predict(Job(LLAMA_8B, 4, 4096, homes=homes), streamed(LLAMA_8B, 4, count=24), LARGE_HOST)
        assert plan.fits
        assert plan.streamed_split.gpu == 0
        assert not {c.parameter for c in plan.dealt["gpu"]} & set(plan.streamed)
    assert len(plan.streamed) == 24 * len(layer_parameters(LLAMA_8B))


@given(st.lists(st.lists(st.integers(1, 10**7), min_size=1, max_size=9), max_size=9), st.sampled_from([2, 4]))
def test_units_and_slots(units, width):
    """A slot holds any unit; all units lie in host memory; no more slots than units."""
    found = {b.name: b for b in unit_buffers(units, width)}
    if not units:
        assert found == {}
        return
    sizes = [unit_bytes(unit, width) for unit in units]
    for unit, size in zip(units, sizes, strict=True):
        assert size % ALIGNMENT == 0
        assert sum(unit) * width <= size < sum(unit) * width + ALIGNMENT * len(unit)
        assert size == sum(padded(width * n) for n in unit)
    slots = found["unit slots"]
    assert slots.num_bytes == min(UNIT_SLOTS, len(units)) * max(sizes)
    assert slots.num_bytes <= UNIT_SLOTS * max(sizes)
    assert found["streamed weights"].num_bytes == sum(sizes)
    assert (slots.place, found["streamed weights"].place) == ("gpu", "host")


# --- as measured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "step_s"), [(LLAMA_8B, 1.745), (QWEN3_14B, 3.201), (LLAMA_70B, 14.80)], ids=["8b", "14b", "70b"]
)
def test_forward_and_backward_of_streamed_weights_as_measured(architecture, step_s):
    """4 x 4096 tokens on the H200, without updates, 2026-11-16."""
    machine = replace(LARGE_HOST, host_params_per_s=1e15, masters_per_s=1e15)
    plan = predict(
        Job(architecture, 4, 4096, compiled=True, homes=(("host", 1.0),)), streamed(architecture, 4), machine
    )
    assert plan.fits
    s = plan.seconds
    alone = s.step - s.exposed + max(0.0, s.exposed - s.update)
    assert alone == pytest.approx(step_s, rel=0.05)


@pytest.mark.parametrize(("rows", "step_s"), [(8, 4.012), (16, 6.905)])
def test_whole_steps_of_llama_8b_as_measured(rows, step_s):
    """Exact state in host memory, updated as a whole at 5.6 G parameters a second; inputs kept."""
    machine = replace(LARGE_HOST, host_params_per_s=5.6e9, masters_per_s=0.0)
    plan = predict(Job(LLAMA_8B, rows, 4096, compiled=True, homes=(("host", 1.0),)), streamed(LLAMA_8B, rows), machine)
    assert plan.seconds.step == pytest.approx(step_s, rel=0.05)


@pytest.mark.parametrize(
    ("architecture", "rows", "micro", "states", "step_s", "gpu_gb", "host_gb"),
    [
        (LLAMA_8B, 8, 2, "fp32", 3.609, 20.0, 108.7),
        (LLAMA_8B, 16, 4, "bf16", 6.726, 18.36, 89.6),
        (QWEN3_14B, 8, 2, "int8", 6.426, 19.09, 98.1),
    ],
    ids=["fp32", "bf16", "int8, not clipped"],
)
def test_whole_steps_in_24_gb_as_measured(architecture, rows, micro, states, step_s, gpu_gb, host_gb):
    """All layers streamed, inputs parked: benchmarks/results/2026-11-16-h200 and 2026-11-17-h200, streamed."""
    settings = streamed(architecture, micro, inputs="parked", states=states)
    job = Job(architecture, rows, 4096, compiled=True, clip=states != "int8")
    plan = predict(job, settings, replace(H200, gpu_bytes=24 * 10**9))
    assert plan.fits
    assert plan.seconds.step == pytest.approx(step_s, rel=0.05)
    assert plan.peak_bytes("gpu") == pytest.approx(gpu_gb * 1e9, rel=0.03)
    assert plan.peak_bytes("host") == pytest.approx(host_gb * 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("preset", "layers", "rows", "micro", "limit_gb", "step_s", "gpu_gb", "host_gb"),
    [
        ("llama-70b", 16, 4, 1, 80, 3.388, 27.38, 91.4),
        ("qwen3-30b-a3b", 24, 8, 2, 24, 2.774, 15.64, 97.9),
    ],
)
def test_some_layers_of_large_models_as_measured(preset, layers, rows, micro, limit_gb, step_s, gpu_gb, host_gb):
    """8-bit moments, not clipped: benchmarks/results/2026-11-17-h200/streamed."""
    some = replace(ARCHITECTURES[PRESETS[preset].model], layers=layers)
    settings = streamed(some, micro, inputs="parked", states="int8")
    job = Job(some, rows, 4096, compiled=True, clip=False)
    plan = predict(job, settings, replace(H200, gpu_bytes=limit_gb * 10**9))
    assert plan.fits
    assert plan.peak_bytes("gpu") == pytest.approx(gpu_gb * 1e9, rel=0.05)
    assert plan.peak_bytes("host") == pytest.approx(host_gb * 1e9, rel=0.05)
    assert plan.seconds.step == pytest.approx(step_s, rel=0.15)


def test_sums_of_micro_batches_and_the_last_update_take_time():
    """16 layers of llama-70b, 4 x 4096 tokens: forward and backward took 3.109 s in 4 micro-batches on the H200."""
    some = replace(LLAMA_70B, layers=16)
    job = Job(some, 4, 4096, compiled=True, clip=False)
    one, four = (
        predict(job, streamed(some, micro, inputs="parked", states="int8"), replace(H200, gpu_bytes=80 * 10**9)).seconds
        for micro in (4, 1)
    )
    assert four.forward + four.backward + four.recompute == pytest.approx(3.109, rel=0.02)
    assert four.backward - one.backward == pytest.approx(34 * 16 * 855_654_400 / 4.2e12, rel=0.05)
    assert four.exposed >= four.cpu / 16


@pytest.mark.parametrize(("tile", "gpu_gb"), [(0, 102.5), (16_384, 67.9)], ids=["whole", "tiles"])
def test_gpu_memory_of_a_long_row_as_measured(tile, gpu_gb):
    """8 of llama-8b's layers, 262,144 tokens, inputs parked, all state on the GPU: 2026-11-18-h200/long."""
    some = replace(LLAMA_8B, layers=8)
    settings = Settings("fp32", 1, "full", 0, "layers", "parked", tile)
    plan = predict(Job(some, 1, 262_144, compiled=True), settings, replace(H200, host_bytes=125 * 2**30))
    assert plan.fits
    assert plan.peak_bytes("gpu") == pytest.approx(gpu_gb * 1e9, rel=0.05)


def test_gpu_memory_as_measured(monkeypatch):
    """17.9 GB reserved for llama-8b, 4 x 4096, with logits of 4096 tokens at once, of which 15 % are fragments."""
    monkeypatch.setattr(memory, "LOGITS_BYTES", 4 * 4096 * LLAMA_8B.vocab)
    plan = predict(Job(LLAMA_8B, 4, 4096, compiled=True, homes=(("host", 1.0),)), streamed(LLAMA_8B, 4), LARGE_HOST)
    assert plan.peak_bytes("gpu") == pytest.approx(17.9e9, rel=0.15)


# --- resident weights, as before ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "machine", "gpus", "clip", "chosen", "gpu_bytes", "host_bytes", "step_s", "host"),
    [
        ("llama-8b", "h200", 1, True, ("fp32", 4, "full"), 114765103104, 2000000000, 1.7848869088586097, 0),
        (
            "qwen3-14b",
            "h200",
            1,
            True,
            ("fp32", 4, "selected:10"),
            143928184832,
            125835514880,
            3.239101623352501,
            5095065984.0,
        ),
        ("qwen3-30b-a3b", "gh200", 1, False, ("bf16", 2, "selected"), 127504539648, 185192735744, 2.144843020679538, 0),
        ("phi-4", "h100", 2, True, ("int8", 1, "none"), 78815856752, 7389026816, 1.3706566803164215, 0),
        ("llama-8b", "gb10", 1, True, ("bf16", 1, "full"), 101116329984, 2000000000, 17.144471260155395, 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_resident_weights_are_predicted_as_before(
    preset, machine, gpus, clip, chosen, gpu_bytes, host_bytes, step_s, host
):
    job = Job(ARCHITECTURES[PRESETS[preset].model], 4, 4096, clip=clip, compiled=True)
    plan = predict(job, Settings(*chosen), MACHINES[machine], gpus)
    assert (plan.peak_bytes("gpu"), plan.peak_bytes("host")) == (gpu_bytes, host_bytes)
    assert (plan.seconds.step, plan.split.host) == (pytest.approx(step_s, rel=1e-12), host)
    assert (plan.streamed_split, plan.input_bytes, len(plan.streamed)) == (None, 0.0, 0)


# --- promises -----------------------------------------------------------------------------------------------------

architectures = st.builds(
    Architecture,
    model_type=st.just("llama"),
    layers=st.integers(1, 32),
    hidden=st.sampled_from([512, 2048, 4096, 8192]),
    intermediate=st.sampled_from([1024, 8192, 28672]),
    heads=st.just(16),
    kv_heads=st.sampled_from([4, 16]),
    head_dim=st.sampled_from([64, 128]),
    vocab=st.sampled_from([1000, 128256]),
    max_positions=st.just(4096),
    norm_eps=st.just(1e-5),
    rope=st.just(()),
    tied=st.booleans(),
)
jobs = st.builds(
    Job,
    architectures,
    batch_size=st.integers(1, 8),
    length=st.sampled_from([512, 4096]),
    clip=st.booleans(),
    compiled=st.booleans(),
    weights=st.just("auto"),
    order=st.just("layers"),
)
machines = st.builds(
    lambda gpu, host, link, cpu: replace(
        H200, gpu_bytes=gpu, host_bytes=host, link_bytes_per_s=link, host_params_per_s=cpu
    ),
    st.integers(6 * 10**9, 100 * 10**9),
    st.integers(16 * 10**9, 2000 * 10**9),
    st.floats(5e9, 400e9),
    st.floats(1e8, 2e10),
)


@settings(deadline=None, max_examples=40)
@given(jobs, machines, st.floats(1, 3), st.sampled_from([None, 1]))
@pytest.mark.slow
def test_more_gpu_memory_is_never_slower(job, machine, more, rows):
    free = Free("fp32", rows)
    before = solve(job, machine, free=free)
    after = solve(job, replace(machine, gpu_bytes=int(machine.gpu_bytes * more)), free=free)
    if before is not None:
        assert after is not None
        assert after.seconds.step <= before.seconds.step * (1 + 1e-6)


@settings(deadline=None, max_examples=40)
@given(jobs, machines, st.floats(1, 3))
@pytest.mark.slow
def test_more_memory_never_makes_what_fits_not_fit(job, machine, more):
    job = replace(job, order="auto")
    if solve(job, machine) is not None:
        assert solve(job, replace(machine, gpu_bytes=int(machine.gpu_bytes * more))) is not None
        assert solve(job, replace(machine, host_bytes=int(machine.host_bytes * more))) is not None


@settings(deadline=None, max_examples=40)
@given(jobs, machines)
def test_what_fits_is_within_its_rooms(job, machine):
    plan = solve(job, machine)
    if plan is not None:
        outside = ("CUDA context", "process", QUEUE)
        for place, room in (("gpu", plan.gpu_room), ("host", plan.host_room)):
            assert sum(b.num_bytes for b in plan.buffers if b.place == place and b.name not in outside) <= room


@settings(deadline=None, max_examples=60)
@given(jobs, machines, st.sampled_from(["kept", "parked"]), st.integers(1, 8))
def test_more_layers_that_stream_take_no_more_of_the_gpu(job, machine, inputs, rows):
    """So that the fewest that fit can be found by halves. Without any there are no slots either."""
    every = range(1, job.architecture.layers + 1)
    fits = [gpu_shortage(job, Settings("fp32", rows, "full", n, "layers", inputs), machine) <= 0 for n in every]
    assert fits == sorted(fits)


# --- what is chosen -----------------------------------------------------------------------------------------------


def test_resident_if_it_fits_else_as_many_as_must_stream():
    auto = Job(LLAMA_8B, 4, 4096, compiled=True, weights="auto")
    assert solve(auto, LARGE_HOST) == replace(solve(replace(auto, weights="resident"), LARGE_HOST), job=auto)
    steps = []
    for limit in (28, 24, 20, 16, 12):
        machine = replace(LARGE_HOST, gpu_bytes=limit * 10**9)
        plan = solve(auto, machine, free=Free("fp32", 4))
        assert plan is not None, limit
        assert (plan.settings.order, plan.settings.recompute) == ("layers", "full")
        assert 0 < plan.settings.streamed <= 32
        steps.append(plan.seconds.step)
        fewer = replace(plan.settings, streamed=plan.settings.streamed - 1)
        slower = predict(auto, fewer, machine)
        assert not slower.fits or slower.seconds.step >= plan.seconds.step
    assert steps == sorted(steps), "less room is never faster"


@pytest.mark.parametrize("field", ["weights", "order", "inputs"])
def test_what_the_recipe_fixes_is_respected(field):
    value = {"weights": "16", "order": "rows", "inputs": "parked"}[field]
    job = replace(Job(LLAMA_8B, 4, 4096, compiled=True, weights="streamed"), **{field: value})
    plan = solve(job, LARGE_HOST, free=Free("fp32", 4))
    assert plan is not None
    assert {"weights": plan.weights, "order": plan.settings.order, "inputs": plan.settings.inputs}[field] == value
    assert plan.settings.streamed == (16 if field == "weights" else 32)
    assert plan.settings.order == ("rows" if field == "order" else "layers")


@pytest.mark.parametrize("machine", ["rtx4090", "rtx5090", "h100", "gh200"])
@pytest.mark.parametrize("preset", [name for name, recipe in PRESETS.items() if recipe.model in ARCHITECTURES])
def test_no_preset_is_too_large_for_a_gpu(preset, machine):
    recipe = PRESETS[preset]
    job = Job(ARCHITECTURES[recipe.model], recipe.batch_size, recipe.max_length, compiled=True, weights="auto")
    plan = solve(job, replace(MACHINES[machine], host_bytes=2 * 2**40))
    assert plan is not None
    assert plan.settings.states == "fp32"
    assert plan.job.clip


def test_clipped_llama_70b_fits_four_80_gb_gpus():
    """Gradients of whole units go down, so that none of them waits for the norm on the GPU."""
    machine = replace(MACHINES["h100"], host_bytes=2**40)
    plan = solve(Job(LLAMA_70B, 4, 4096, compiled=True), machine, 4)
    assert plan is not None
    assert plan.settings.states == "fp32"
    units = {}
    for name, chunks in plan.dealt.items():
        for chunk in chunks:
            unit = chunk.parameter if chunk.parameter > 80 * 9 else (chunk.parameter + 8) // 9  # the norm, the head
            units.setdefault(unit, set()).add(name == "host")
    assert all(len(found) == 1 for found in units.values()), "a unit is in `host` as a whole"
