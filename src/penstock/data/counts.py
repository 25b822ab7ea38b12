"""What became of the rows of a source: counted while they are tokenized, in one process or in several."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

_PLACES_KEPT = 5


@dataclass(frozen=True)
class Noted:
    """How often something happened, and the first places of it as (number of the file, line)."""

    count: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Counts:
    """What became of the rows of a source."""

    rows: int
    kept: int
    tokens: int
    trained_tokens: int
    longest: int
    """Tokens of the longest example, before truncation."""
    max_token_id: int
    lost_tokens: int
    """Of examples over max_length: cut off, dropped with them, or in a piece of them that has no token to train on."""
    truncated: Noted
    unended: Noted
    """Kept examples whose last response lost its end token to truncation."""
    spelled: Noted
    """Kept examples in which text that someone wrote became a special token."""
    unasked: Noted
    """Kept examples with a question that is empty, or null."""
    split: Noted
    """Documents that became several examples, as --split-documents length asks."""
    dropped: dict[str, Noted]
    """By reason."""
    unused: dict[str, Noted]
    """Rows with a column, or a key of a message, that is not used, by its name."""
    lacking: dict[str, Noted]
    """Rows without a column that is to be renamed and that they may do without, by its name."""


@dataclass
class Noting:
    """A note while it grows."""

    count: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)

    def add(self, place: tuple[int, int]) -> None:
        """It happened once more, there."""
        self.count += 1
        if len(self.places) < _PLACES_KEPT:
            self.places.append(place)

    def merge(self, later: Noting) -> None:
        """What was noted of later rows."""
        self.count += later.count
        self.places = [*self.places, *later.places][:_PLACES_KEPT]

    def noted(self) -> Noted:
        """The note as it is now."""
        return Noted(self.count, tuple(self.places))


_SUMS = ("rows", "kept", "tokens", "trained_tokens", "lost_tokens")
_LARGEST = ("longest", "max_token_id")
NOTES = ("truncated", "unended", "spelled", "unasked", "split")
NAMED_NOTES = ("dropped", "unused", "lacking")


def _named() -> defaultdict[str, Noting]:
    return defaultdict(Noting)


@dataclass
class Tally:
    """The counts while they grow."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    max_token_id: int = 0
    lost_tokens: int = 0
    truncated: Noting = field(default_factory=Noting)
    unended: Noting = field(default_factory=Noting)
    spelled: Noting = field(default_factory=Noting)
    unasked: Noting = field(default_factory=Noting)
    split: Noting = field(default_factory=Noting)
    dropped: defaultdict[str, Noting] = field(default_factory=_named)
    unused: defaultdict[str, Noting] = field(default_factory=_named)
    lacking: defaultdict[str, Noting] = field(default_factory=_named)

    def merge(self, later: Tally) -> None:
        """Add the tally of later rows."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name in _LARGEST:
            setattr(self, name, max(getattr(self, name), getattr(later, name)))
        for name in NOTES:
            getattr(self, name).merge(getattr(later, name))
        for name in NAMED_NOTES:
            for reason, noting in getattr(later, name).items():
                getattr(self, name)[reason].merge(noting)

    def counts(self) -> Counts:
        """The counts as they are now."""
        numbers: dict[str, Any] = {name: getattr(self, name) for name in (*_SUMS, *_LARGEST)}
        notes: dict[str, Any] = {name: getattr(self, name).noted() for name in NOTES}
        named: dict[str, Any] = {name: {r: n.noted() for r, n in getattr(self, name).items()} for name in NAMED_NOTES}
        return Counts(**numbers, **notes, **named)
