"""How much state should live where: the split over the three homes that makes the exposed part of a step shortest.

Pure arithmetic: sizes, rates and budgets in, shares out. The objective is flat and the bounds are few, so a scan over
the host's share finds the best split; a linear program was rejected as one more dependency for the same answer.

The rules of memory are here once, for the plan, which predicts a profile, and for the engine, which measures one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STEPS = 200
"""Shares of `host` that are tried. One step of 200 is half a per cent of the parameters."""

CLEARLY = 0.15
"""Of the cores' time alone, what streaming must save before any state streams whose weight does. In a step inputs and
weights cross the same memory, which the rates do not know: where they promised a little, llama-8b took 4.06 s a step
instead of 3.84 (benchmarks/results/2026-11-16-h200/streamed)."""
PREFETCH_SHARE = 0.88
"""Of the peak of forward and backward, what may be filled when backward ends: the host asks for memory for the first
layers of the next forward before the device has updated anything and let gradients go."""


@dataclass(frozen=True)
class Profile:
    """What is known of forward and backward of one micro-batch on one GPU: measured in a trial, or predicted."""

    activation_bytes: float | None = None
    """The most that both take beside weights if no gradient is kept. None: not known."""
    kept_bytes: float | None = None
    """The same with all gradients kept: at most both sums, as activations go while gradients come. None: their sum."""
    bytes_after: Mapping[object, float] = field(default_factory=dict)
    """By parameter, the most from its gradient to the end of backward, with all gradients; empty where not tried."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    start_seconds: float = 0.0
    """Before the passes that were timed: compiling, mostly."""
    micro_batches: int = 1
    """Of several, all gradients of one are there while the next one runs."""


