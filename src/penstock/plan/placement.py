"""Which chunk gets which home: the placement that the plan decides and the engine is given.

Pure: chunks in forward order and shares in, lists out. Three rules make the shares pay. The first weights of forward
are resident, since nothing hides an update that the model is already waiting for. Small parameters are resident, since
a copy has a price however short it is. The rest is dealt so that every stretch of the model has the same mix: the pipe
is then never idle in one stretch and late in another. Filling the GPU from the front was rejected for that reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from penstock.plan.layout import DEFAULT_CHUNK, Chunk, HomeName
from penstock.plan.split import PREFETCH_SHARE, Profile, Rates, Requirements, Room, Traffic, best_split

LEAD = 0.08
"""Share of the model, from its start, that is resident if the GPU's share allows: the embedding and a layer or two."""
SMALL = 1e-4
"""Share of the model under which a parameter counts as small."""

DEALS = 5
"""Attempts to deal what was solved, each with less room than the one before."""

Dealt = dict[HomeName, list[Chunk]]


@dataclass(frozen=True)
class PrefetchRoom:
    """Room for streamed state that comes before its update."""

    free_after: tuple[float, ...]
    """By parameter: bytes that are free from its gradient to the end of backward, if no gradient has left."""
    sent_bytes: float
    """Gradients that leave the device during backward, which makes as much room."""


@dataclass(frozen=True)
class Placement:
    """Which chunk of state lives where."""

    chunks: Mapping[HomeName, Sequence[Chunk]]
    cores: tuple[int, ...] = ()
    """Those that update `host`; empty: the usual share of those near the device."""
    prefetch: PrefetchRoom | None = None
    """None: nothing comes before its update."""
    masters_first: bool = True
    """In `host`, where updates follow the norm: masters before moments."""


def masters_pay(in_host: Sequence[Chunk], masters_per_s: float, profile: Profile) -> bool:
    """Whether a step is shorter if masters come first and moments later. Where nothing is known of it: yes."""
    if not in_host or not profile.forward_seconds or not masters_per_s:
        return True
    size = sum(chunk.size for chunk in in_host)
    traffic = Traffic.of(sum(chunk.state_bytes for chunk in in_host) / size, in_host[0].weight_bytes)
    arithmetic = profile.micro_batches * (profile.forward_seconds + profile.backward_seconds)
    _, moments = traffic.stages(size / masters_per_s, profile.forward_seconds, arithmetic)
    return moments > 0


def prefetch_room(need: Requirements, bytes_after: Sequence[float], host: float) -> PrefetchRoom:
    """What state may fill after each gradient, with `host` parameters whose gradients leave."""
    peak = PREFETCH_SHARE * need.peak_bytes(host)
    return PrefetchRoom(tuple(peak - taken for taken in bytes_after), need.sent_bytes(host))


def deal_within(need: Requirements, room: Room, rates: Rates, chunks: Sequence[Sequence[Chunk]]) -> Dealt | None:
    """The best split, dealt, with as much less room as it takes until what was dealt fits; None if nothing does."""
    more = min(DEFAULT_CHUNK, need.num_params) * need.state_bytes  # by which what is dealt may be over its share
    asked = room.less(more, 2 * more)
    for attempt in range(DEALS):
        split = best_split(need, asked, rates)
        if split is None:
            return None
        dealt = deal(chunks, cast(dict[HomeName, float], split.shares()))
        host = float(sum(chunk.size for chunk in dealt["host"]))
        on_gpu = need.peak_bytes(host) + sum(chunk.state_bytes for chunk in dealt["gpu"])
        on_host = sum(chunk.state_bytes for name in ("stream", "host") for chunk in dealt[name])
        on_host += need.copies * sum(chunk.copy_bytes for chunk in dealt["host"])
        if on_gpu <= room.gpu_bytes and on_host <= room.host_bytes:
            return dealt
        over = (max(0.0, on_gpu - room.gpu_bytes), max(0.0, on_host - room.host_bytes))
        asked = asked.less(*(much * 3**attempt for much in over))  # more each time: whole parameters are large
    return None


def deal_without_stream(need: Requirements, room: Room, chunks: Sequence[Sequence[Chunk]]) -> Dealt | None:
    """All in `host` but what fits on the GPU: where that is small, slots for `stream` are what it lacks."""
    # The gradient of what is on the GPU stays there too.
    left = (room.gpu_bytes - need.peak_bytes(need.num_params)) / (need.state_bytes + need.weight_bytes)
    if left < 0:
        return None
    for share in (min(1.0, left / need.num_params), 0.0):  # whole parameters are large, so that all may be one too many
        dealt = deal(chunks, {"gpu": share, "host": 1 - share} if share else {"host": 1.0})
        on_host = sum(chunk.state_bytes + need.copies * chunk.copy_bytes for chunk in dealt["host"])
        if sum(chunk.size for chunk in dealt["gpu"]) <= left and on_host <= room.host_bytes:
            return dealt
    return None


