"""One plan: what a recipe takes on a machine with settings that are given. `solve.py` chooses the settings.

The same arithmetic as the engine's own placement (`offload/placing.py`), with predicted instead of measured activations
and times. Every figure is for one GPU; several of them hold a share each of weights, gradients and state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from penstock.machine.known import Machine
from penstock.plan import speed
from penstock.plan.layout import (
    BLOCK,
    DEFAULT_CHUNK,
    GPU_RESERVE,
    HOST_RESERVE,
    NUM_SLOTS,
    STAGING,
    STREAM_QUEUE,
    Buffer,
    HomeName,
    Place,
    chunk_for,
    cut,
    model_buffers,
    parameters,
    state_buffers,
    state_bytes,
)
from penstock.plan.memory import (
    COMPILER_BYTES,
    CONTEXT_BYTES,
    CPU_PROCESS_BYTES,
    PROCESS_BYTES,
    Disk,
    Work,
    disk,
    loading_bytes,
    passing,
    sharded_bytes,
)
from penstock.plan.placement import deal
from penstock.plan.split import Need, Placement, Rates, Room, link_bytes, place
from penstock.recipe.presets import Architecture


@dataclass(frozen=True)
class Job:
    """What is to be trained, whatever the machine and the settings."""

    architecture: Architecture
    batch_size: int
    length: int
    clip: bool = True
    update: str = "auto"
    overlap: bool = True
    """False: the baseline, which updates after backward on the host."""
    homes: tuple[tuple[str, float], ...] = ()
    """Shares that the recipe fixes; empty for `auto`."""
    attention: str = "varlen"
    dtype_bytes: int = 2
    checkpoints: int = 3
    """On disk at once, at the most."""
    compiled: bool = False

    @property
    def schedule(self) -> str:
        """When weights are updated."""
        if not self.overlap:
            return "after-norm"
        return ("after-norm" if self.clip else "in-backward") if self.update == "auto" else self.update

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every parameter."""
        return [p.size for p in parameters(self.architecture)]


@dataclass(frozen=True)
class Settings:
    """What the solver may choose."""

    states: str
    micro_batch: int
    """Rows at once on one GPU."""
    recompute: str
    """As in a recipe, but for `auto`."""


@dataclass(frozen=True)
class Seconds:
    """A step by phase, and the lanes beside it."""

    forward: float
    backward: float
    recompute: float
    exposed: float
    """What no arithmetic hides: waiting for updates, the updates' own share of the GPU, exchange between GPUs."""
    link: float
    """State and weights on their way, each direction."""
    cpu: float
    update: float
    exchange: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.recompute + self.exposed


