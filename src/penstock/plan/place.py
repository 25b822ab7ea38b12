"""Where state should live: the split over the three homes that makes the exposed part of a step shortest.

Pure arithmetic: sizes, rates and budgets in, fractions out. The objective is flat and the bounds are few, so a scan
over the host's share finds the best split; a linear program was rejected as one more dependency for the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 200
"""Shares of `host` that are tried. One step of 200 is half a per cent of the parameters."""


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second, with everything running at once."""

    link_bytes_per_s: float
    """Each way, while both ways and the CPU are busy."""
    host_params_per_s: float
    """CPU AdamW, while the link is busy."""


@dataclass(frozen=True)
class Need:
    """What has to be placed. Bytes are per parameter."""

    num_params: int
    state_bytes: float
    weight_bytes: float
    gradients_kept: bool
    """`after-norm` keeps gradients on the GPU until the norm is known, except those of `host` chunks."""
    hidden_seconds: float
    """Arithmetic that updates can hide under: a forward in `after-norm`, a backward in `in-backward`."""


@dataclass(frozen=True)
class Room:
    """Bytes that state may take. `gpu_bytes` counts what is left beside weights, activations and all gradients."""

    gpu_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class Placement:
    """Parameters in each home, and the seconds of a step that nothing hides."""

    gpu: float
    stream: float
    host: float
    exposed_seconds: float

    def fractions(self) -> dict[str, float]:
        """Shares by home, without empty ones."""
        total = self.gpu + self.stream + self.host
        shares = {"gpu": self.gpu / total, "stream": self.stream / total, "host": self.host / total}
        return {name: share for name, share in shares.items() if share > 0}


def place(need: Need, room: Room, rates: Rates) -> Placement | None:
    """The split with the least exposed time; among equals the one with most on the GPU. None if nothing fits."""
    best: Placement | None = None
    for step in range(STEPS + 1):
        candidate = _with_host_share(need, room, rates, need.num_params * step / STEPS)
        if candidate is not None and (best is None or candidate.exposed_seconds < best.exposed_seconds - 1e-9):
            best = candidate
    return best


def _with_host_share(need: Need, room: Room, rates: Rates, host: float) -> Placement | None:
    freed = need.weight_bytes * host if need.gradients_kept else 0.0  # gradients of host chunks leave the GPU
    gpu = min(need.num_params - host, (room.gpu_bytes + freed) / need.state_bytes)
    stream = need.num_params - host - gpu
    mirrored = need.state_bytes + 2 * need.weight_bytes  # a host chunk also has its weight and gradient there
    if gpu < 0 or stream * need.state_bytes + host * mirrored > room.host_bytes:
        return None
    link_seconds = (stream * need.state_bytes + host * need.weight_bytes) / rates.link_bytes_per_s
    cpu_seconds = host / rates.host_params_per_s
    exposed = max(0.0, link_seconds - need.hidden_seconds, cpu_seconds - need.hidden_seconds)
    return Placement(gpu, stream, host, exposed)
