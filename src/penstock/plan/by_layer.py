"""A step layer by layer: what it takes, what crosses the link, and which seconds nothing hides.

Each layer is computed again in backward from its saved input, which is kept on the GPU or parked in host memory. The
last layers of the model may stream: their weights lie in host memory and come into one of a few slots, in forward and
again in backward; the last of forward stay there for backward. With the order `layers` a step is one pass of all
micro-batches, with `rows` each micro-batch is a pass of its own.

Pure arithmetic. Lanes are counted phase by phase, each against the arithmetic of its phase. A simulation of every copy
was rejected: on an H200 streamed weights cost llama-8b 0.3 % and qwen3-14b 1.2 %, less than the arithmetic is known to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property

from penstock.plan.job import Crossing
from penstock.plan.layout import LANDING_BYTES, PREFETCHED_INPUTS, UNIT_SLOTS, layer_parameters
from penstock.plan.memory import Work, in_flight_bytes, loss_bytes, saved_in_layer
from penstock.plan.speed import Arithmetic
from penstock.plan.split import STEPS, Manner, Rates, Requirements, Room, Split, Traffic
from penstock.plan.tiles import tiled_bytes
from penstock.recipe.presets import Architecture

LEAVING = {False: 1.0, True: 1.5}
"""Layers whose gradients are on their way down while the next one computes; of updates in backward, which wait for
places, more: 1.3 to 1.7 on an H200 (llama-70b, gpt-oss-20b, qwen3-30b-a3b)."""


@dataclass(frozen=True)
class Moment:
    """What is on the GPU beside weights and state."""

    inputs: float
    """Of layers, saved for backward."""
    activations: float
    """And gradients of what is computed just now."""
    gradients: float
    """Of resident parameters, final, if they are kept for the norm."""


@dataclass(frozen=True)
class Homes:
    """Parameters by home, of those whose weights are resident and of those whose weights stream."""

    resident: Split
    streamed: Split

    @property
    def all(self) -> Split:
        """Both together."""
        r, s = self.resident, self.streamed
        return Split(r.gpu, r.stream + s.stream, r.host + s.host, r.exposed_seconds)


@dataclass(frozen=True)
class LayerStep:
    """A step on one GPU, before its state has homes."""

    architecture: Architecture
    work: Work
    """One micro-batch."""
    rows: int
    """Of the step."""
    streamed: int
    """Layers, the last ones."""
    order: str
    parked: bool
    manner: Manner

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in a step."""
        return -(-self.rows // self.work.rows)

    @property
    def passes(self) -> int:
        """How often a step goes through all layers."""
        return 1 if self.order == "layers" else self.num_micro_batches

    @cached_property
    def layer_params(self) -> int:
        """Of one layer."""
        return sum(p.size for p in layer_parameters(self.architecture))

    @cached_property
    def streamed_params(self) -> int:
        """Those whose weights lie in host memory."""
        return self.streamed * self.layer_params

    @cached_property
    def resident_params(self) -> int:
        """All others."""
        return self.architecture.num_parameters() - self.streamed_params

    @property
    def input_bytes(self) -> float:
        """The input of one layer, of all rows of a pass; compiled, with the empty ones of the last micro-batch."""
        padded = self.order == "layers" and self.work.compiled
        rows = self.num_micro_batches * self.work.rows if padded else self._pass_rows
        return float(rows * self.work.length * self.architecture.hidden * self.work.dtype_bytes)

    @property
    def keeps_sums(self) -> bool:
        """Whether gradients of all parameters add up on the GPU from one pass to the next."""
        return self.passes > 1

    @property
    def sums(self) -> float:
        """What those take."""
        each = self.manner.sum_bytes(self.work.dtype_bytes, self.num_micro_batches)
        return each * self.architecture.num_parameters() if self.keeps_sums else 0.0

    @property
    def gradients_leave(self) -> bool:
        """Whether gradients of resident parameters in `host` leave during backward."""
        return self.manner.sends_down and not self.keeps_sums

    def moments(self) -> Iterator[Moment]:
        """Where the peak can be: at the loss, in the layers where what grows and what shrinks changes, at the end."""
        a, work, b = self.architecture, self.work, self.work.dtype_bytes
        one, table, first = self.input_bytes * work.rows / self._pass_rows, float(a.vocab * a.hidden), self._first
        adds = self.order == "layers" and self.num_micro_batches > 1
        own_sum = self.manner.sum_bytes(b, self.num_micro_batches) if adds else 0.0
        others = self.sums + self.input_bytes - one  # what the other micro-batches gave, and in backward its gradient
        # The head sees all micro-batches of a pass at once.
        together = replace(work, rows=self._pass_rows, passes=-(-self._pass_rows // work.rows))
        yield Moment(self._saved(a.layers, one), self.sums + loss_bytes(a, together), 0.0)
        if a.tied and not self.keeps_sums:  # final only when the embedding's has come
            others += max(float(b), own_sum) * table
        whole, fresh = saved_in_layer(a, work), float(b * self.layer_params)
        for number in {a.layers - 1, first, max(0, first - 1), 0} & set(range(a.layers)):
            leaving = LEAVING[self.manner.in_backward] * fresh if first <= number + 1 < a.layers else 0.0
            alone = tiled_bytes(a, work) if work.tile else whole + max(in_flight_bytes(a, work), fresh - whole)
            now = alone + own_sum * self.layer_params + leaving
            yield Moment(self._saved(number + 1, one), others + now, self._kept(max(0, first - 1 - number)))
        # The embedding's gradients of all micro-batches are made at once: twice as much as what was looked up, and sums
        # in fp32 that torch makes of them.
        tokens = self._pass_rows * work.length
        sums = 4 * a.hidden * (tokens / 10 + min(tokens, a.vocab))
        end = others + one + 2 * self.input_bytes + sums + b * table
        end += own_sum * self.layer_params if self.streamed else 0.0  # kept from layer to layer, until the step ends
        yield Moment(self._saved(0, one), end, self._kept(first))

    @property
    def _pass_rows(self) -> int:
        return self.rows if self.order == "layers" else self.work.rows

    @property
    def _first(self) -> int:
        """The first layer that streams."""
        return self.architecture.layers - self.streamed

    def _saved(self, count: int, one: float) -> float:
        """Inputs of so many layers on the GPU. If they are parked: those on their way, and what was embedded."""
        if not self.parked:
            return count * self.input_bytes
        between = self.work.every * self.input_bytes if self.work.every > 1 else 0.0  # of layers computed together
        return self.input_bytes + 2 * PREFETCHED_INPUTS * one + between

    @property
    def parked_bytes(self) -> float:
        """In host memory, of one pass."""
        return -(-self.architecture.layers // self.work.every) * self.input_bytes if self.parked else 0.0

    def _kept(self, layers: int) -> float:
        """Final gradients of the head and of so many layers."""
        if self.keeps_sums or self.manner.in_backward:
            return 0.0
        a = self.architecture
        return float(self.work.dtype_bytes * (layers * self.layer_params + (0 if a.tied else a.vocab * a.hidden)))

    def requirements(self, state_bytes: float, hidden_seconds: float) -> Requirements:
        """Of the resident parameters: what has to be placed beside the rest."""
        found, b = list(self.moments()), self.work.dtype_bytes
        dropped = max(m.inputs + m.activations for m in found)
        kept = max(m.inputs + m.activations + m.gradients for m in found)
        return Requirements(
            self.resident_params, state_bytes, b, b, dropped, kept, self.gradients_leave, hidden_seconds,
            copies=self.manner.copies,
        )  # fmt: skip

    def inputs_at_peak(self) -> float:
        """Of the peak, what saved inputs take."""
        return max(self.moments(), key=lambda m: m.inputs + m.activations + m.gradients).inputs


@dataclass(frozen=True)
class Phase:
    """Bytes that cross the link in one phase of one pass."""

    seconds: float
    """Of arithmetic that can hide them."""
    in_bytes: float
    out_bytes: float

    def exposed(self, rates: Rates) -> float:
        """What is not hidden of it."""
        return max(0.0, max(self.in_bytes, self.out_bytes) / rates.link_bytes_per_s - self.seconds)


@dataclass(frozen=True)
class LayerTraffic:
    """What moves in a step, and what of it shows."""

    step: LayerStep
    state_bytes: float
    """A parameter."""
    arithmetic: Arithmetic
    """Of the whole step."""

    @cached_property
    def forward(self) -> Phase:
        """Of one pass: weights come, inputs go. The head comes last and hides nothing."""
        seconds = (self.arithmetic.forward_s - self.arithmetic.head_s) / self.step.passes
        return Phase(seconds, float(self._b * self.step.streamed_params), self._parked)

    @cached_property
    def backward(self) -> Phase:
        """Of one pass: weights come again but for those that stayed, and inputs."""
        again = max(0, self.step.streamed - UNIT_SLOTS) * self.step.layer_params
        if self.step.work.every > UNIT_SLOTS:  # layers that are computed together do not all stay for their backward
            again *= 2
        seconds = (self.arithmetic.backward_s + self.arithmetic.recompute_s) / self.step.passes
        return Phase(seconds, self._b * again + self._parked, 0.0)

    def exposed_seconds(self, homes: Homes, rates: Rates) -> float:
        """What nothing hides: updates under the first forward or the last backward, and every pass's own traffic."""
        (_, stream, host, _), (_, with_weights, in_place, _) = astuple(homes.resident), astuple(homes.streamed)
        return self._exposed(rates)(stream, host, with_weights, in_place)

    def _exposed(self, rates: Rates) -> Callable[[float, float, float, float], float]:
        """The same as a function of resident parameters in `stream` and `host`, and of streamed ones."""
        forward, backward, manner = self.forward, self.backward, self.step.manner
        b, s, link = self._b, self.state_bytes, rates.link_bytes_per_s
        own = forward.exposed(rates) + backward.exposed(rates)
        plain, streamed = (self.step.passes - 1) * own, b * self.step.streamed_params
        comes = 0 if manner.in_backward else b  # a gradient that is not updated where it was made

        def exposed(stream: float, host: float, with_weights: float, in_place: float) -> float:
            incoming = s * stream + b * host + (s + b + comes) * with_weights
            outgoing = s * stream + (s + b) * with_weights
            down = streamed + b * host - (b - comes) * with_weights
            updates, moments = self._cpu_seconds(rates, host + in_place, stream + with_weights)
            if not manner.overlap:  # the baseline: updates follow backward
                return plain + own + (incoming + outgoing + down) / link + updates
            phase, other = (backward, forward) if manner.in_backward else (forward, backward)
            late = max((phase.in_bytes + incoming) / link, (phase.out_bytes + outgoing) / link, updates)
            if manner.in_backward:
                late = max(late, (phase.out_bytes + outgoing + down) / link)
                return plain + max(0.0, late - phase.seconds) + other.exposed(rates)
            last = max(other.in_bytes, other.out_bytes + down) / link
            shown = max(0.0, late - phase.seconds) + max(0.0, last - other.seconds)
            return plain + max(shown, updates + moments - self.step.passes * (forward.seconds + backward.seconds))

        return exposed

    def last_update(self, homes: Homes, rates: Rates) -> float:
        """What backward does not hide of its own updates: it ends with the layer that forward begins with.

        No reason to choose other homes: those would be as late.
        """
        each = self.cpu_seconds(homes, rates) / self.step.architecture.layers
        return each if self.step.manner.in_backward and self.step.manner.overlap else 0.0

    def cpu_seconds(self, homes: Homes, rates: Rates) -> float:
        """Of the cores, for what forward or backward waits for."""
        return self._cpu_seconds(rates, homes.all.host, homes.all.stream)[0]

    def _cpu_seconds(self, rates: Rates, host: float, streaming: float) -> tuple[float, float]:
        """Of updates that forward or backward waits for, and of moments that come later, if that is shorter."""
        if not self.step.manner.masters_first or streaming or not rates.alone_params_per_s:
            return host / rates.host_params_per_s, 0.0
        arithmetic = self.step.passes * (self.forward.seconds + self.backward.seconds)
        traffic = Traffic.of(self.state_bytes, self._b)
        return traffic.stages(host / rates.alone_params_per_s, self.forward.seconds, arithmetic)

    def crossings(self, homes: Homes) -> tuple[Crossing, ...]:
        """All of a step, by what it is."""
        passes, parked = self.step.passes, self.step.passes * self._parked
        fetched = passes * (self.forward.in_bytes + self.backward.in_bytes) - parked
        weights, state, gradients = self._updates(homes)
        found = (
            replace(weights, in_bytes=weights.in_bytes + fetched),
            state,
            replace(gradients, out_bytes=self._gradients(homes)),
            Crossing("inputs", parked, parked),
        )
        return tuple(crossing for crossing in found if crossing.in_bytes or crossing.out_bytes)

    @property
    def landing_bytes(self) -> float:
        """Host memory for gradients that came down: all of them until the norm is known, else a few."""
        return float(LANDING_BYTES if self.step.manner.in_backward else self._b * self.step.streamed_params)

    @property
    def _b(self) -> int:
        return self.step.work.dtype_bytes

    @property
    def _parked(self) -> float:
        """Inputs of one pass, each way."""
        return self.step.parked_bytes

    def _gradients(self, homes: Homes) -> float:
        """Of layers that stream, and of `host`; in backward those of `stream` are updated where they are made."""
        stay = homes.streamed.stream if self.step.manner.in_backward else 0.0
        return self._b * (self.step.streamed_params - stay + homes.resident.host)

    def _updates(self, homes: Homes) -> tuple[Crossing, Crossing, Crossing]:
        """Weights, state and gradients that move because of updates; a streamed weight goes with its state."""
        b, s, resident, streamed = self._b, self.state_bytes, homes.resident, homes.streamed
        state = s * (resident.stream + streamed.stream)
        return (
            Crossing("weights", b * (resident.host + streamed.stream), b * streamed.stream),
            Crossing("state", state, state),
            Crossing("gradients", 0.0 if self.step.manner.in_backward else b * streamed.stream, 0.0),
        )


def split_layers(
    traffic: LayerTraffic, need: Requirements, room: Room, rates: Rates, staging: float = 0.0
) -> Homes | None:
    """The homes with the least exposed time. None if nothing fits. `staging`: what slots take if any state streams.

    By the parameters in `host`, of which those that stream come first; the GPU takes as much of the rest as fits. Of
    equals the one that is nearest to streamed layers in `host` and others elsewhere.
    """
    away, here = float(traffic.step.streamed_params), float(traffic.step.resident_params)
    state, b = need.state_bytes, need.weight_bytes
    exposed_with, landings, best, least = traffic._exposed(rates), traffic.landing_bytes, None, math.inf
    left = room.gpu_bytes - need.peak_bytes(here)
    if left < 0 or (here + away) * state - left > room.host_bytes:
        return None
    # So many are on the GPU where nothing streams: their gradients stay there too.
    stay = min(here, left / (state + (b if need.gradients_leave else 0)))
    hosts = {away, away + here - stay, *((away + here) * step / STEPS for step in range(STEPS + 1))}
    for in_host in sorted(hosts, key=lambda host: abs(host - away)):
        in_place = min(away, in_host)
        host, with_weights = in_host - in_place, away - in_place
        most = (room.gpu_bytes - need.peak_bytes(host)) / state
        if with_weights or most < here - host - 1:
            most -= staging / state
        gpu = min(here - host, most)
        on_host = (here + away - gpu) * state + b * need.copies * host + landings
        if gpu < 0 or on_host > room.host_bytes:
            continue
        exposed = exposed_with(here - host - gpu, host, with_weights, in_place)
        if exposed < least - 1e-9:
            best, least = (gpu, here - host - gpu, host, with_weights, in_place), exposed
        if least <= 0:
            break
    if best is None:
        return None
    gpu, stream, host, with_weights, in_place = best
    return Homes(Split(gpu, stream, host, least), Split(0.0, with_weights, in_place, 0.0))


def named_layers(
    traffic: LayerTraffic, need: Requirements, room: Room, rates: Rates, shares: dict[str, float]
) -> Homes | None:
    """Homes that the recipe names, if they fit."""
    resident = _of(traffic.step.resident_params, shares)
    streamed = _of(traffic.step.streamed_params, streamed_shares(shares))
    on_gpu = resident.gpu * need.state_bytes + need.peak_bytes(resident.host)
    on_host = (resident.stream + resident.host + traffic.step.streamed_params) * need.state_bytes
    on_host += need.weight_bytes * need.copies * resident.host + traffic.landing_bytes
    if on_gpu > room.gpu_bytes or on_host > room.host_bytes:
        return None
    exposed = traffic.exposed_seconds(Homes(resident, streamed), rates)
    return Homes(replace(resident, exposed_seconds=exposed), streamed)


def streamed_shares(shares: dict[str, float]) -> dict[str, float]:
    """Homes of layers that stream, where a recipe names some: `gpu` is for resident weights, so that others take it."""
    found = {name: share for name, share in shares.items() if name != "gpu"}
    return found or {"host": 1.0}


def _of(num_params: int, shares: dict[str, float]) -> Split:
    gpu, stream, host = (num_params * shares.get(n, 0.0) / sum(shares.values()) for n in ("gpu", "stream", "host"))
    return Split(gpu, stream, host, 0.0)
