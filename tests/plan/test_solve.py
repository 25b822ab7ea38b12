"""The solver's promises, on machines and models that hypothesis invents."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.machine.known import H200, MACHINES
from penstock.plan.job import Job, Settings
from penstock.plan.predict import predict
from penstock.plan.report import make_plan
from penstock.plan.solve import (
    EVERYTHING,
    EXACTNESS,
    Free,
    alternatives,
    cheapest_change,
    fitting,
    flags_between,
    plans,
    solve,
)
from penstock.recipe.presets import ARCHITECTURES, PRESETS, Architecture

LLAMA_8B = ARCHITECTURES["meta-llama/Llama-3.1-8B"]
REFERENCE = {  # superchips that the reference uses
    "llama-8b": 1, "qwen3-14b": 1, "phi-4": 1, "gpt-oss-20b": 1, "seed-oss-36b": 2, "qwen3-30b-a3b": 2, "llama-70b": 4,
}  # fmt: skip

jobs = st.builds(
    Job,
    st.builds(
        Architecture,
        model_type=st.just("llama"),
        layers=st.integers(1, 40),
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
    ),
    batch_size=st.integers(1, 8),
    length=st.sampled_from([512, 4096]),
    clip=st.booleans(),
)
machines = st.builds(
    lambda gpu, host, link, cpu: replace(
        H200, gpu_bytes=gpu, host_bytes=host, link_bytes_per_s=link, host_params_per_s=cpu
    ),
    st.integers(16 * 10**9, 200 * 10**9),
    st.integers(16 * 10**9, 500 * 10**9),
    st.floats(5e9, 400e9),
    st.floats(1e8, 2e10),
)


@settings(deadline=None, max_examples=60)
@given(jobs, machines, st.sampled_from([1, 2, 4]))
@pytest.mark.slow
def test_never_over_budget(job, machine, gpus):
    for plan in plans(job, machine, gpus):
        state = fitting(predict(job, plan.settings, machine, gpus)).split
        assert state == plan.split
        share = job.dtype_bytes * job.architecture.num_parameters() / gpus
        bytes_each = {"fp32": 10, "bf16": 6, "int8": 4}[plan.settings.states]
        assert share + state.gpu * bytes_each + plan.peak_step_bytes <= plan.gpu_room + 1e6
        copies = 2 if job.in_backward else 4  # the weight's, and the gradient's unless a few share a place
        assert state.stream * bytes_each + state.host * (bytes_each + copies) <= plan.host_room + 1e6
        held = [b.num_bytes for b in plan.buffers if b.place == "host" and b.name != "process"]
        assert sum(held) <= plan.host_room, "with all places for gradients, as they were dealt"


@settings(deadline=None, max_examples=60)
@given(jobs, machines, st.floats(1, 3), st.floats(1, 3), st.floats(1, 3))
@pytest.mark.slow
def test_more_memory_or_a_faster_link_is_never_slower_unless_more_exact(job, machine, gpu, host, link):
    before = solve(job, machine)
    better = replace(
        machine,
        gpu_bytes=int(machine.gpu_bytes * gpu),
        host_bytes=int(machine.host_bytes * host),
        link_bytes_per_s=machine.link_bytes_per_s * link,
    )
    if before is not None:
        after = solve(job, better)
        assert after is not None
        exactness = [EXACTNESS.index(plan.settings.states) for plan in (after, before)]
        assert exactness[0] <= exactness[1]
        if exactness[0] == exactness[1]:
            assert after.seconds.step <= before.seconds.step * (1 + 1e-6)


@settings(deadline=None, max_examples=60)
@given(jobs, machines)
@pytest.mark.slow
def test_exact_whenever_exact_fits(job, machine):
    best = solve(job, machine)
    if best is not None and best.settings.states != "fp32":
        assert solve(job, machine, free=Free(states="fp32")) is None


@settings(deadline=None, max_examples=40)
@given(jobs, machines)
def test_what_is_fixed_stays(job, machine):
    best = solve(job, machine, free=Free(states="bf16", micro_batch=1, recompute="full"))
    if best is not None:
        assert best.settings == Settings("bf16", 1, "full")


@pytest.mark.parametrize("name", list(REFERENCE))
def test_the_references_fit_table(name):
    """Every preset fits as many GH200 as the reference uses, in exact fp32."""
    recipe = PRESETS[name]
    plan = solve(
        Job(ARCHITECTURES[recipe.model], recipe.batch_size, recipe.max_length), MACHINES["gh200"], REFERENCE[name]
    )
    assert plan is not None
    assert plan.settings.states == "fp32"


@pytest.mark.parametrize("name", ["seed-oss-36b", "qwen3-30b-a3b"])
def test_where_one_superchip_fewer_is_enough(name):
    recipe = PRESETS[name]
    job = Job(ARCHITECTURES[recipe.model], recipe.batch_size, recipe.max_length)
    assert solve(job, MACHINES["gh200"], REFERENCE[name] - 1) is not None


def test_memory_goes_to_activations_before_state():
    """llama-8b on the H200: no recompute at all. One row at a time leaves all state there, if sums are bf16."""
    best = solve(Job(LLAMA_8B, 4, 4096, accumulate_dtype="bf16"), H200)
    assert best is not None
    assert (best.settings.recompute, best.split.shares()) == ("none", {"gpu": 1.0})
    exact = solve(Job(LLAMA_8B, 4, 4096, compiled=True), H200)
    assert exact is not None
    assert exact.settings.recompute == "none"
    assert exact.seconds.step < 1.06 * best.seconds.step


def test_alternatives_say_what_they_trade():
    base = predict(Job(LLAMA_8B, 4, 4096, compiled=True), Settings("fp32", 4, "full"), H200)
    found = alternatives(base)
    assert 1 <= len(found) <= 4
    first = found[0]
    assert first.trades == ""
    assert "--recompute none" in first.flags
    assert first.plan.seconds.step < base.seconds.step
    for other in found:
        assert other.flags
        exact = other.plan.settings.states == "fp32" and other.plan.job.clip
        assert bool(other.trades) != exact


def test_the_cheapest_change_changes_the_mathematics_last():
    big = Job(LLAMA_8B, 32, 8192)
    base = predict(big, Settings("fp32", 32, "none"), H200)
    assert not base.fits
    change = cheapest_change(base)
    assert change is not None
    assert change.trades == ""
    assert any(flag.startswith("--micro-batch-size") for flag in change.flags)
    seed = PRESETS["seed-oss-36b"]
    job = Job(ARCHITECTURES[seed.model], 4, 4096)
    change = cheapest_change(predict(job, Settings("fp32", 4, "full"), H200))
    assert change is not None
    assert "--max-grad-norm 0" in change.flags
    assert "no clipping" in change.trades
    small = replace(MACHINES["rtx4090"], host_bytes=2**34)
    nothing = predict(Job(ARCHITECTURES["Qwen/Qwen3-14B"], 4, 4096), Settings("fp32", 4, "full"), small)
    assert cheapest_change(nothing, EVERYTHING) is None


def test_flags_lead_from_one_plan_to_the_other():
    old = predict(Job(LLAMA_8B, 4, 4096), Settings("fp32", 4, "full"), H200)
    new = predict(Job(LLAMA_8B, 4, 2048, clip=False), Settings("bf16", 2, "selected:8"), H200)
    assert flags_between(old, new) == (
        "--states bf16", "--micro-batch-size 2", "--recompute selected:8", "--max-grad-norm 0", "--max-length 2048",
    )  # fmt: skip
    assert flags_between(old, old) == ()


def test_rows_at_once_are_those_of_one_gpu():
    """As in a recipe: what the plan prints can be pasted."""
    old, new = (predict(Job(LLAMA_8B, 8, 4096), Settings("fp32", rows, "full"), H200, gpus=2) for rows in (4, 2))
    assert flags_between(old, new) == ("--micro-batch-size 2",)
    assert make_plan(replace(PRESETS["llama-8b"], batch_size=8, micro_batch_size=2), H200, 2).settings.micro_batch == 2
    assert make_plan(replace(PRESETS["llama-8b"], batch_size=8), H200, 2).settings.micro_batch == 4


def test_rows_are_shortened_no_more_than_they_must():
    """To five eighths where half fits, and to no length that another eighth could be added to."""
    card = replace(MACHINES["rtx4090"], host_bytes=200 * 10**9)
    for length in (172032, 196608, 200000):
        plan = make_plan(replace(PRESETS["llama-8b"], batch_size=1, max_length=length), card)
        change = cheapest_change(plan)
        assert change is not None
        found = change.plan.job.length
        assert change.plan.fits
        assert found % 64 == 0
        assert found > length / 2
        assert solve(replace(change.plan.job, length=found + length // 8), card, free=Free(states="fp32")) is None
