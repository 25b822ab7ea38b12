from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.split import Need, Placement, Rates, Room, place

GB = 1e9
RATES = Rates(link_bytes_per_s=40 * GB, host_params_per_s=2.3e9)
QWEN3_14B = Need(
    int(14.77e9),
    state_bytes=10,
    weight_bytes=2,
    activation_bytes=10 * GB,
    kept_bytes=35 * GB,
    gradients_leave=True,
    hidden_seconds=0.8,
)


def test_what_fits_the_gpu_stays_there():
    assert place(QWEN3_14B, Room(200 * GB, 0), RATES) == Placement(14.77e9, 0, 0, 0)


def test_all_three_homes_are_used_when_the_link_alone_is_too_slow():
    placement = place(QWEN3_14B, Room(105 * GB, 120 * GB), RATES)
    assert placement is not None
    assert min(placement.gpu, placement.stream, placement.host) > 1e9
    only_stream = place(QWEN3_14B, Room(105 * GB, 120 * GB), replace(RATES, host_params_per_s=1.0))
    assert only_stream is not None
    assert placement.exposed_seconds < only_stream.exposed_seconds


def test_state_that_comes_during_backward_makes_room_on_the_link():
    plain = replace(QWEN3_14B, activation_bytes=40 * GB, kept_bytes=40 * GB)
    early = replace(plain, end_bytes=30 * GB)
    room = Room(110 * GB, 120 * GB)
    assert early.early_bytes(0) == pytest.approx(0.88 * 40 * GB - 30 * GB)
    assert early.early_bytes(1e9) == pytest.approx(early.early_bytes(0) + 2 * GB), "gradients that leave"
    assert place(early, room, RATES).exposed_seconds < place(plain, room, RATES).exposed_seconds
    assert replace(plain, end_bytes=50 * GB).early_bytes(0) == 0


def test_nothing_fits_nowhere():
    assert place(QWEN3_14B, Room(10 * GB, 10 * GB), RATES) is None


needs = st.builds(
    Need,
    st.integers(10**6, 10**11),
    st.sampled_from([4.0, 6.0, 10.0]),
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
    placement = place(need, room, rates)
    if placement is None:
        return
    left = need.weight_bytes * placement.host * need.gradients_leave
    passing = max(need.activation_bytes, need.kept_bytes - left)
    assert placement.gpu * need.state_bytes + passing <= room.gpu_bytes * (1 + 1e-9)
    host_bytes = placement.stream * need.state_bytes + placement.host * (need.state_bytes + 2 * need.weight_bytes)
    assert host_bytes <= room.host_bytes * (1 + 1e-9)
    assert placement.gpu + placement.stream + placement.host == pytest.approx(need.num_params)
    assert sum(placement.fractions().values()) == pytest.approx(1)


@given(needs, rooms, rates, st.floats(1, 4), st.floats(1, 4), st.floats(1, 4))
def test_more_memory_or_a_faster_link_is_never_slower(need, room, rates, gpu, host, link):
    before = place(need, room, rates)
    more = place(
        need,
        Room(room.gpu_bytes * gpu, room.host_bytes * host),
        replace(rates, link_bytes_per_s=rates.link_bytes_per_s * link),
    )
    if before is not None:
        assert more is not None
        assert more.exposed_seconds <= before.exposed_seconds + 1e-6
