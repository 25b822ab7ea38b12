from dataclasses import replace

import pytest
import torch
from small_net import Net
from torch import nn

from penstock.offload import placing
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.placing import _bytes_after, _requirements, place, placement_for, smaller_formats
from penstock.offload.trained import find_trained
from penstock.plan.layout import DEFAULT_CHUNK, FORMATS, Chunk, cut
from penstock.plan.split import PREFETCH_SHARE, Manner, ModelBytes, Profile, Rates, Requirements, requirements

MIX = {"gpu": 0.4, "stream": 0.3, "host": 0.3}
AFTER_NORM = Manner(in_backward=False)


def test_a_shortage_names_the_formats_that_take_less():
    weights = Requirements(2**31, 10, 2, 2, activation_bytes=0, kept_bytes=0, gradients_leave=False, hidden_seconds=0)
    assert (
        smaller_formats(weights, FORMATS["fp32"]) == "--states bf16 (saves 8.0 GiB), --states int8 (saves 11.9 GiB), "
    )
    assert smaller_formats(weights, FORMATS["bf16"]) == "--states int8 (saves 3.9 GiB), "
    assert smaller_formats(weights, FORMATS["int8"]) == ""


def need(manner=AFTER_NORM, **changes):
    model = nn.ParameterList([nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for size in (1000, 24)])
    trained = find_trained(model, None, None)
    known = {"activation_bytes": 500, "kept_bytes": 2000, "forward_seconds": 1, "backward_seconds": 2}
    profile = Profile(**(known | changes))
    return _requirements(trained, FORMATS["fp32"], profile, manner, _bytes_after(trained, profile))


def test_gradients_count_as_they_are_kept():
    after = need()
    assert (after.num_params, after.state_bytes, after.weight_bytes) == (1024, 10, 2)
    assert (after.activation_bytes, after.kept_bytes, after.gradients_leave) == (500, 2000, True)
    assert need(kept_bytes=None).kept_bytes == 500 + 2048
    assert not need(Manner(in_backward=False, overlap=False)).gradients_leave
    assert need(Manner(in_backward=True)).kept_bytes == 500
    many = need(micro_batches=2)
    assert (many.activation_bytes, many.kept_bytes, many.gradients_leave) == (2548, 2548, False)


def test_updates_hide_under_forward_or_under_backward():
    assert need().hidden_seconds == 1
    assert need(Manner(in_backward=True)).hidden_seconds == 2


@pytest.mark.parametrize("groups", [False, True])
def test_a_placement_is_the_one_that_the_optimizer_makes_itself(groups):
    model = Net()
    own = list(model.parameters())
    params = [{"params": own[3:]}, {"params": own[:3]}] if groups else None
    placement = placement_for(model, MIX, params=params, states="int8")
    itself = OffloadAdamW(model, params=params, states="int8", homes=MIX)
    itself_homes = {chunk: home.name for chunk, home in itself._housing.home_of.items()}
    itself.close()
    given = OffloadAdamW(model, params=params, states="int8", homes=placement)
    assert itself_homes == {chunk: home.name for chunk, home in given._housing.home_of.items()}
    sizes = [sum(chunk.size for chunk in chunks) for chunks in given._housing.chunks]
    assert sizes == [p.numel() for p in given._parameters], "numbered in the order of the groups"
    for optimizer in (itself, given):
        optimizer.close()


def test_chunks_and_cores_are_as_told():
    model = Net()
    placement = placement_for(model, "host", chunk_size=100, cpu_adam_cores=0.01)
    assert max(chunk.size for chunk in placement.chunks["host"]) == 100
    assert len(placement.cores) == 1
    blocks = placement_for(model, "stream", states="int8", chunk_size=100).chunks["stream"]
    assert {chunk.start % 256 for chunk in blocks} == {0}
    assert max(chunk.size for chunk in blocks) == 256


