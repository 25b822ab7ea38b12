"""Where state goes: a home, shares of homes, or `auto`, made a placement of every chunk.

`auto`: what fits on the GPU stays there, the rest goes where the measured rates say it is hidden best.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import DoesNotFit
from penstock.machine.gpu_memory import gpu_left, gpu_room
from penstock.machine.hardware import CPU_ADAM_CORES, adam_cores, available_host_bytes, describe, near_cores
from penstock.offload.dtensors import local, share_of_host
from penstock.offload.misuse import check_homes
from penstock.offload.rates import measure_rates
from penstock.offload.trained import Trained, find_trained
from penstock.plan.layout import (
    DEFAULT_CHUNK,
    FORMATS,
    HOST_RESERVE,
    STAGING,
    Chunk,
    HomeName,
    StateFormat,
    chunk_for,
    cut,
    gpu_reserve,
    landing_bytes,
    largest_gradients,
)
from penstock.plan.placement import (
    Dealt,
    Placement,
    deal,
    deal_away,
    deal_within,
    deal_without_stream,
    masters_pay,
    prefetch_room,
)
from penstock.plan.split import Manner, ModelBytes, Profile, Rates, Requirements, Room, requirements, streamed_share

Homes = Literal["auto"] | HomeName | Mapping[HomeName, float]
UNKNOWN = Profile()


def placement_for(
    model: nn.Module,
    homes: Homes = "auto",
    *,
    params: Iterable[Mapping[str, Any]] | None = None,
    units: Iterable[nn.Module] | None = None,
    states: str = "fp32",
    profile: Profile = UNKNOWN,
    chunk_size: int | None = None,
    cpu_adam_cores: float = CPU_ADAM_CORES,
) -> Placement:
    """A placement to give to `OffloadAdamW`, for whoever wants to say more than homes.

    `params`, `units` and `states` as for the optimizer. `profile`: what a micro-batch takes, so that `auto` can fill
    the rest; it is taken to be clipped, all gradients kept until the norm is known. `chunk_size` (elements) and
    `cpu_adam_cores` (the share of the cores near the GPU that update the home `host`) are questions of speed.
    """
    trained = find_trained(model, params, units)
    return place(trained, FORMATS[states], homes, profile, Manner(in_backward=False), chunk_size, cpu_adam_cores)


def place(
    trained: Trained,
    format: StateFormat,
    homes: Homes,
    profile: Profile,
    manner: Manner,
    chunk_size: int | None = None,
    cpu_adam_cores: float = CPU_ADAM_CORES,
    remedy: str = "",
) -> Placement:
    """The home of every chunk, and how much of `stream` may come before its update.

    `remedy`: flags to try where nothing fits, beside those of the optimizer.
    """
    check_homes(homes)
    near = near_cores(trained.device)
    cores = tuple(adam_cores(near, cpu_adam_cores))
    everything, room, on_host = trained.whole_chunks(format), None, 0
    if homes == "auto" and trained.device.type == "cuda":
        on_host = share_of_host(available_host_bytes() - HOST_RESERVE, trained.parameters[0])
        on_host //= replicas_here(os.environ) if trained.replicated else 1
    away = [whole for whole in everything if whole.parameter in trained.streamed]
    wholes = [whole for whole in everything if whole.parameter not in trained.streamed]
    # Once, when somebody asks: it takes seconds.
    rates = cache(lambda: measure_rates(trained.device, cores, format, masters_first=manner.masters_first))
    dealt = _deal_away(away, homes, trained.device, profile, manner, rates, chunk_size)
    if wholes:
        bytes_after = _bytes_after(trained, profile)
        need = _requirements(trained, format, profile, manner, bytes_after)
        if homes == "auto":
            try:
                here = _choose(need, trained, wholes, on_host, manner, rates, chunk_size, dealt, remedy)
            except DoesNotFit:
                if not dealt["stream"]:
                    raise
                dealt = _deal_away(away, "host", trained.device, profile, manner, rates, chunk_size)
                here = _choose(need, trained, wholes, on_host, manner, rates, chunk_size, dealt, remedy)
        else:
            shares = dict(homes) if isinstance(homes, Mapping) else {homes: 1.0}
            here = deal(host_cuts(trained, wholes, chunk_size or DEFAULT_CHUNK), shares)
        if manner.prefetches and profile.bytes_after and here["stream"]:
            room = prefetch_room(need, bytes_after, _sent(here, wholes))
        dealt = {name: here[name] + dealt[name] for name in dealt}
    masters_first = manner.masters_first
    if masters_first and rates.cache_info().currsize:
        masters_first = masters_pay(dealt["host"], rates().alone_params_per_s, profile)
    return Placement(dealt, cores, room, masters_first)


def replicas_here(environment: Mapping[str, str]) -> int:
    """Ranks of this machine, each of which may hold all of the state.

    They are not asked, as shards are: who makes an optimizer on some of the ranks only would wait for the others.
    """
    told = environment.get("LOCAL_WORLD_SIZE", "")  # of torchrun and accelerate; not of Lightning
    return int(told) if told.isdigit() else min(dist.get_world_size(), max(1, torch.cuda.device_count()))


def host_cuts(trained: Trained, wholes: Sequence[Chunk], chunk_size: int) -> list[list[Chunk]]:
    """What `host` gets as a whole or not at all, in chunks: parameters, or units whose gradients are in one piece."""
    if not trained.sharded:
        return [cut(whole, chunk_size) for whole in wholes]
    unit_of, found = trained.deadlines(), dict[int, list[Chunk]]()
    for whole in wholes:
        found.setdefault(unit_of[whole.parameter], []).extend(cut(whole, chunk_size))
    return list(found.values())


def _deal_away(
    wholes: Sequence[Chunk],
    homes: Homes,
    device: torch.device,
    profile: Profile,
    manner: Manner,
    rates_of: Callable[[], Rates],
    chunk_size: int | None,
) -> Dealt:
    """Chunks whose weights lie in host memory: updated there, a share of them on the device, and none is resident."""
    if not wholes:
        return {"gpu": [], "stream": [], "host": []}
    share, suitable = 0.0, chunk_size or DEFAULT_CHUNK
    if homes == "auto" and device.type == "cuda":
        rates = rates_of()
        state_bytes = wholes[0].format.bytes_per_element(wholes[0].weight_bytes)  # of a rank's rows there may be none
        model = ModelBytes(sum(w.size for w in wholes), state_bytes, wholes[0].weight_bytes)
        hidden = profile.backward_seconds if manner.in_backward else profile.forward_seconds
        share = streamed_share(model, rates, hidden, in_backward=manner.in_backward)
        suitable = chunk_size or chunk_for(rates.link_bytes_per_s, state_bytes)
    elif homes != "auto":
        shares = dict(homes) if isinstance(homes, Mapping) else {homes: 1.0}
        in_stream, on_host = shares.get("stream", 0.0), shares.get("host", 0.0)
        share = in_stream / (in_stream + on_host) if in_stream else 0.0
    return deal_away([chunk for whole in wholes for chunk in cut(whole, suitable)], share)


def _requirements(
    trained: Trained, format: StateFormat, profile: Profile, manner: Manner, bytes_after: Sequence[float]
) -> Requirements:
    """Unknown activations: a quarter of the GPU."""
    shards = [local(p) for index, p in enumerate(trained.parameters) if index not in trained.streamed]
    num_params = sum(p.numel() for p in shards)
    if profile.activation_bytes is None:
        device = trained.device
        assumed = gpu_room(device)[1] // 4 if device.type == "cuda" else 0
        profile = replace(profile, activation_bytes=assumed)
    state_bytes = sum(format.num_bytes(p.numel(), p.itemsize) for p in shards)
    model = ModelBytes(num_params, state_bytes / num_params, sum(p.nbytes for p in shards) / num_params)
    hidden = profile.backward_seconds if manner.in_backward else profile.forward_seconds
    return requirements(model, profile, manner, hidden, min(bytes_after) if profile.bytes_after else None)


def _bytes_after(trained: Trained, profile: Profile) -> list[float]:
    """What is taken after the gradient of each parameter.

    Of the first units as after that of the next: what they leave is free when backward is over, and then the link has
    other things to bring.
    """
    taken = [profile.bytes_after.get(p, math.inf) for p in trained.parameters]
    first = {index for unit in trained.units[:2] for index in unit.parameters}
    rest = min((value for index, value in enumerate(taken) if index not in first), default=math.inf)
    return [max(value, rest) if index in first else value for index, value in enumerate(taken)]


def _sent(dealt: Dealt, wholes: Sequence[Chunk]) -> float:
    """Elements of the parameters that are in `host` as a whole."""
    in_host: dict[int, int] = {}
    for chunk in dealt["host"]:
        in_host[chunk.parameter] = in_host.get(chunk.parameter, 0) + chunk.size
    return float(sum(whole.size for whole in wholes if in_host.get(whole.parameter) == whole.size))


def _choose(
    need: Requirements,
    trained: Trained,
    wholes: Sequence[Chunk],
    on_host: int,
    manner: Manner,
    rates_of: Callable[[], Rates],
    chunk_size: int | None,
    away: Dealt,
    remedy: str = "",
) -> Dealt:
    """Chunks by home for what is free now. Weights are allocated already; gradients and activations are not.

    `on_host`: bytes of host memory. `away`: chunks that will be in it too, and in slots.
    """
    device, format, state_bytes = trained.device, wholes[0].format, need.state_bytes
    # Cut all the same: of a shard that is empty there is no chunk.
    everything = deal([cut(whole, max(1, whole.size)) for whole in wholes], {"gpu": 1.0})
    if device.type != "cuda":
        return everything
    on_host -= sum(chunk.state_bytes for chunks in away.values() for chunk in chunks)
    if manner.in_backward:  # what lands shares a few places, whatever its weights
        here = [chunk for whole in wholes for chunk in cut(whole, chunk_size or DEFAULT_CHUNK)]
        on_host -= landing_bytes([*away["host"], *here], ring=True)
    else:
        on_host -= landing_bytes([*away["stream"], *away["host"]])
    room = Room(gpu_left(device) - gpu_reserve(gpu_room(device)[1]), on_host)
    if manner.in_backward:
        room = room.less(largest_gradients([*away["stream"], *away["host"]], trained.unit_of_streamed()))
    slots = STAGING * state_bytes
    if away["stream"]:  # in any case, and with weights and gradients that travel with state
        room, slots = room.less(slots + 2 * STAGING * need.weight_bytes), 0.0
    if room.gpu_bytes >= need.kept_bytes + need.num_params * state_bytes:
        return everything
    rates = rates_of()
    suitable = chunk_size or chunk_for(rates.link_bytes_per_s, state_bytes)
    cuts = host_cuts(trained, wholes, suitable)
    dealt = deal_within(need, room.less(slots), rates, cuts)
    if dealt is None and not away["stream"]:
        dealt = deal_without_stream(need, room, cuts)
    if dealt is None:
        flags = smaller_formats(need, format) + (f"{remedy}, " if remedy else "")
        remedy = f"Try {flags}--recompute full, or a smaller --micro-batch-size."
        raise DoesNotFit(_shortage(need, room), where=describe(device), remedy=remedy)
    return dealt


def smaller_formats(need: Requirements, format: StateFormat) -> str:
    """The flags of the formats that take less, each with the GiB that it saves."""
    width = 2 if need.weight_bytes < 4 else 4
    now, count = format.bytes_per_element(width), need.num_params / 2**30
    saved = {f.name: (now - f.bytes_per_element(width)) * count for f in FORMATS.values()}
    return "".join(f"--states {name} (saves {gib:.1f} GiB), " for name, gib in saved.items() if gib > 0)


def _shortage(need: Requirements, room: Room) -> str:
    gib = 2**30
    left = room.gpu_bytes - need.peak_bytes(need.num_params)
    return (
        f"optimizer state needs {need.num_params * need.state_bytes / gib:.1f} GiB; beside weights, gradients and "
        f"activations the GPU has {max(0.0, left) / gib:.1f} left, and the host {room.host_bytes / gib:.1f}"
    )