def deal(parameters: Sequence[Sequence[Chunk]], shares: Mapping[HomeName, float]) -> Dealt:
    """The chunks of each home. `parameters` holds the chunks of each parameter, in the order of forward.

    `host` gets whole parameters if it shares the model with others, since a gradient leaves the GPU only if all of it
    goes down.
    """
    dealt: Dealt = {"gpu": [], "stream": [], "host": []}
    if len(shares) == 1:
        (only,) = shares
        everything = [chunk for chunks in parameters for chunk in chunks]
        return {**dealt, only: joined(everything) if only == "gpu" else everything}
    sizes = [sum(chunk.size for chunk in chunks) for chunks in parameters]
    total = sum(sizes)
    budget = {name: total * share / sum(shares.values()) for name, share in shares.items()}
    rest: list[Sequence[Chunk]] = []
    passed = 0
    for chunks, size in zip(parameters, sizes, strict=True):
        early = passed < LEAD * total
        passed += size
        if (early or size < SMALL * total) and "gpu" in budget and budget["gpu"] >= size:
            dealt["gpu"] += chunks
            budget["gpu"] -= size
        else:
            rest.append(chunks)
    whole = _whole_ones([sum(chunk.size for chunk in chunks) for chunks in rest], budget)
    dealt["host"] = [chunk for number, chunks in enumerate(rest) if number in whole for chunk in chunks]
    _mix([chunks for number, chunks in enumerate(rest) if number not in whole], budget, dealt)
    return {**dealt, "gpu": joined(dealt["gpu"])}


def deal_away(chunks: Sequence[Chunk], share: float) -> Dealt:
    """Chunks whose weights lie in host memory: a share in `stream`, evenly over the model, the rest in `host`."""
    dealt: Dealt = {"gpu": [], "stream": [], "host": []}
    owed = 0.0
    for chunk in chunks:
        owed += share * chunk.size
        home: HomeName = "stream" if owed > chunk.size / 2 else "host"
        owed -= chunk.size if home == "stream" else 0
        dealt[home].append(chunk)
    return dealt


def _whole_ones(sizes: Sequence[int], budget: Mapping[HomeName, float]) -> set[int]:
    """Numbers of the parameters that `host` gets whole: evenly over the model, then as near to its budget as they go.

    Going by what it is owed alone was rejected: the last large parameter, a head of 0.8 B, made a difference of up to
    half of it, which is 4 GB of fp32 state.
    """
    target, total, left = budget.get("host", 0.0), max(1, sum(sizes)), set(budget) - {"host"}
    if not left:
        return set(range(len(sizes)))
    chosen, owed = set(), 0.0
    for number, size in enumerate(sizes):
        owed += size * target / total
        if owed > size / 2:
            chosen.add(number)
            owed -= size
    chosen, missing = _nearer(sizes, chosen, target - sum(sizes[number] for number in chosen))
    # One that is too large to help by itself, the other way round, and then smaller ones: evenly may be none of the
    # small. Of each size one of either way is tried.
    best = chosen, missing
    for size, inside in {(sizes[number], number in chosen): None for number in range(len(sizes))}:
        first = next(number for number, own in enumerate(sizes) if own == size and (number in chosen) == inside)
        other = _nearer(sizes, chosen ^ {first}, missing + (size if inside else -size), below=size)
        best = min(best, other, key=lambda found: abs(found[1]))
    return best[0]


def _nearer(sizes: Sequence[int], chosen: set[int], missing: float, below: float = math.inf) -> tuple[set[int], float]:
    """From the largest on, each that makes `missing` less is chosen or not chosen any more; what is missing then."""
    chosen = set(chosen)
    for number in sorted((n for n, size in enumerate(sizes) if size < below), key=lambda number: -sizes[number]):
        change = -sizes[number] if number in chosen else sizes[number]
        if abs(missing - change) < abs(missing):
            chosen ^= {number}
            missing -= change
    return chosen, missing


def _mix(parameters: Sequence[Sequence[Chunk]], budget: Mapping[HomeName, float], dealt: Dealt) -> None:
    """Deal chunks to `gpu` and `stream` by what each is owed: its share of all that has passed, less what it got."""
    shares: dict[HomeName, float] = {name: share for name, share in budget.items() if name != "host"}
    total = max(1.0, sum(shares.values()))
    owed: dict[HomeName, float] = dict.fromkeys(shares, 0.0)
    for chunks in parameters:
        size = sum(chunk.size for chunk in chunks)
        for name, share in shares.items():
            owed[name] += size * share / total
        for chunk in chunks:  # first what is resident, so that it is one piece
            resident = "stream" not in owed or owed.get("gpu", 0.0) > chunk.size / 2
            home: HomeName = "gpu" if resident else "stream"
            owed[home] = owed.get(home, 0.0) - chunk.size
            dealt[home].append(chunk)


def joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Neighbours made one: what is resident needs no slot, and a kernel that is not launched costs the host nothing."""
    found: list[Chunk] = []
    for chunk in chunks:
        last = found[-1] if found else None
        if last and last.parameter == chunk.parameter and last.start + last.size == chunk.start:
            found[-1] = replace(last, size=last.size + chunk.size)
        else:
            found.append(chunk)
    return found
