"""Homes of state: as the engine chooses them, or as the recipe names them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.machine.known import Machine
from penstock.plan.by_layer import LEAVING, Homes, LayerStep, LayerTraffic, named_layers, split_layers
from penstock.plan.job import Job
from penstock.plan.layout import (
    DEFAULT_CHUNK,
    NUM_SLOTS,
    STAGING,
    UNIT_SLOTS,
    Chunk,
    StateFormat,
    chunk_for,
    layer_parameters,
    unit_bytes,
)
from penstock.plan.split import Rates, Requirements, Room, Split, best_split, link_bytes
from penstock.recipe.presets import Architecture


def chunk_size_of(job: Job, link_bytes_per_s: float, format: StateFormat) -> int:
    """Elements in a chunk: from the link where the engine measures one."""
    if job.homes or not job.overlap:
        return DEFAULT_CHUNK
    return chunk_for(link_bytes_per_s, format.bytes_per_element(job.dtype_bytes))


def by_unit(cuts: Sequence[Sequence[Chunk]], architecture: Architecture, num_layers: int) -> list[list[Chunk]]:
    """Chunks of parameters as those of units, which FSDP2 gathers and reduces as a whole: a layer is one."""
    per_layer = len(layer_parameters(architecture))
    end = 1 + num_layers * per_layer
    layers = [cuts[first : first + per_layer] for first in range(1, end, per_layer)]
    units = [cuts[:1], *layers, *([one] for one in cuts[end:])]
    return [[chunk for chunks in unit for chunk in chunks] for unit in units]


def choose_split(
    job: Job, need: Requirements, room: Room, rates: Rates, format: StateFormat, machine: Machine, *, staged: bool
) -> Split | None:
    """Homes as the engine chooses them: everything resident if it fits, else the split that exposes least.

    `staged`: there are slots in any case, for state that travels with weights that stream and their gradients.
    """
    if not job.overlap:
        return _named({"host": 1.0}, need, room, rates, machine, overlap=False)
    in_slots = min(STAGING, NUM_SLOTS * need.num_params)
    slots = room.less(format.num_bytes(in_slots, job.dtype_bytes))
    if staged:
        room = slots = slots.less(2 * in_slots * job.dtype_bytes)
    if job.homes:
        room = slots if dict(job.homes).get("stream") else room
        return _named(dict(job.homes), need, room, rates, machine, overlap=True)
    if room.gpu_bytes >= need.kept_bytes + need.num_params * need.state_bytes:
        return Split(need.num_params, 0, 0, 0.0)
    over = min(DEFAULT_CHUNK, need.num_params) * need.state_bytes
    return best_split(need, slots.less(over, 2 * over), rates)  # by which what is dealt may be over its share


def _named(
    shares: dict[str, float], need: Requirements, room: Room, rates: Rates, machine: Machine, *, overlap: bool
) -> Split | None:
    """Homes that the recipe names, if they fit. Where there is one memory, all of them are in it."""
    gpu, stream, host = (need.num_params * shares.get(n, 0.0) / sum(shares.values()) for n in ("gpu", "stream", "host"))
    copied = need.state_bytes + (need.copies * need.weight_bytes if machine.has_gpu else 0)
    on_gpu = gpu * need.state_bytes + need.peak_bytes(host)
    on_host = stream * need.state_bytes + host * copied
    if machine.one_memory:
        on_gpu, on_host = on_gpu + on_host, 0.0
    if on_gpu > room.gpu_bytes or on_host > room.host_bytes:
        return None
    link = link_bytes(need, stream, host) / rates.link_bytes_per_s
    cpu = host / rates.host_params_per_s
    exposed = max(0.0, max(link, cpu) - need.hidden_seconds) if overlap else 2 * link + cpu
    return Split(gpu, stream, host, exposed)


def room_for_layers(job: Job, step: LayerStep, format: StateFormat, room: Room) -> Room:
    """What weights, slots and parked inputs leave, and what is dealt may be over its share by."""
    b, params = job.dtype_bytes, step.resident_params
    unit = unit_bytes([p.size for p in layer_parameters(step.architecture)], b)
    room = room.less(b * params + min(UNIT_SLOTS, step.streamed) * unit, step.streamed * unit + step.parked_bytes)
    homes = dict(job.homes)
    if job.overlap and homes.get("stream"):
        room = room.less(staging_bytes(step, format.bytes_per_element(b)))
    over = 0.0 if homes or not job.overlap else min(DEFAULT_CHUNK, params) * format.bytes_per_element(b)
    if step.streamed:  # the engine has room for gradients of more layers on their way than are seen there
        in_backward = job.in_backward
        room = room.less((UNIT_SLOTS - 1 + in_backward - LEAVING[in_backward]) * unit)
    return room.less(over, 2 * over)


def staging_bytes(step: LayerStep, state_bytes: float) -> float:
    """Slots for state that streams; where weights stream too, for those and their gradients as well."""
    beside = 2 * step.work.dtype_bytes if step.streamed else 0
    return min(STAGING, NUM_SLOTS * step.resident_params) * (state_bytes + beside)


def split_of_layers(
    job: Job, machine: Machine, traffic: LayerTraffic, need: Requirements, room: Room, rates: Rates
) -> Homes | None:
    """Homes in this room where layers are computed one by one. None if nothing fits."""
    step = traffic.step
    if machine.one_memory:  # nothing is gained by a home
        taken = need.kept_bytes + step.resident_params * need.state_bytes
        taken += step.streamed_params * (need.state_bytes + (job.dtype_bytes if machine.has_gpu else 0))
        everything = Homes(Split(step.resident_params, 0, 0, 0.0), Split(0, 0, step.streamed_params, 0.0))
        return everything if taken <= room.gpu_bytes + room.host_bytes else None
    if job.homes or not job.overlap:
        return named_layers(traffic, need, room, rates, dict(job.homes) if job.overlap else {"host": 1.0})
    return split_layers(traffic, need, room, rates, staging_bytes(step, need.state_bytes))
