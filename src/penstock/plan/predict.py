"""One plan: what a recipe takes on a machine with settings that are given. `solve.py` chooses the settings.

The same arithmetic as the engine's own placement (`offload/placing.py`), with predicted instead of measured activations
and times. Every figure is for one GPU; several of them hold a share each of weights, gradients and state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import cast

from penstock.machine.known import Machine
from penstock.plan import speed
from penstock.plan.by_layer import Homes, LayerStep, LayerTraffic
from penstock.plan.job import Crossing, Job, Seconds, Settings, weights_word
from penstock.plan.layout import (
    FORMATS,
    STREAM_QUEUE,
    UNIT_SLOTS,
    Buffer,
    Chunk,
    HomeName,
    Place,
    StateFormat,
    cut,
    layer_parameters,
    model_buffers,
    parked_bytes,
    state_buffers,
    unit_buffers,
)
from penstock.plan.memory import (
    CONTEXT_BYTES,
    Disk,
    Peaks,
    Work,
    disk,
    loading_bytes,
    peaks,
    work_of,
)
from penstock.plan.on_ranks import StreamedRows, together
from penstock.plan.placement import Dealt, deal, deal_away
from penstock.plan.rooms import process_bytes, rooms, sharing_a_host
from penstock.plan.shares import by_unit, choose_split, chunk_size_of, room_for_layers, split_of_layers
from penstock.plan.split import Manner, ModelBytes, Profile, Rates, Requirements, Room, Split, requirements

QUEUE = "gradients in the queue"


@dataclass(frozen=True)
class Plan:
    """What one GPU, and its share of the host, would hold and do."""

    job: Job
    settings: Settings
    machine: Machine
    gpus: int
    split: Split
    """What was solved; `dealt` is what becomes of it."""
    has_room: bool
    """Whether a split was found; `fits` looks at what was dealt."""
    seconds: Seconds
    activation_bytes: float
    """The most that forward and backward take without gradients."""
    gradient_bytes: float
    """Gradients that are there at once."""
    peak_step_bytes: float
    """The most of both together."""
    gpu_room: float
    """What the plan may fill: the GPU's memory less the driver's and a reserve."""
    host_room: float
    crossings: tuple[Crossing, ...] = ()
    """What the link carries in a step."""
    streamed_split: Split | None = None
    """Of `split`, the layers whose weights stream."""
    input_bytes: float = 0.0
    """Saved inputs that are on the GPU at the peak, where layers are computed one by one."""
    asked: Room | None = field(default=None, compare=False)
    """The room that homes were chosen for, where they may give way: layer by layer, and on several GPUs."""

    @property
    def rows(self) -> int:
        """Rows in a step on one GPU."""
        return -(-self.job.batch_size // self.gpus)

    @property
    def num_params(self) -> int:
        """Of the model."""
        return self.job.architecture.num_parameters()

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs, full rows."""
        return self.job.batch_size * self.job.length / self.seconds.step

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of one GPU."""
        flops = speed.model_flops(self.job.architecture, self.job.batch_size, self.job.length)
        return flops / self.seconds.step / self.gpus / 1e12

    @property
    def format(self) -> StateFormat:
        """Of the state."""
        return FORMATS[self.settings.states]

    @cached_property
    def chunk_size(self) -> int:
        """Elements in a chunk, as the engine chooses it: from the link where it measures one."""
        link = self.machine.link_bytes_per_s if self.gpus == 1 else _rates(self.machine, self.gpus).link_bytes_per_s
        return chunk_size_of(self.job, link, self.format)

    @cached_property
    def dealt(self) -> Dealt:
        """Every chunk by home, as the engine deals them."""
        wholes = [
            Chunk(index, 0, -(-size // self.gpus), self.format, self.job.dtype_bytes)
            for index, size in enumerate(self.job.sizes)
        ]
        away = self.streamed_split
        if away is None:
            return self._deal(wholes, self.split)
        here = Split(self.split.gpu, self.split.stream - away.stream, self.split.host - away.host, 0.0)
        resident = self._deal([whole for whole in wholes if whole.parameter not in self.streamed], here)
        chunks = [chunk for i in self.streamed for chunk in cut(wholes[i], self.chunk_size)]
        streamed = deal_away(chunks, away.stream / (away.stream + away.host))
        return {name: [*chunks, *streamed[name]] for name, chunks in resident.items()}

    def _deal(self, wholes: Sequence[Chunk], split: Split) -> Dealt:
        shares, cuts = cast(dict[HomeName, float], split.shares()), [cut(whole, self.chunk_size) for whole in wholes]
        resident = self.job.architecture.layers - self.settings.streamed
        return deal(cuts if self.gpus == 1 else by_unit(cuts, self.job.architecture, resident), shares)

    @cached_property
    def streamed(self) -> range:
        """Numbers of the parameters whose weights stream."""
        a, count = self.job.architecture, len(layer_parameters(self.job.architecture))
        return range(1 + (a.layers - self.settings.streamed) * count, 1 + a.layers * count)

    @property
    def fits(self) -> bool:
        """Whether what was dealt, rather than what was solved, has room: chunks and parameters are not cut at will."""
        return self.has_room and max(self.over) <= 0

    @cached_property
    def over(self) -> tuple[float, float]:
        """Bytes by which what was dealt is over what GPU and host have; of one memory, both together."""
        outside = ("CUDA context", "process", QUEUE)  # the driver's, the process's, and what the reserve is for
        gpu, host = (
            sum(b.num_bytes for b in self.buffers if b.place == place and b.name not in outside)
            for place in ("gpu", "host")
        )
        if self.machine.one_memory:
            return gpu + host - self.gpu_room, 0.0
        return gpu - self.gpu_room, host - self.host_room

    @cached_property
    def buffers(self) -> list[Buffer]:
        """Long-lived ones from the layout, then what comes and goes at the peak, on one GPU and its host."""
        local = [-(-size // self.gpus) for size in self.job.sizes]
        on_gpu = self.machine.has_gpu
        device: Place = "gpu" if on_gpu else "host"
        found = model_buffers(local, self.job.dtype_bytes, place=device, streamed=self.streamed)
        found += self._away(device)
        found += state_buffers(self.dealt, on_gpu=on_gpu, streamed=self.streamed, in_backward=self.job.in_backward)
        moment: list[tuple[str, float]] = [
            ("gradients", self.gradient_bytes),
            ("saved inputs", self.input_bytes),
            ("activations", self.peak_step_bytes - self.gradient_bytes - self.input_bytes),
        ]
        if self.job.in_backward and self.split.stream:
            moment.append((QUEUE, self.job.dtype_bytes * STREAM_QUEUE * self.chunk_size))
        found += [Buffer(name, device, int(num_bytes)) for name, num_bytes in moment if num_bytes > 0]
        if on_gpu:
            found.append(Buffer("CUDA context", "gpu", int(CONTEXT_BYTES)))
        found.append(Buffer("process", "host", int(process_bytes(self.job, self.machine))))
        return found

    def _away(self, device: Place) -> list[Buffer]:
        """Weights that stream, with their slots on one GPU, and parked inputs."""
        a, b, settings = self.job.architecture, self.job.dtype_bytes, self.settings
        layer = [-(-p.size // self.gpus) for p in layer_parameters(a)]
        found = unit_buffers([layer] * settings.streamed, b, place=device, slots=UNIT_SLOTS if self.gpus == 1 else 0)
        if settings.by_layer and settings.parks:
            rows = self.rows if settings.order == "layers" else settings.micro_batch
            count = -(-a.layers // settings.every)
            found.append(Buffer("parked inputs", "host", parked_bytes(count, rows, self.job.length * a.hidden, b)))
        return found

    @property
    def weights(self) -> str:
        """As a recipe says it."""
        return weights_word(self.settings.streamed, self.job.architecture.layers)

    def peak_bytes(self, where: str) -> int:
        """The most in one place; on the GPU what torch's allocator hands out, so without the driver's."""
        return sum(b.num_bytes for b in self.buffers if b.place == where and b.name != "CUDA context")

    @property
    def loading(self) -> float:
        """GPU memory while the weights come."""
        sizes = [size for index, size in enumerate(self.job.sizes) if index not in self.streamed]
        return loading_bytes(sizes, self.job.dtype_bytes, self.gpus)

    @property
    def disk(self) -> Disk:
        """Checkpoints and the exported model."""
        state = self.format.bytes_per_element(self.job.dtype_bytes)
        return disk(self.num_params, state, self.job.dtype_bytes, self.job.checkpoints)


@dataclass(frozen=True)
class _Rank:
    """One GPU's share of a step."""

    machine: Machine
    """With rates of one rank: ranks on a CPU share its cores."""
    num_params: float
    rows: int
    micro_batch: int
    step: speed.Arithmetic
    one: speed.Arithmetic
    """Of one micro-batch."""
    peaks: Peaks

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in a step."""
        return -(-self.rows // self.micro_batch)


@lru_cache(256)
def _rank(job: Job, work: Work, machine: Machine, gpus: int) -> _Rank:
    """`work`: of a micro-batch."""
    a, rows = job.architecture, -(-job.batch_size // gpus)
    rank = machine
    if gpus > 1 and not machine.has_gpu:  # they share its cores
        rank = replace(
            machine,
            matrix_flops_per_s=machine.matrix_flops_per_s / gpus,
            device_memory_bytes_per_s=machine.device_memory_bytes_per_s / gpus,
        )
    all_rows = replace(work, rows=rows, passes=-(-rows // work.rows))
    step, one = (speed.arithmetic(a, w, rank, gpus) for w in (all_rows, work))
    return _Rank(rank, a.num_parameters() / gpus, rows, work.rows, step, one, peaks(a, work, gpus))


def _requirements(job: Job, rank: _Rank, format: StateFormat, gpus: int, away: float) -> Requirements:
    """As the engine has them from its trial, with predicted activations and times. So many parameters stream."""
    b, one = job.dtype_bytes, rank.one
    profile = Profile(
        rank.peaks.activation_bytes,
        rank.peaks.kept_bytes,
        forward_seconds=one.forward_s - one.head_s,
        backward_seconds=one.backward_s + one.recompute_s,
        micro_batches=rank.num_micro_batches,
    )
    manner = Manner(job.in_backward, job.overlap, gpus > 1, job.accumulate_dtype)
    model = ModelBytes(int(rank.num_params - away), format.bytes_per_element(b), b)
    hidden = profile.backward_seconds if job.in_backward else profile.forward_seconds
    return requirements(model, profile, manner, hidden, rank.peaks.end_bytes + b * job.architecture.num_parameters())


def predict(job: Job, settings: Settings, machine: Machine, gpus: int = 1, asked: Room | None = None) -> Plan:
    """The plan for these settings. One that does not fit has all state on the host, to show what is missing.

    `asked`: room for homes, if not all that there is.
    """
    if settings.by_layer and gpus == 1:
        return _predict_by_layer(job, settings, machine)
    assert settings.order != "layers", "layers are computed one by one on one GPU only"
    b, format = job.dtype_bytes, FORMATS[settings.states]
    rank = _rank(job, work_of(job, settings, gpus), machine, gpus)
    away = StreamedRows.of(job, settings, gpus, rank.num_micro_batches, format.bytes_per_element(b))
    rank = replace(rank, peaks=away.leave(rank.peaks)) if settings.streamed else rank
    need = _requirements(job, rank, format, gpus, away.num_params)
    room = rooms(job, machine, gpus)
    rates = _rates(machine, gpus)
    rows = away.split(dict(job.homes), rates, need.hidden_seconds)
    free = asked or away.rest(room, machine).less(b * (rank.num_params - away.num_params))
    split = None
    if free.host_bytes >= 0:
        split = choose_split(job, need, free, rates, format, machine, staged=rows.stream > 0)
        if split is None and rows.stream and not job.homes:  # as the engine does: no slots for what streams
            rows = Split(0.0, 0.0, away.num_params, 0.0)
            split = choose_split(job, need, free, rates, format, machine, staged=False)
    has_room = split is not None
    if split is None:
        split = Split(0, 0, need.num_params, 0.0) if need.gradients_leave else Split(0, need.num_params, 0, 0.0)
    gradients = need.gradient_bytes * need.num_params - need.sent_bytes(split.host)
    if job.in_backward and rank.num_micro_batches == 1:
        gradients = 0.0
    peak = need.peak_bytes(split.host)
    state = split.stream * need.state_bytes
    crossings = [
        Crossing("weights", split.host * b, 0.0),
        Crossing("state", state, state),
        Crossing("gradients", 0.0, split.host * b),
    ]
    if settings.streamed:
        crossings += away.crossings(rows)
        split = Split(split.gpu, split.stream + rows.stream, split.host + rows.host, split.exposed_seconds)
    crossed = together(*crossings)
    link = max(sum(c.in_bytes for c in crossed), sum(c.out_bytes for c in crossed)) / rates.link_bytes_per_s
    seconds = _seconds(job, rank, split, rates, format, gpus, link)
    if settings.streamed:
        waits = max(link - rank.step.total_s, seconds.cpu - need.hidden_seconds)
        seconds = replace(seconds, exposed=max(seconds.exposed, waits))
    return Plan(
        job, replace(settings, micro_batch=rank.micro_batch), machine, gpus, split, has_room, seconds,
        activation_bytes=rank.peaks.activation_bytes, gradient_bytes=min(max(0.0, gradients), peak),
        peak_step_bytes=peak, gpu_room=room.gpu_bytes, host_room=room.host_bytes, crossings=crossed,
        streamed_split=rows if settings.streamed else None, asked=free if gpus > 1 else None,
    )  # fmt: skip


def _rates(machine: Machine, gpus: int) -> Rates:
    link = machine.link_bytes_per_s if machine.has_gpu else math.inf  # without a GPU there is nothing to cross
    ranks = sharing_a_host(machine, gpus)
    link = min(link, machine.all_links_bytes_per_s / (2 * ranks)) if ranks > 1 else link
    return Rates(link, machine.host_params_per_s / ranks, machine.masters_per_s / ranks)


def _layer_step(job: Job, settings: Settings) -> LayerStep:
    manner = Manner(job.in_backward, job.overlap, accumulate_dtype=job.accumulate_dtype)
    work = work_of(job, replace(settings, recompute="full"))
    return LayerStep(job.architecture, work, job.batch_size, settings.streamed, settings.order, settings.parks, manner)


def gpu_shortage(job: Job, settings: Settings, machine: Machine) -> float:
    """Bytes by which a step layer by layer is too large for the GPU with all state elsewhere; under 0 if it fits."""
    step, format = _layer_step(job, settings), FORMATS[settings.states]
    need = step.requirements(format.bytes_per_element(job.dtype_bytes), 0.0)
    room = room_for_layers(job, step, format, rooms(job, machine, 1))
    return need.peak_bytes(need.num_params) - room.gpu_bytes


def give_way(plan: Plan, attempt: int) -> Plan | None:
    """The same settings in less room where what was dealt did not fit: what the engine does too."""
    if plan.asked is None:
        return None
    asked = plan.asked.less(*(max(0.0, over) * 3**attempt for over in plan.over))
    if plan.gpus > 1:
        return predict(plan.job, plan.settings, plan.machine, plan.gpus, asked)
    return _predict_by_layer(plan.job, plan.settings, plan.machine, asked)


def _predict_by_layer(job: Job, settings: Settings, machine: Machine, asked: Room | None = None) -> Plan:
    """The same where layers are computed one by one."""
    b, format = job.dtype_bytes, FORMATS[settings.states]
    rank = _rank(job, work_of(job, replace(settings, recompute="full")), machine, 1)
    settings = replace(settings, micro_batch=rank.micro_batch, recompute="full")
    step, state = _layer_step(job, settings), format.bytes_per_element(b)
    traffic, rates, room = LayerTraffic(step, state, rank.step), _rates(machine, 1), rooms(job, machine, 1)
    need = step.requirements(state, traffic.forward.seconds)
    asked = asked or room_for_layers(job, step, format, room)
    found = split_of_layers(job, machine, traffic, need, asked, rates)
    homes = found or Homes(Split(0, 0, step.resident_params, 0.0), Split(0, 0, step.streamed_params, 0.0))
    peak = need.peak_bytes(homes.resident.host)
    kept = step.sums or (0.0 if job.in_backward else b * step.resident_params)
    gradients = max(0.0, kept - need.sent_bytes(homes.resident.host))
    inputs = min(step.inputs_at_peak(), peak)
    crossings = traffic.crossings(homes)
    link = max(sum(c.in_bytes for c in crossings), sum(c.out_bytes for c in crossings)) / rates.link_bytes_per_s
    split = replace(homes.all, exposed_seconds=max(homes.all.exposed_seconds, traffic.last_update(homes, rates)))
    return Plan(
        job, settings, machine, 1, split, found is not None,
        replace(_seconds(job, rank, split, rates, format, 1, link), cpu=traffic.cpu_seconds(homes, rates)),
        activation_bytes=need.activation_bytes - step.sums, gradient_bytes=min(gradients, peak - inputs),
        peak_step_bytes=peak, gpu_room=room.gpu_bytes, host_room=room.host_bytes, crossings=crossings,
        streamed_split=homes.streamed if settings.streamed else None, input_bytes=inputs, asked=asked,
    )  # fmt: skip


def _seconds(job: Job, rank: _Rank, split: Split, rates: Rates, format: StateFormat, gpus: int, link: float) -> Seconds:
    """`link`: seconds that all copies of a step keep it busy."""
    b, step = job.dtype_bytes, rank.step
    state = format.bytes_per_element(b)
    exchange = 0.0
    if gpus > 1:
        one = speed.exchange_seconds(job.architecture.num_parameters(), b, gpus, rank.machine)
        exchange = rank.num_micro_batches * one
    # Charged for all parameters, whatever their home: weights from the host cross the same memory.
    update = speed.update_seconds(rank.num_params, state, b, rank.machine)
    # While the model waits for state that travels, updates on the GPU cost nothing.
    exposed = max(split.exposed_seconds, update) + max(0.0, exchange - step.total_s)
    if gpus > 1 and rank.machine.peers_cross_link:
        exposed = max(exposed, link + exchange - step.total_s)
    return Seconds(
        step.forward_s, step.backward_s, step.recompute_s, exposed, link,
        cpu=split.host / rates.host_params_per_s,
        update=update, exchange=exchange,
    )  # fmt: skip
