"""`homes="auto"`: what fits on the GPU stays there, the rest goes where the measured rates say it is hidden best."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import DoesNotFit
from penstock.machine.hardware import available_host_bytes, describe
from penstock.offload.rates import measure_rates
from penstock.plan.layout import BLOCK, DEFAULT_CHUNK, GPU_RESERVE, HOST_RESERVE, STAGING, chunk_for
from penstock.plan.split import Need, Placement, Room, place
from penstock.update.formats import FORMATS, StateFormat


def need_of(
    parameters: Sequence[torch.Tensor],
    states: StateFormat,
    *,
    activation_bytes: int | None,
    kept_bytes: int | None,
    accumulates: bool,
    in_backward: bool,
    leave: bool,
    hidden_seconds: float,
    end_bytes: float | None = None,
) -> Need:
    """What state, gradients and activations take. Unknown activations: a quarter of the GPU.

    `leave`: the gradients of `host` make room as they go down.
    """
    num_params = sum(p.numel() for p in parameters)
    weight_bytes = sum(p.numel() * p.itemsize for p in parameters)
    state_bytes = sum(states.num_bytes(p.numel(), p.dtype) for p in parameters)
    if activation_bytes is None:
        device = parameters[0].device
        activation_bytes = torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 0
    all_kept = activation_bytes + weight_bytes
    if accumulates:  # the next micro-batch runs beside all gradients of the one before
        activation_bytes = kept_bytes = all_kept
    elif in_backward:
        kept_bytes = activation_bytes
    return Need(
        num_params,
        state_bytes / num_params,
        weight_bytes / num_params,
        activation_bytes=activation_bytes,
        kept_bytes=all_kept if kept_bytes is None else kept_bytes,
        gradients_leave=leave and not in_backward and not accumulates,
        hidden_seconds=hidden_seconds,
        end_bytes=None if in_backward else end_bytes,
    )


def choose_homes(
    need: Need,
    device: torch.device,
    states: StateFormat,
    *,
    cores: Sequence[int],
    ranks_here: int = 1,
) -> tuple[Placement, int]:
    """The placement for what is free now, and the chunk that suits the link.

    Weights are allocated already; gradients and activations are not.
    """
    if device.type != "cuda":
        return Placement(need.num_params, 0, 0, 0.0), DEFAULT_CHUNK
    free = torch.cuda.mem_get_info(device)[0]
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = Room(free + cached - GPU_RESERVE, (available_host_bytes() - HOST_RESERVE) // ranks_here)
    if room.gpu_bytes >= need.kept_bytes + need.num_params * need.state_bytes:
        return Placement(need.num_params, 0, 0, 0.0), DEFAULT_CHUNK
    rates = measure_rates(device, cores, states)
    room = Room(room.gpu_bytes - STAGING * need.state_bytes, room.host_bytes)
    placement = place(need, room, rates)
    if placement is None:
        smaller = smaller_formats(need, states)
        remedy = f"Try {smaller}--recompute full, or a smaller --micro-batch-size."
        raise DoesNotFit(_shortage(need, room), where=describe(device), remedy=remedy)
    return placement, chunk_for(rates.link_bytes_per_s, need.state_bytes)


def smaller_formats(need: Need, states: StateFormat) -> str:
    """The flags of the formats that take less, each with the GiB that it saves."""
    kind = torch.bfloat16 if need.weight_bytes < 4 else torch.float32
    now, sample = states.num_bytes(BLOCK, kind), need.num_params / BLOCK
    saved = {f.name: (now - f.num_bytes(BLOCK, kind)) * sample / 2**30 for f in FORMATS.values()}
    return "".join(f"--states {name} (saves {gib:.1f} GiB), " for name, gib in saved.items() if gib > 0)


def _shortage(need: Need, room: Room) -> str:
    gib = 2**30
    left = room.gpu_bytes - need.passing_bytes(need.num_params)
    return (
        f"optimizer state needs {need.num_params * need.state_bytes / gib:.1f} GiB; beside weights, gradients and "
        f"activations the GPU has {max(0.0, left) / gib:.1f} left, and the host {room.host_bytes / gib:.1f}"
    )
