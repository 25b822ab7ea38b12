from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.split import (
    Manner,
    ModelBytes,
    Profile,
    Rates,
    Requirements,
    Room,
    Split,
    best_split,
    requirements,
    streamed_share,
)

GB = 1e9
RATES = Rates(link_bytes_per_s=40 * GB, host_params_per_s=2.3e9)
QWEN3_14B = Requirements(
    int(14.77e9),
    state_bytes=10,
    weight_bytes=2,
    gradient_bytes=2,
    activation_bytes=10 * GB,
    kept_bytes=35 * GB,
    gradients_leave=True,
    hidden_seconds=0.8,
)


def test_what_fits_the_gpu_stays_there():
    assert best_split(QWEN3_14B, Room(200 * GB, 0), RATES) == Split(14.77e9, 0, 0, 0)


def test_all_three_homes_are_used_when_the_link_alone_is_too_slow():
    split = best_split(QWEN3_14B, Room(105 * GB, 120 * GB), RATES)
    assert split is not None
    assert min(split.gpu, split.stream, split.host) > 1e9
    only_stream = best_split(QWEN3_14B, Room(105 * GB, 120 * GB), replace(RATES, host_params_per_s=1.0))
    assert only_stream is not None
    assert split.exposed_seconds < only_stream.exposed_seconds


def test_state_that_comes_during_backward_makes_room_on_the_link():
    plain = replace(QWEN3_14B, activation_bytes=40 * GB, kept_bytes=40 * GB)
    early = replace(plain, end_bytes=30 * GB)
    room = Room(110 * GB, 120 * GB)
    assert early.prefetch_bytes(0) == pytest.approx(0.88 * 40 * GB - 30 * GB)
    assert early.prefetch_bytes(1e9) == pytest.approx(early.prefetch_bytes(0) + 2 * GB), "gradients that leave"
    assert best_split(early, room, RATES).exposed_seconds < best_split(plain, room, RATES).exposed_seconds
    assert replace(plain, end_bytes=50 * GB).prefetch_bytes(0) == 0


def test_nothing_fits_nowhere():
    assert best_split(QWEN3_14B, Room(10 * GB, 10 * GB), RATES) is None


needs = st.builds(
    Requirements,
    st.integers(10**6, 10**11),
    st.sampled_from([4.0, 6.0, 10.0]),
    st.just(2.0),
    st.just(2.0),
    st.floats(0, 1e11),
    st.floats(0, 1e11),
    st.booleans(),
    st.floats(0, 10),
    st.none() | st.floats(0, 1e11),
)
rooms = st.builds(Room, st.floats(0, 1e12), st.floats(0, 1e12))
rates = st.builds(Rates, st.floats(1e9, 1e12), st.floats(1e8, 1e11))


@given(needs, rooms, rates)
def test_never_over_budget(need, room, rates):
    split = best_split(need, room, rates)
    if split is None:
        return
    left = need.weight_bytes * split.host * need.gradients_leave
    peak = max(need.activation_bytes, need.kept_bytes - left)
    assert split.gpu * need.state_bytes + peak <= room.gpu_bytes * (1 + 1e-9)
    host_bytes = split.stream * need.state_bytes + split.host * (need.state_bytes + 2 * need.weight_bytes)
    assert host_bytes <= room.host_bytes * (1 + 1e-9)
    assert split.gpu + split.stream + split.host == pytest.approx(need.num_params)
    assert sum(split.shares().values()) == pytest.approx(1)


@given(needs, rooms, rates, st.floats(1, 4), st.floats(1, 4), st.floats(1, 4))
def test_more_memory_or_a_faster_link_is_never_slower(need, room, rates, gpu, host, link):
    before = best_split(need, room, rates)
    more = best_split(
        need,
        Room(room.gpu_bytes * gpu, room.host_bytes * host),
        replace(rates, link_bytes_per_s=rates.link_bytes_per_s * link),
    )
    if before is not None:
        assert more is not None
        assert more.exposed_seconds <= before.exposed_seconds + 1e-6


MODEL = ModelBytes(1024, state_bytes=10, weight_bytes=2)
KNOWN = Profile(activation_bytes=500, kept_bytes=2000)
AFTER_NORM = Manner(in_backward=False)


def need(profile=KNOWN, manner=AFTER_NORM):
    return requirements(MODEL, profile, manner, hidden_seconds=1.0, end_bytes=700)


def test_gradients_count_as_they_are_kept():
    after = need()
    assert (after.num_params, after.state_bytes, after.weight_bytes) == (1024, 10, 2)
    assert (after.activation_bytes, after.kept_bytes, after.gradients_leave) == (500, 2000, True)
    assert need(replace(KNOWN, kept_bytes=None)).kept_bytes == 500 + 2048
    assert need(manner=Manner(in_backward=True)).kept_bytes == 500
    many = need(replace(KNOWN, micro_batches=2))
    assert (many.activation_bytes, many.kept_bytes, many.gradients_leave) == (2548, 2548, False)
    more = replace(KNOWN, micro_batches=3)
    assert need(more).kept_bytes == 500 + 4 * 1024, "their sum is fp32"
    assert need(more, Manner(False, accumulate_dtype="bf16")).kept_bytes == 2548


@pytest.mark.parametrize(
    ("manner", "leave", "prefetches"),
    [
        (AFTER_NORM, True, True),
        (Manner(in_backward=True), False, False),
        (Manner(in_backward=False, overlap=False), False, False),
        (Manner(in_backward=False, sharded=True), True, False),
    ],
)
def test_state_comes_and_gradients_leave_during_backward_only_if_updates_follow_it(manner, leave, prefetches):
    found = need(manner=manner)
    assert found.gradients_leave == leave
    assert found.end_bytes == (700 if prefetches else None)


def test_in_backward_neither_link_nor_cores_are_busy_all_the_time():
    model, rates = ModelBytes(10e9, 4.0, 2.0), Rates(50e9, 4e9, 5e9)
    share = streamed_share(model, rates, 2.6, in_backward=True)
    cores = (1 - share) * model.num_params / rates.host_params_per_s
    link = model.num_params * (share * (model.state_bytes + model.weight_bytes) + model.weight_bytes)
    assert cores == pytest.approx(2.6 / 2, rel=0.01)
    assert link / rates.link_bytes_per_s < 2.6 / 2
    assert streamed_share(model, rates, 2.6, in_backward=False) == 0.0, "the cores alone are done in time"
    assert streamed_share(model, rates, 5.0, in_backward=True) == 0.0, "the cores alone are done in half of it"
