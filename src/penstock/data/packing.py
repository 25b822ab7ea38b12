"""Which examples share a row. Pure functions of lengths; numpy only.

Best fit decreasing: the longest example first, each into the fullest row that still has room. It wastes well under one
percent on real lengths. Rejected: first fit (fuller rows go unnoticed), an exact solver (nothing left to win), and
concatenate-and-cut, which fills rows completely by tearing examples in two, so that answers lose their questions.

Rows are packed once and shuffled as rows in every epoch. Packing anew in each epoch would make the number of steps vary
and gains nothing: examples in one row do not see each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Rows of examples: row r holds `examples[offsets[r]:offsets[r + 1]]`."""

    examples: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, r: int) -> Ints:
        """The examples of row r."""
        return self.examples[self.offsets[r] : self.offsets[r + 1]]

    def row_lengths(self, lengths: Ints) -> Ints:
        """Tokens in each row, given the length of every example. No row is empty."""
        return np.add.reduceat(lengths[self.examples], self.offsets[:-1])


def pack_best_fit(lengths: Ints, order: Ints, max_length: int) -> Packing:
    """Pack the examples in `order` into as few rows as best fit decreasing finds; equal lengths keep the order.

    All examples of one length are placed together: once a row has taken one of them it is the fullest with room, so it
    takes as many as fit. A step therefore costs one binary search among the distinct amounts of room (at most
    `max_length`), which is O(n log n) in practice and a couple of seconds for a million examples.
    """
    _check(lengths, order, max_length)
    ordered = order[np.argsort(-lengths[order], kind="stable")]
    sizes = lengths[ordered]
    run_starts = np.concatenate(([0], np.flatnonzero(np.diff(sizes)) + 1))
    run_lengths = sizes[run_starts]
    run_ends = np.append(run_starts[1:], len(ordered))
    shortest = int(sizes[-1])
    row_of = np.empty(len(ordered), dtype=np.int32)
    rows_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of rows_by_room, sorted
    num_rows = 0
    for length, start, end in zip(run_lengths.tolist(), run_starts.tolist(), run_ends.tolist(), strict=True):
        while start < end:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                room, row = max_length, num_rows
                num_rows += 1
            else:
                room = rooms[at]
                row = rows_by_room[room].pop()
                if not rows_by_room[room]:
                    del rows_by_room[room], rooms[at]
            placed = min(end - start, room // length)
            row_of[start : start + placed] = row
            start += placed
            room -= placed * length
            if room >= shortest:
                if room not in rows_by_room:
                    rows_by_room[room] = []
                    insort(rooms, room)
                rows_by_room[room].append(row)
    examples = ordered[np.argsort(row_of, kind="stable")]
    return Packing(examples, np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=num_rows)))))


def pack_in_order(lengths: Ints, order: Ints, max_length: int) -> Packing:
    """Pack the examples in `order` and keep it: a row is closed when the next example does not fit."""
    _check(lengths, order, max_length)
    ends: list[int] = np.cumsum(lengths[order]).tolist()
    offsets, filled = [0], 0
    while offsets[-1] < len(ends):
        offsets.append(bisect_right(ends, filled + max_length, lo=offsets[-1]))
        filled = ends[offsets[-1] - 1]
    return Packing(order, np.array(offsets, dtype=np.int64))


def one_a_row(order: Ints) -> Packing:
    """No packing: each example is a row."""
    return Packing(order, np.arange(len(order) + 1, dtype=np.int64))


def _check(lengths: Ints, order: Ints, max_length: int) -> None:
    chosen = lengths[order]
    assert len(chosen), "nothing to pack"
    assert chosen.min() > 0, "an example without tokens"
    assert chosen.max() <= max_length, f"an example of {chosen.max()} tokens does not fit a row of {max_length}"
