"""Which settings: the fastest that fit, exact state before any other, and what else there is.

Pure. A few dozen combinations of state format, micro-batch and recompute are predicted one by one; `place` splits the
state of each. Activations and resident state compete for the same memory, so neither can be chosen before the other; a
greedy order was rejected because it fills the GPU with activations whose recompute costs less than the streaming that
they cause. Where none of them fits, layers are computed one by one, and as many of them stream as must; on several GPUs
they stream row by row.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from penstock.machine.known import Machine
from penstock.plan.job import Job, Settings
from penstock.plan.layout import FORMATS, StateFormat
from penstock.plan.placement import DEALS
from penstock.plan.predict import Plan, give_way, gpu_shortage, predict
from penstock.plan.rooms import rooms


@dataclass(frozen=True)
class Free:
    """What the solver may choose; what is None is free."""

    states: str | None = None
    micro_batch: int | None = None
    recompute: str | None = None


EVERYTHING = Free()
EXACTNESS = tuple(FORMATS)
"""Formats from exact to small."""


def settings_of(job: Job, free: Free, gpus: int) -> Iterable[Settings]:
    """Every combination that is tried, the exact ones first."""
    layers = job.architecture.layers
    rows = -(-job.batch_size // gpus)
    halves = sorted({max(1, rows >> shift) for shift in range(rows.bit_length())}, reverse=True)
    for states in (free.states,) if free.states else FORMATS:
        for micro in (min(free.micro_batch, rows),) if free.micro_batch else halves:
            for recompute in (free.recompute,) if free.recompute is not None else _recomputes(layers):
                yield Settings(states, micro, recompute)


def _parts(layers: int) -> list[int]:
    """Eighths of the layers, without none and all."""
    return sorted({layers * eighths // 8 for eighths in range(1, 8)} - {0})


@cache
def _recomputes(layers: int) -> tuple[str, ...]:
    """From most memory to least."""
    parts = _parts(layers)
    some = [f"{word}:{count}" for word in ("selected", "full") for count in parts]
    return ("none", *some[: len(parts)], "selected", *some[len(parts) :], "full")


def plans(job: Job, machine: Machine, gpus: int, free: Free = EVERYTHING) -> Iterator[Plan]:
    """All that fit: the most exact format first, and within it the fastest. Chunks are dealt for those asked for.

    Weights stream where nothing else fits, or where the job says so.
    """
    for states in (free.states,) if free.states else FORMATS:
        if not _could_fit(job, machine, gpus, FORMATS[states]):
            continue
        own = replace(free, states=states)
        tried = [] if job.asks_for_layers else settings_of(job, own, gpus)
        fitting = _in_order(predict(job, settings, machine, gpus) for settings in tried)
        first = next(fitting, None)
        if first is not None:
            yield first
            yield from fitting
        elif may_stream(job, machine, free):
            on_one = gpus == 1
            yield from _in_order(_plans_by_layer(job, machine, own) if on_one else _on_ranks(job, machine, gpus, own))


def _could_fit(job: Job, machine: Machine, gpus: int, format: StateFormat) -> bool:
    """Whether a rank's weights and state alone are less than both of its memories: then settings are worth trying."""
    room, b = rooms(job, machine, gpus), job.dtype_bytes
    if min(room.gpu_bytes, room.host_bytes) < 0:
        return False
    share = job.architecture.num_parameters() / gpus
    return share * (b + format.bytes_per_element(b)) < room.gpu_bytes + room.host_bytes


def _in_order(found: Iterable[Plan]) -> Iterator[Plan]:
    """Those that fit, the best first. What was dealt too much of takes its place again with less."""
    numbers = itertools.count()
    left = [(_order(plan), next(numbers), 0, plan) for plan in found if plan.has_room]
    heapq.heapify(left)
    while left:
        _, _, attempt, plan = heapq.heappop(left)
        if plan.fits:
            yield plan
        elif attempt < DEALS and (less := give_way(plan, attempt)) is not None and less.has_room:
            heapq.heappush(left, (_order(less), next(numbers), attempt + 1, less))


def fitting(plan: Plan) -> Plan:
    """The plan, or the same settings in less room if what was dealt does not fit."""
    return next(_in_order([plan]), plan)


def _order(plan: Plan) -> tuple[float, int, float, bool, int]:
    """Of equals the one that moves less comes first, and of these the one that recomputes less.

    Layer by layer, rows that run at once count more: fewer and larger products, and nothing to add up.
    """
    settings = plan.settings
    streamed = plan.streamed_split
    moved = plan.split.stream + plan.split.host + (streamed.stream + streamed.host if streamed else 0.0)
    at_once = settings.micro_batch if settings.by_layer else 0
    return plan.seconds.step, -at_once, moved, settings.parks, settings.tile


