"""Weights that stream on several GPUs: what a rank's rows of the streamed layers take, and how long they keep it busy.

The same arithmetic as the engine's placement has for them: their state is with the host or streams, their gradients
leave as they come, or add up where a step has several micro-batches. Unlike on one GPU (`by_layer.py`) a step goes row
by row, so that weights come for the forward and for the backward of every micro-batch, and inputs stay on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.machine.known import Machine
from penstock.plan.job import Crossing, Job, Settings
from penstock.plan.layout import LANDING_BYTES, layer_parameters, unit_bytes
from penstock.plan.memory import Peaks
from penstock.plan.split import Manner, ModelBytes, Rates, Room, Split, streamed_share


@dataclass(frozen=True)
class StreamedRows:
    """What of one rank streams."""

    num_params: float
    unit_bytes: int
    """A rank's rows of a layer, in an arena."""
    num_units: int
    weight_bytes: int
    state_bytes: float
    """A parameter, and so are the weight's."""
    micro_batches: int
    manner: Manner

    @classmethod
    def of(cls, job: Job, settings: Settings, gpus: int, micro_batches: int, state_bytes: float) -> StreamedRows:
        """With these settings."""
        layer = [-(-p.size // gpus) for p in layer_parameters(job.architecture)]
        manner = Manner(job.in_backward, job.overlap, True, job.accumulate_dtype)
        unit, b = unit_bytes(layer, job.dtype_bytes), job.dtype_bytes
        params = float(settings.streamed * sum(layer))
        return cls(params, unit, settings.streamed, b, state_bytes, micro_batches, manner)

    def leave(self, found: Peaks) -> Peaks:
        """Peaks without their gradients, which have left; of several micro-batches with their sums."""
        if self.micro_batches > 1:
            sums = self.num_params * self.manner.sum_bytes(self.weight_bytes, self.micro_batches)
            return replace(found, activation_bytes=found.activation_bytes + sums, kept_bytes=found.kept_bytes + sums)
        kept = max(found.activation_bytes, found.kept_bytes - self.num_params * self.weight_bytes)
        return replace(found, kept_bytes=kept)

    def rest(self, room: Room, machine: Machine) -> Room:
        """What arenas, state, and gradients that wait, for the norm or for the CPU, leave of both memories."""
        waiting = LANDING_BYTES if self.manner.in_backward else self.num_params * self.weight_bytes
        landings = waiting if machine.has_gpu and self.num_units else 0.0
        on_host = self.num_units * self.unit_bytes + self.num_params * self.state_bytes + landings
        return room.less(on_host) if machine.one_memory else room.less(0.0, on_host)

    def split(self, shares: dict[str, float], rates: Rates, hidden_seconds: float) -> Split:
        """Homes of their state: as they are named, or as the engine chooses them."""
        if shares:
            away = shares.get("stream", 0.0) + shares.get("host", 0.0)
            share = shares.get("stream", 0.0) / away if away else 0.0
        else:
            model = ModelBytes(int(self.num_params), self.state_bytes, self.weight_bytes)
            share = streamed_share(model, rates, hidden_seconds, in_backward=self.manner.in_backward)
        return Split(0.0, share * self.num_params, (1 - share) * self.num_params, 0.0)

    def crossings(self, split: Split) -> list[Crossing]:
        """What of them crosses the link in a step."""
        weights, state = self.num_params * self.weight_bytes, split.stream * self.state_bytes
        back = split.stream * self.weight_bytes
        # In backward those whose state streams are updated where they are made.
        comes, down = (0.0, split.host * self.weight_bytes) if self.manner.in_backward else (back, weights)
        return [
            Crossing("weights", 2 * self.micro_batches * weights + back, back),
            Crossing("state", state, state),
            Crossing("gradients", comes, down),
        ]


def together(*found: Crossing) -> tuple[Crossing, ...]:
    """Those of one name as one, without empty ones."""
    names = dict.fromkeys(one.name for one in found)
    sums = [
        Crossing(
            name, sum(c.in_bytes for c in found if c.name == name), sum(c.out_bytes for c in found if c.name == name)
        )
        for name in names
    ]
    return tuple(one for one in sums if one.in_bytes or one.out_bytes)
