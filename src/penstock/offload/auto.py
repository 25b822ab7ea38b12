"""`homes="auto"`: what fits on the GPU stays there, the rest goes where the measured rates say it is hidden best."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import DoesNotFit
from penstock.hardware import available_host_bytes
from penstock.offload.formats import FORMATS, StateFormat
from penstock.offload.rates import measure_rates
from penstock.plan.place import Need, Placement, Room, place

GPU_RESERVE = 3 * 2**30
"""Left free on the GPU: fragments of the allocator, kernels' workspaces, and the little that a trial does not see."""
HOST_RESERVE = 6 * 2**30
"""Left free on the host: the data, the page cache of a checkpoint being written, everything else that runs."""


def choose_homes(
    parameters: Sequence[torch.Tensor],
    device: torch.device,
    states: StateFormat,
    *,
    gradients_kept: bool,
    activation_bytes: int,
    staging_bytes: int,
    hidden_seconds: float,
    cores: Sequence[int],
) -> Placement:
    """The placement for what is free now. Weights are allocated already; gradients and activations are not."""
    num_params = sum(p.numel() for p in parameters)
    weight_bytes = sum(p.numel() * p.itemsize for p in parameters)
    state_bytes = _state_bytes(parameters, states)
    if device.type != "cuda":
        return Placement(num_params, 0, 0, 0.0)
    free = torch.cuda.mem_get_info(device)[0]
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    taken = activation_bytes + GPU_RESERVE + (weight_bytes if gradients_kept else 0)
    need = Need(num_params, state_bytes / num_params, weight_bytes / num_params, gradients_kept, hidden_seconds)
    room = Room(free + cached - taken, available_host_bytes() - HOST_RESERVE)
    if room.gpu_bytes >= state_bytes:
        return Placement(num_params, 0, 0, 0.0)
    room = Room(room.gpu_bytes - staging_bytes, room.host_bytes)
    placement = place(need, room, measure_rates(device, cores, states))
    if placement is None:
        smaller = smaller_formats(parameters, states)
        raise DoesNotFit(_shortage(need, room), remedy=f"Try {smaller}--recompute full or a smaller batch.")
    return placement


def smaller_formats(parameters: Sequence[torch.Tensor], states: StateFormat) -> str:
    """The flags of the formats that take less, each with the GiB that it saves."""
    now = _state_bytes(parameters, states)
    saved = {f.name: (now - _state_bytes(parameters, f)) / 2**30 for f in FORMATS.values()}
    return "".join(f"--states {name} (saves {gib:.1f} GiB), " for name, gib in saved.items() if gib > 0)


def _state_bytes(parameters: Sequence[torch.Tensor], states: StateFormat) -> int:
    return sum(states.num_bytes(p.numel(), p.dtype) for p in parameters)


def _shortage(need: Need, room: Room) -> str:
    gib = 2**30
    return (
        f"optimizer state needs {need.num_params * need.state_bytes / gib:.1f} GiB; beside weights, gradients and "
        f"activations the GPU has {max(0.0, room.gpu_bytes) / gib:.1f} left, and the host {room.host_bytes / gib:.1f}"
    )
