"""Which chunk gets which home, once the shares are known.

Pure: chunks in forward order and shares in, lists out. Three rules make the shares pay. The first weights of forward
are resident, since nothing hides an update that the model is already waiting for. Small parameters are resident, since
a copy has a price however short it is. The rest is dealt so that every stretch of the model has the same mix: the pipe
is then never idle in one stretch and late in another. Filling the GPU from the front was rejected for that reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from penstock.plan.layout import HomeName


class Cut(Protocol):
    """A slice of a parameter: the engine's `Chunk` or the plan's `Piece`, both frozen dataclasses."""

    @property
    def parameter(self) -> int:
        """Number of the parameter."""

    @property
    def start(self) -> int:
        """Its first element."""

    @property
    def size(self) -> int:
        """Its elements."""


Chunk = TypeVar("Chunk", bound=Cut)
LEAD = 0.08
"""Share of the model, from its start, that is resident if the GPU's share allows: the embedding and a layer or two."""
SMALL = 1e-4
"""Share of the model under which a parameter counts as small."""


def deal(parameters: Sequence[Sequence[Chunk]], shares: Mapping[HomeName, float]) -> dict[HomeName, list[Chunk]]:
    """The chunks of each home. `parameters` holds the chunks of each parameter, in the order of forward.

    `host` gets whole parameters if it shares the model with others, since a gradient leaves the GPU only if all of it
    goes down.
    """
    dealt: dict[HomeName, list[Chunk]] = {"gpu": [], "stream": [], "host": []}
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
        if (early or size < SMALL * total) and budget.get("gpu", 0.0) >= size:
            dealt["gpu"] += chunks
            budget["gpu"] -= size
        else:
            rest.append(chunks)
    _mix(rest, budget, dealt)
    return {**dealt, "gpu": joined(dealt["gpu"])}


def _mix(
    parameters: Sequence[Sequence[Chunk]], budget: Mapping[HomeName, float], dealt: dict[HomeName, list[Chunk]]
) -> None:
    """Deal by what each home is owed: its share of all that has passed, less what it got."""
    total = max(1.0, sum(budget.values()))
    owed: dict[HomeName, float] = dict.fromkeys(budget, 0.0)
    for chunks in parameters:
        size = sum(chunk.size for chunk in chunks)
        for name, share in budget.items():
            owed[name] += size * share / total
        whole = owed.get("host", 0.0) > size / 2
        for chunk in chunks:  # first what is resident, so that it is one piece
            resident = "stream" not in owed or owed.get("gpu", 0.0) > chunk.size / 2
            home: HomeName = "host" if whole else "gpu" if resident else "stream"
            owed[home] -= chunk.size
            dealt[home].append(chunk)


def joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Neighbours made one: what is resident needs no slot, and a kernel that is not launched costs the host nothing."""
    found: list[Chunk] = []
    for chunk in chunks:
        last = found[-1] if found else None
        if last and last.parameter == chunk.parameter and last.start + last.size == chunk.start:
            joint: Any = last  # a protocol cannot say that it is a dataclass
            found[-1] = replace(joint, size=last.size + chunk.size)
        else:
            found.append(chunk)
    return found