def test_state_comes_early_only_where_a_trial_has_found_room():
    trained = find_trained(Net(), None, None)
    tried = Profile(activation_bytes=5000, kept_bytes=6000, bytes_after=dict.fromkeys(trained.parameters, 1000.0))

    def room(profile, manner, homes="stream"):
        return place(trained, FORMATS["fp32"], homes, profile, manner).prefetch

    found = room(tried, AFTER_NORM)
    assert found is not None
    assert found.free_after == (PREFETCH_SHARE * 6000 - 1000,) * len(trained.parameters)
    assert room(Profile(), AFTER_NORM) is None
    assert room(tried, Manner(in_backward=True)) is None
    assert room(tried, Manner(in_backward=False, sharded=True)) is None
    assert room(tried, AFTER_NORM, homes="host") is None, "none of it streams"


def test_an_empty_shard_has_no_chunk():
    """As a rank may have of a parameter with few rows."""
    trained = find_trained(nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (7, 0, 300)]), None, None)
    for homes in ("auto", "stream"):
        placement = place(trained, FORMATS["int8"], homes, Profile(), AFTER_NORM)
        chunks = [chunk for own in placement.chunks.values() for chunk in own]
        assert [(chunk.parameter, chunk.start, chunk.size) for chunk in chunks] == [(0, 0, 7), (2, 0, 300)]


class OnGpu:
    """A GPU that is not there, with room for all resident state and `spare` bytes."""

    device, sharded = torch.device("cuda"), False

    def __init__(self, monkeypatch, need, spare):
        free = int(need.kept_bytes + need.num_params * need.state_bytes) + placing.gpu_reserve(34 * 10**9) + spare
        monkeypatch.setattr(placing, "gpu_room", lambda _: (free, 34 * 10**9))
        monkeypatch.setattr(placing, "gpu_left", lambda _: free)


@pytest.mark.parametrize(("spare", "all_resident"), [(10**7, False), (10**9, True)])
def test_slots_of_what_streams_are_made_even_if_all_else_is_resident(monkeypatch, spare, all_resident):
    whole, streamed = (Chunk(index, 0, 500_000_000, FORMATS["fp32"], 2) for index in range(2))
    model = ModelBytes(whole.size, 10.0, 2.0)
    need = requirements(model, Profile(20e9, 20e9 + 2 * whole.size), AFTER_NORM, 1.0, None)
    gpu, away = OnGpu(monkeypatch, need, spare), {"gpu": [], "stream": cut(streamed, DEFAULT_CHUNK), "host": []}
    found = placing._choose(need, gpu, [whole], 10**12, AFTER_NORM, lambda: Rates(5e10, 3e9), None, away)
    assert (not found["stream"] and not found["host"]) == all_resident


def test_a_rank_may_have_nothing_of_the_first_parameter_that_streams():
    wholes = [Chunk(index, 0, size, FORMATS["int8"], 2) for index, size in enumerate((0, 500_000))]
    rates = lambda: Rates(5e10, 3e9)  # noqa: E731
    found = placing._deal_away(wholes, "auto", torch.device("cuda"), Profile(), AFTER_NORM, rates, None)
    assert sum(chunk.size for chunks in found.values() for chunk in chunks) == 500_000


@pytest.mark.parametrize(
    ("environment", "ranks"), [({"LOCAL_WORLD_SIZE": "4"}, 4), ({}, 2), ({"LOCAL_WORLD_SIZE": ""}, 2)]
)
def test_replicas_have_a_share_of_their_machines_memory_each(monkeypatch, environment, ranks):
    """Under DistributedDataParallel, where every rank has all of the state: eight of them on machines with two GPUs."""
    seen = []
    trained = find_trained(Net(), None, None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(placing.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(placing.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(placing, "available_host_bytes", lambda: placing.HOST_RESERVE + 4000)
    monkeypatch.setattr(placing, "near_cores", lambda _: [0])
    monkeypatch.setattr(placing, "_requirements", lambda *_: None)
    monkeypatch.setattr(placing, "_choose", lambda *args: seen.append(args[3]) or placing.deal([], {}))
    on_gpu = replace(trained, device=torch.device("cuda"))
    for several, share in ((True, 4000 // ranks), (False, 4000)):
        monkeypatch.setattr(type(trained), "replicated", several)
        place(on_gpu, FORMATS["fp32"], "auto", Profile(), AFTER_NORM)
        assert seen.pop() == share