def may_stream(job: Job, machine: Machine, free: Free) -> bool:
    """Whether weights may stream, or layers be computed one by one.

    All layers are computed again then, and the GPU has memory of its own. State that the job wants there belongs to
    resident weights.
    """
    if free.recompute not in (None, "full"):
        return False
    unasked = job.weights == "auto" and machine.gpu_bytes > 0 and not dict(job.homes).get("gpu")
    return job.asks_for_layers or unasked


def _plans_by_layer(job: Job, machine: Machine, free: Free) -> Iterator[Plan]:
    """Whole rows, or tiles where rows are long.

    Where nothing fits the GPU so, smaller tiles, until something does; where nothing fits the host, fewer saved inputs.
    """
    for inputs in job.input_choices:
        for tiles in job.tile_choices:
            found = on_gpu = False
            for plan in _plans_in_tiles(job, machine, free, inputs, tiles):
                found = found or plan.has_room
                on_gpu = on_gpu or found or gpu_shortage(job, plan.settings, machine) <= 0
                yield plan
            if found:
                return
            if on_gpu:
                break


def _on_ranks(job: Job, machine: Machine, gpus: int, free: Free) -> Iterator[Plan]:
    """Rows at once, and for each as few layers that stream as fit, in eighths: more would move more."""
    counts = job.streamed_choices
    some = [*_parts(job.architecture.layers), counts[-1]] if len(counts) > 1 else counts
    for tried in settings_of(job, replace(free, recompute="full"), gpus):
        for count in some:
            plan = predict(job, replace(tried, streamed=count), machine, gpus)
            yield plan
            if plan.has_room and plan.fits:
                break


def _plans_in_tiles(
    job: Job, machine: Machine, free: Free, inputs: tuple[str, ...], tiles: tuple[int, ...]
) -> Iterator[Plan]:
    """Rows at once, these inputs and tiles, and for each as few layers that stream as the GPU has room for, or more.

    Once nothing but updates on the GPU shows, more would be no faster.
    """
    order = "layers" if job.order == "auto" else job.order
    counts = [count for count in job.streamed_choices if count or order == "layers"]
    every_rows = settings_of(job, replace(free, recompute="full"), 1)
    for tried, saved, tile in itertools.product(every_rows, inputs, tiles):
        if job.tile == "auto" and tile >= tried.micro_batch * job.length:
            continue  # it saves nothing
        first = replace(tried, streamed=counts[0], order=order, inputs=saved, tile=tile)
        whole = 1 if counts[0] == 0 else 0  # without slots, so that it may take less than with the first one
        least = bisect_left(
            counts, True, lo=whole, key=lambda c: gpu_shortage(job, replace(first, streamed=c), machine) <= 0
        )
        for count in (*counts[:whole], *counts[least:]):
            settings = replace(first, streamed=count)
            plan = predict(job, settings, machine)
            yield plan
            if plan.has_room and plan.seconds.exposed <= plan.seconds.update and plan.fits:
                break


def solve(job: Job, machine: Machine, gpus: int = 1, free: Free = EVERYTHING) -> Plan | None:
    """The best that fits, or None."""
    return next(plans(job, machine, gpus, free), None)


@dataclass(frozen=True)
class Alternative:
    """Another plan, how to ask for it, and what it changes in the mathematics."""

    plan: Plan
    flags: tuple[str, ...]
    trades: str = ""


def flags_between(old: Plan, new: Plan) -> tuple[str, ...]:
    """The flags that lead from one to the other. What `auto` finds by itself (order, inputs, tiles) needs none."""
    found = []
    if new.job.weights != old.job.weights:
        found.append(f"--weights {new.job.weights}")
    if new.settings.states != old.settings.states:
        found.append(f"--states {new.settings.states}")
    if min(new.settings.micro_batch, new.rows) != min(old.settings.micro_batch, new.rows):
        found.append(f"--micro-batch-size {new.settings.micro_batch}")
    if new.settings.recompute != old.settings.recompute:
        found.append(f"--recompute {new.settings.recompute}")
    if old.job.clip and not new.job.clip:
        found.append("--max-grad-norm 0")
    if new.job.update != old.job.update:
        found.append(f"--update {new.job.update}")
    if new.job.homes != old.job.homes:
        found.append("--homes auto")
    if new.job.batch_size != old.job.batch_size:
        found.append(f"--batch-size {new.job.batch_size}")
    if new.job.length != old.job.length:
        found.append(f"--max-length {new.job.length}")
    return tuple(found)