@dataclass(frozen=True)
class Plan:
    """What one GPU, and its share of the host, would hold and do."""

    job: Job
    settings: Settings
    machine: Machine
    gpus: int
    placement: Placement
    fits: bool
    seconds: Seconds
    activation_bytes: float
    """The most that forward and backward take without gradients."""
    gradient_bytes: float
    """Gradients that are there at once."""
    passing_bytes: float
    """The most of both together."""
    gpu_room: float
    """What the plan may fill: the GPU's memory less the driver's and a reserve."""
    host_room: float

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

    @cached_property
    def buffers(self) -> list[Buffer]:
        """Long-lived ones from the layout, then what comes and goes at the peak, on one GPU and its host."""
        local = [-(-size // self.gpus) for size in self.job.sizes]
        on_gpu = self.machine.has_gpu
        device: Place = "gpu" if on_gpu else "host"
        shares = cast(dict[HomeName, float], self.placement.fractions())
        found = model_buffers(local, self.job.dtype_bytes, place=device)
        chunk = _chunk(self.job, self.machine.link_bytes_per_s, self.settings.states)
        dealt = deal(cut(local, chunk), shares)
        found += state_buffers(dealt, self.settings.states, self.job.dtype_bytes, on_gpu=on_gpu)
        moment: list[tuple[str, float]] = [
            ("gradients", self.gradient_bytes),
            ("activations", self.passing_bytes - self.gradient_bytes),
        ]
        if self.gpus > 1:
            moment.append(("gathered layers", sharded_bytes(self.job.architecture, self.job.dtype_bytes)))
        if self.job.schedule == "in-backward" and self.placement.stream:
            moment.append(("gradients in the queue", self.job.dtype_bytes * STREAM_QUEUE * chunk))
        found += [Buffer(name, device, int(num_bytes)) for name, num_bytes in moment if num_bytes > 0]
        if on_gpu:
            found.append(Buffer("CUDA context", "gpu", int(CONTEXT_BYTES)))
        found.append(Buffer("process", "host", int(_process_bytes(self.job, self.machine))))
        return found

    def peak_bytes(self, where: str) -> int:
        """The most in one place; on the GPU what torch's allocator hands out, so without the driver's."""
        return sum(b.num_bytes for b in self.buffers if b.place == where and b.name != "CUDA context")

    @property
    def loading(self) -> float:
        """GPU memory while the weights come."""
        return loading_bytes(self.job.sizes, self.job.dtype_bytes, self.gpus)

    @property
    def disk(self) -> Disk:
        """Checkpoints and the exported model."""
        state = state_bytes(256, self.settings.states, self.job.dtype_bytes) / 256
        return disk(self.num_params, state, self.job.dtype_bytes, self.job.checkpoints)


def _process_bytes(job: Job, machine: Machine) -> float:
    return PROCESS_BYTES + job.compiled * COMPILER_BYTES if machine.has_gpu else CPU_PROCESS_BYTES


def host_reserve(machine: Machine) -> int:
    """What is left free of a host's memory."""
    return HOST_RESERVE if machine.has_gpu else min(HOST_RESERVE, machine.host_bytes // 20)


def sharing_a_host(machine: Machine, gpus: int) -> int:
    """How many of the GPUs share the memory of one host."""
    return min(gpus, machine.gpus_per_host or gpus)


def rooms(job: Job, machine: Machine, gpus: int) -> Room:
    """Bytes for everything but the driver and the reserves, on one GPU and in its share of the host."""
    share = (machine.host_bytes - host_reserve(machine)) / sharing_a_host(machine, gpus)
    host = share - _process_bytes(job, machine)
    if machine.unified:  # one memory for both: what the GPU takes the host has not
        return Room(host - CONTEXT_BYTES, 0.0)
    if not machine.has_gpu:
        return Room(host, 0.0)
    return Room(machine.gpu_bytes - CONTEXT_BYTES - GPU_RESERVE, host)


def predict(job: Job, settings: Settings, machine: Machine, gpus: int = 1) -> Plan:
    """The plan for these settings. One that does not fit has all state on the host, to show what is missing."""
    a, b = job.architecture, job.dtype_bytes
    num_params = a.num_parameters() / gpus
    rows = -(-job.batch_size // gpus)
    micro = min(settings.micro_batch, rows)
    num_micro = -(-rows // micro)
    work = Work(micro, job.length, settings.recompute, job.attention, b, job.compiled)
    sharers = 1 if machine.has_gpu else gpus  # ranks on a CPU share its cores
    rank = replace(
        machine,
        matrix_flops_per_s=machine.matrix_flops_per_s / sharers,
        device_memory_bytes_per_s=machine.device_memory_bytes_per_s / sharers,
    )
    step = speed.arithmetic(a, replace(work, rows=rows), rank)
    one = speed.arithmetic(a, work, rank)
    taken = passing(a, work, gpus)
    grads = b * a.num_parameters()
    activation, kept = taken.activation_bytes, taken.kept_bytes
    in_backward, accumulates = job.schedule == "in-backward", num_micro > 1
    if accumulates:
        activation = kept = taken.activation_bytes + grads / gpus
    elif in_backward:
        kept = activation
    state = state_bytes(256, settings.states, b) / 256
    hidden = one.backward_s + one.recompute_s if in_backward else one.forward_s - one.head_s
    leaves = job.overlap and not in_backward and not accumulates and gpus == 1  # FSDP2 keeps a unit's in one piece
    comes_early = job.overlap and not in_backward and gpus == 1
    need = Need(
        int(num_params), state, b, activation, kept, gradients_leave=leaves, hidden_seconds=hidden,
        end_bytes=taken.end_bytes + grads if comes_early else None,
    )  # fmt: skip
    room = rooms(job, machine, gpus)
    extra = sharded_bytes(a, b) if gpus > 1 else 0.0
    free = Room(room.gpu_bytes - b * num_params - extra, room.host_bytes)
    sharing = sharing_a_host(machine, gpus)
    link = machine.link_bytes_per_s if machine.has_gpu else math.inf  # without a GPU there is nothing to cross
    rates = Rates(link, machine.host_params_per_s / sharing)
    placement = _placement(job, need, free, rates, settings.states, machine) if room.host_bytes >= 0 else None
    fits = placement is not None
    if placement is None:
        placement = Placement(0, 0, need.num_params, 0.0) if leaves else Placement(0, need.num_params, 0, 0.0)
    exchange = num_micro * speed.exchange_seconds(a.num_parameters(), b, gpus, machine) if gpus > 1 else 0.0
    # Charged for all parameters, whatever their home: weights from the host cross the same memory.
    update = speed.update_seconds(num_params, state, b, rank)
    seconds = Seconds(
        step.forward_s, step.backward_s, step.recompute_s,
        # While the model waits for state that travels, updates on the GPU cost nothing.
        exposed=max(placement.exposed_seconds, update) + max(0.0, exchange - step.total_s),
        link=(placement.stream * state + placement.host * b) / rates.link_bytes_per_s,
        cpu=placement.host / rates.host_params_per_s,
        update=update, exchange=exchange,
    )  # fmt: skip
    gone = b * placement.host if leaves else 0.0
    gradients = 0.0 if in_backward and not accumulates else max(0.0, grads / gpus - gone)
    took = need.passing_bytes(placement.host)
    return Plan(
        job, Settings(settings.states, micro, settings.recompute), machine, gpus, placement, fits, seconds,
        activation_bytes=taken.activation_bytes, gradient_bytes=min(gradients, took), passing_bytes=took,
        gpu_room=room.gpu_bytes, host_room=room.host_bytes,
    )  # fmt: skip


def _chunk(job: Job, link_bytes_per_s: float, states: str) -> int:
    """Elements in a chunk, as the engine chooses it: from the link where it measures one."""
    if job.homes or not job.overlap:
        return DEFAULT_CHUNK
    return chunk_for(link_bytes_per_s, state_bytes(BLOCK, states, job.dtype_bytes) / BLOCK)


def _placement(job: Job, need: Need, room: Room, rates: Rates, states: str, machine: Machine) -> Placement | None:
    """Homes as the engine chooses them: everything resident if it fits, else the split that exposes least."""
    everything = Placement(need.num_params, 0, 0, 0.0)
    resident = room.gpu_bytes >= need.kept_bytes + need.num_params * need.state_bytes
    if not job.overlap:
        return _fixed({"host": 1.0}, need, room, rates, machine, overlap=False)
    staging = state_bytes(min(STAGING, NUM_SLOTS * need.num_params), states, job.dtype_bytes)
    smaller = Room(room.gpu_bytes - staging, room.host_bytes)
    if job.homes:
        room = smaller if dict(job.homes).get("stream") else room
        return _fixed(dict(job.homes), need, room, rates, machine, overlap=True)
    return everything if resident else place(need, smaller, rates)


def _fixed(
    shares: dict[str, float], need: Need, room: Room, rates: Rates, machine: Machine, *, overlap: bool
) -> Placement | None:
    """Homes that the recipe names, if they fit. Where there is one memory, all of them are in it."""
    gpu, stream, host = (need.num_params * shares.get(n, 0.0) / sum(shares.values()) for n in ("gpu", "stream", "host"))
    mirrored = need.state_bytes + (2 * need.weight_bytes if machine.has_gpu else 0)
    on_gpu = gpu * need.state_bytes + need.passing_bytes(host)
    on_host = stream * need.state_bytes + host * mirrored
    if machine.one_memory:
        on_gpu, on_host = on_gpu + on_host, 0.0
    if on_gpu > room.gpu_bytes or on_host > room.host_bytes:
        return None
    link = link_bytes(need, stream, host) / rates.link_bytes_per_s
    cpu = host / rates.host_params_per_s
    exposed = max(0.0, max(link, cpu) - need.hidden_seconds) if overlap else 2 * link + cpu
    return Placement(gpu, stream, host, exposed)


def largest_parts(plan: Plan, where: Sequence[str], count: int = 3) -> Sequence[Buffer]:
    """What takes most in these places."""
    return sorted((b for b in plan.buffers if b.place in where), key=lambda b: -b.num_bytes)[:count]