@dataclass(frozen=True)
class Manner:
    """How updates follow backward, as far as it decides what takes memory."""

    in_backward: bool
    overlap: bool = True
    sharded: bool = False
    """By FSDP2, which keeps the gradients of a unit in one piece of memory, so that they make room together or not at
    all, and whose hooks run on a stream of its own, whose memory is not what activations leave."""
    accumulate_dtype: str = "fp32"
    """In which gradients of micro-batches add up."""

    @property
    def prefetches(self) -> bool:
        """Whether streamed state may come before its update."""
        return self.overlap and not self.in_backward and not self.sharded

    @property
    def sends_down(self) -> bool:
        """Whether gradients of `host` leave the GPU during backward."""
        return self.overlap and not self.in_backward

    @property
    def masters_first(self) -> bool:
        """Whether the host updates masters before moments, since a forward waits for them."""
        return self.overlap and not self.in_backward

    @property
    def copies(self) -> int:
        """See `Requirements`."""
        return 1 if self.in_backward else 2

    def sum_bytes(self, weight_bytes: float, micro_batches: int) -> float:
        """A parameter's share of gradients that are kept: of two micro-batches the first is kept as it came."""
        in_fp32 = micro_batches > 2 and self.accumulate_dtype == "fp32"
        return max(4.0, weight_bytes) if in_fp32 else weight_bytes


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second, with everything running at once."""

    link_bytes_per_s: float
    """Each way, while both ways and the CPU are busy."""
    host_params_per_s: float
    """CPU AdamW, while the link is busy."""
    alone_params_per_s: float = 0.0
    """The same while no state streams, of masters alone where moments may come later; 0: not known."""


@dataclass(frozen=True)
class Requirements:
    """What has to be placed, and what forward and backward take on the GPU beside weights and state."""

    num_params: int
    state_bytes: float
    """A parameter."""
    weight_bytes: float
    """A parameter; its final gradient takes as much."""
    gradient_bytes: float
    """A parameter, the most that is kept of it: of several micro-batches their sum."""
    activation_bytes: float
    """The most that forward and backward take if no gradient is kept."""
    kept_bytes: float
    """The most they take with all the gradients that are kept."""
    gradients_leave: bool
    """Gradients of `host` parameters leave the GPU during backward, and lower `kept_bytes` by their size."""
    hidden_seconds: float
    """Arithmetic that updates can hide under: a forward in `after-norm`, a backward in `in-backward`."""
    end_bytes: float | None = None
    """What backward still takes when it ends, with all gradients. None: no state comes before its update."""
    copies: int = 2
    """Of a parameter in `host` beside its state: of its weight, and of its gradient if that waits for the norm."""

    def peak_bytes(self, host: float) -> float:
        """The most that forward and backward take with `host` parameters in that home."""
        return max(self.activation_bytes, self.kept_bytes - self.sent_bytes(host))

    def prefetch_bytes(self, host: float) -> float:
        """State that can come while backward runs, into what activations have left."""
        if self.end_bytes is None:
            return 0.0
        return max(0.0, PREFETCH_SHARE * self.peak_bytes(host) - (self.end_bytes - self.sent_bytes(host)))

    def sent_bytes(self, host: float) -> float:
        """Gradients that leave the GPU during backward."""
        return self.weight_bytes * host if self.gradients_leave else 0.0


@dataclass(frozen=True)
class ModelBytes:
    """Parameters on one GPU, and the mean bytes of each."""

    num_params: int
    state_bytes: float
    weight_bytes: float


def requirements(
    model: ModelBytes, profile: Profile, manner: Manner, hidden_seconds: float, end_bytes: float | None
) -> Requirements:
    """What state, gradients and activations take, given what one micro-batch takes."""
    assert profile.activation_bytes is not None, "whoever does not know it assumes something"
    activations = profile.activation_bytes
    gradient_bytes = manner.sum_bytes(model.weight_bytes, profile.micro_batches)
    with_gradients = activations + model.num_params * gradient_bytes
    kept = with_gradients if profile.kept_bytes is None else profile.kept_bytes
    accumulates = profile.micro_batches > 1
    if accumulates:  # the next micro-batch runs beside all gradients of the one before
        activations = kept = with_gradients
    elif manner.in_backward:
        kept = activations
    return Requirements(
        model.num_params,
        model.state_bytes,
        model.weight_bytes,
        gradient_bytes,
        activation_bytes=activations,
        kept_bytes=kept,
        gradients_leave=manner.sends_down and not accumulates,
        hidden_seconds=hidden_seconds,
        end_bytes=end_bytes if manner.prefetches else None,
        copies=manner.copies,
    )


@dataclass(frozen=True)
class Room:
    """Bytes beside the weights that state, and on the GPU activations and gradients too, may take."""

    gpu_bytes: float
    host_bytes: float

    def less(self, gpu_bytes: float, host_bytes: float = 0.0) -> Room:
        """What is left beside these."""
        return Room(self.gpu_bytes - gpu_bytes, self.host_bytes - host_bytes)


@dataclass(frozen=True)
class Split:
    """Parameters in each home, and the seconds of a step that nothing hides."""

    gpu: float
    stream: float
    host: float
    exposed_seconds: float

    def shares(self) -> dict[str, float]:
        """By home, without empty ones."""
        total = self.gpu + self.stream + self.host
        shares = {"gpu": self.gpu / total, "stream": self.stream / total, "host": self.host / total}
        return {name: share for name, share in shares.items() if share > 0}


def best_split(need: Requirements, room: Room, rates: Rates) -> Split | None:
    """The split with the least exposed time, and of equals the one with least on the host. None if nothing fits."""
    every, state, copied = need.num_params, need.state_bytes, need.state_bytes + need.copies * need.weight_bytes
    most = min(every, (room.gpu_bytes - need.peak_bytes(every)) / state)
    if most < 0 or (every - most) * state > room.host_bytes:  # as of most settings that a plan tries
        return None
    best: Split | None = None
    for step in range(STEPS + 1):
        host = every * step / STEPS
        gpu = min(every - host, (room.gpu_bytes - need.peak_bytes(host)) / state)
        stream = every - host - gpu
        if gpu < 0 or stream * state + host * copied > room.host_bytes:
            continue
        busy = max(link_bytes(need, stream, host) / rates.link_bytes_per_s, host / rates.host_params_per_s)
        exposed = max(0.0, busy - need.hidden_seconds)
        if best is None or exposed < best.exposed_seconds - 1e-9:
            best = Split(gpu, stream, host, exposed)
        if best.exposed_seconds <= 0:
            break
    return best


def link_bytes(need: Requirements, stream: float, host: float) -> float:
    """What crosses the link between two backwards, in the direction that has more: state in and weights up, or out."""
    streamed = stream * need.state_bytes
    return max(streamed, max(0.0, streamed - need.prefetch_bytes(host)) + host * need.weight_bytes)


@dataclass(frozen=True)
class Traffic:
    """Bytes of host memory that an update by the CPU reads and writes, a parameter."""

    whole: float
    master: float
    moments: float

    @classmethod
    def of(cls, state_bytes: float, weight_bytes: float) -> Traffic:
        """State and weight both ways and the gradient; for the master moments one way, for those no weight."""
        remainder = 2.0 if weight_bytes == 2 else 0.0
        moments = state_bytes - remainder
        weights = 2 * (weight_bytes + remainder)
        return cls(2 * moments + weights + weight_bytes, moments + weights + weight_bytes, 2 * moments + weight_bytes)

    def stages(self, masters: float, forward: float, arithmetic: float) -> tuple[float, float]:
        """Seconds of updates that forward waits for, and of moments that come later under the rest of the step.

        Moments hide only as far as that lasts: of short steps an update as a whole, which moves less, is shorter.
        """
        moments, whole = (masters * part / self.master for part in (self.moments, self.whole))
        later = max(arithmetic + max(0.0, masters - forward), masters + moments)
        pays = later <= arithmetic + max(0.0, whole - forward)
        return (masters, moments) if pays else (whole, 0.0)


def streamed_share(model: ModelBytes, rates: Rates, hidden_seconds: float, *, in_backward: bool) -> float:
    """Of parameters whose weights lie in host memory, the share whose state streams; the cores update the rest.

    With the state travels the weight, and after the norm the gradient; all weights come once more for the forward or
    backward that hides it. What travels passes through host memory as often as what the cores update, so where that is
    what holds the cores up, as on most machines, a share that streams only slows them.

    In backward gradients come a layer at a time and have little room to wait in, so that backward stands still while
    link or cores are behind: there only half of what could hide counts as hidden. Cores that had all of it to fill were
    0.25 s behind at its end (benchmarks/results/2026-11-17-h200/streamed/six_layers.txt).
    """
    copies, hidden = (1, hidden_seconds / 2) if in_backward else (2, hidden_seconds)
    number, weight_bytes, link, cores = (
        model.num_params, model.weight_bytes, rates.link_bytes_per_s, rates.host_params_per_s
    )  # fmt: skip
    if not number:
        return 0.0
    beside = model.state_bytes + copies * weight_bytes
    cpu_seconds = number / max(rates.alone_params_per_s, cores)
    least = max(0.0, number * weight_bytes / link - hidden, cpu_seconds - hidden) - CLEARLY * cpu_seconds
    # Until the link has as much to do as the cores, or arithmetic hides what these have left.
    even = (1 / cores - weight_bytes / link) / (beside / link + 1 / cores)
    share = max(0.0, min(even, 1 - hidden * cores / number))
    return share if max(0.0, number * (1 - share) / cores - hidden) < least else 0.0