TRADES = {
    "bf16": "moments in bf16, with stochastic rounding (no bias, some noise)",
    "int8": "moments in 8 bits, with stochastic rounding (no bias, more noise)",
}


def alternatives(base: Plan, count: int = 4) -> list[Alternative]:
    """The next best: two of the same mathematics, then those that trade something and gain by it, one trade first."""
    found: list[Alternative] = []
    jobs = [base.job] + ([replace(base.job, clip=False, update="auto")] if base.job.clip and base.job.overlap else [])
    for job in jobs:
        for states in FORMATS:
            count_here = 2 if job is base.job and states == base.settings.states else 1
            others = (p for p in plans(job, base.machine, base.gpus, Free(states=states)) if flags_between(base, p))
            for plan in itertools.islice(others, count_here):
                trades = [] if job is base.job else ["no clipping"]
                trades += [TRADES[states]] if states != base.settings.states and states in TRADES else []
                found.append(Alternative(plan, flags_between(base, plan), "; ".join(trades)))
    found = list({other.flags: other for other in reversed(found)}.values())[::-1]  # `auto` finds the first of equals
    apart = [o for o in found if abs(o.plan.seconds.step / base.seconds.step - 1) > 0.01]
    same = sorted((o for o in apart if not o.trades), key=lambda o: o.plan.seconds.step)[:2]
    kept, fastest = list(same), base.seconds.step
    for other in sorted(apart, key=_cost):
        if other.trades and other.plan.seconds.step < 0.99 * fastest:  # what trades more must gain more
            fastest = other.plan.seconds.step
            kept.append(other)
    return kept[:count]


def _cost(other: Alternative) -> tuple[int, int, float]:
    """Trades first, then bits, then time."""
    states = EXACTNESS.index(other.plan.settings.states)
    return other.trades.count(";") + bool(other.trades), states, other.plan.seconds.step


def cheapest_change(base: Plan, free: Free = EVERYTHING) -> Alternative | None:
    """For a plan that does not fit: what changes the mathematics least and still fits.

    Settings alone, then state in fewer bits, then no clipping, then fewer rows in a step, then shorter rows: the last
    alone cuts examples. Fewer rows help only where no gradients are added up, which have to be kept for that. Where
    the job says which weights stream, another number of them changes nothing.
    """
    job = replace(base.job, homes=()) if base.job.homes else base.job
    # What goes with layers that are computed one by one is refused beside `auto`.
    needs_it = job.order != "layers" and (job.inputs != "auto" or job.tile not in ("auto", "none"))
    jobs = [job]
    if job.overlap:  # zerooffload keeps weights on the GPU
        jobs = list(dict.fromkeys((job, replace(job, weights="streamed" if needs_it else "auto"))))
    lengths, rows = (base.job.length, *_halves(base.job.length, 512)), base.job.batch_size
    for length, batch in itertools.product(lengths, (rows, *_halves(rows, base.gpus))):
        for clip in (True, False) if base.job.clip and base.job.overlap else (base.job.clip,):
            update = base.job.update if clip == base.job.clip else "auto"
            changed = [replace(job, clip=clip, update=update, length=length, batch_size=batch) for job in jobs]
            found = [plan for job in changed if (plan := solve(job, base.machine, base.gpus, free)) is not None]
            if found:
                plan = min(found, key=_exactness)
                plan = _longer(plan, free) if length < base.job.length else plan
                trades = ["shorter rows"] if length < base.job.length else []
                trades += ["fewer rows in a step"] if batch < rows else []
                trades += ["no clipping"] if clip != base.job.clip else []
                trades += [TRADES[plan.settings.states]] if plan.settings.states in TRADES else []
                return Alternative(plan, flags_between(base, plan), "; ".join(trades))
    return None


def _exactness(plan: Plan) -> int:
    return EXACTNESS.index(plan.settings.states)


def _longer(plan: Plan, free: Free) -> Plan:
    """Twice its length does not fit: one in between, if as exact."""
    for eighths in (7, 6, 5):
        job = replace(plan.job, length=plan.job.length * eighths // 256 * 64)
        found = solve(job, plan.machine, plan.gpus, free)
        if found is not None and _exactness(found) <= _exactness(plan):
            return found
    return plan


def _halves(number: int, least: int) -> list[int]:
    found = []
    while number // 2 >= least:
        number //= 2
        found.append(number)
    return found
