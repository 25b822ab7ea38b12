"""Where state should live: the split over the three homes that makes the exposed part of a step shortest.

Pure arithmetic: sizes, rates and budgets in, fractions out. The objective is flat and the bounds are few, so a scan
over the host's share finds the best split; a linear program was rejected as one more dependency for the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 200
"""Shares of `host` that are tried. One step of 200 is half a per cent of the parameters."""

EARLY_SHARE = 0.88
"""Of the peak of forward and backward, what may be filled when backward ends: the host asks for memory for the first
layers of the next forward before the device has updated anything and let gradients go."""


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second, with everything running at once."""

    link_bytes_per_s: float
    """Each way, while both ways and the CPU are busy."""
    host_params_per_s: float
    """CPU AdamW, while the link is busy."""


@dataclass(frozen=True)
class Need:
    """What has to be placed, and what forward and backward take on the GPU beside weights and state."""

    num_params: int
    state_bytes: float
    """A parameter."""
    weight_bytes: float
    """A parameter; its gradient takes as much."""
    activation_bytes: float
    """The most that forward and backward take if no gradient is kept."""
    kept_bytes: float
    """The most they take with all the gradients that this schedule keeps."""
    gradients_leave: bool
    """Gradients of `host` parameters leave the GPU during backward, and lower `kept_bytes` by their size."""
    hidden_seconds: float
    """Arithmetic that updates can hide under: a forward in `after-norm`, a backward in `in-backward`."""
    end_bytes: float | None = None
    """What backward still takes when it ends, with all gradients. None: no state comes before its update."""

    def passing_bytes(self, host: float) -> float:
        """What forward and backward take with `host` parameters in that home."""
        return max(self.activation_bytes, self.kept_bytes - self._left(host))

    def early_bytes(self, host: float) -> float:
        """State that can come while backward runs, into what activations have left."""
        if self.end_bytes is None:
            return 0.0
        return max(0.0, EARLY_SHARE * self.passing_bytes(host) - (self.end_bytes - self._left(host)))

    def _left(self, host: float) -> float:
        return self.weight_bytes * host if self.gradients_leave else 0.0


@dataclass(frozen=True)
class Room:
    """Bytes beside the weights that state, and on the GPU activations and gradients too, may take."""

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
    """The split with the least exposed time, and of equals the one with least on the host. None if nothing fits."""
    best: Placement | None = None
    for step in range(STEPS + 1):
        candidate = _with_host_share(need, room, rates, need.num_params * step / STEPS)
        if candidate is not None and (best is None or candidate.exposed_seconds < best.exposed_seconds - 1e-9):
            best = candidate
    return best


def _with_host_share(need: Need, room: Room, rates: Rates, host: float) -> Placement | None:
    gpu = min(need.num_params - host, (room.gpu_bytes - need.passing_bytes(host)) / need.state_bytes)
    stream = need.num_params - host - gpu
    mirrored = need.state_bytes + 2 * need.weight_bytes  # a host chunk also has its weight and gradient there
    if gpu < 0 or stream * need.state_bytes + host * mirrored > room.host_bytes:
        return None
    link_seconds = link_bytes(need, stream, host) / rates.link_bytes_per_s
    cpu_seconds = host / rates.host_params_per_s
    exposed = max(0.0, link_seconds - need.hidden_seconds, cpu_seconds - need.hidden_seconds)
    return Placement(gpu, stream, host, exposed)


def link_bytes(need: Need, stream: float, host: float) -> float:
    """What crosses the link between two backwards, in the direction that has more: state in and weights up, or out."""
    streamed = stream * need.state_bytes
    return max(streamed, max(0.0, streamed - need.early_bytes(host)) + host * need.weight_bytes)
