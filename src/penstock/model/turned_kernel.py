"""The Triton side of `turned.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 128
"""Rows and columns of one program: a row of it is what the memory gives at once."""


@triton.jit
def _row(source, row, column, rows, columns):  # type: ignore[no-untyped-def]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    return tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0).to(tl.int32)


@triton.jit
def _turn(source, target, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    across = tl.cdiv(columns, TILE)
    four = (tl.program_id(0) // across).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
    column = (tl.program_id(0) % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    words = _row(source, 4 * four, column, rows, columns)
    words |= _row(source, 4 * four + 1, column, rows, columns) << 8
    words |= _row(source, 4 * four + 2, column, rows, columns) << 16
    words |= _row(source, 4 * four + 3, column, rows, columns) << 24
    inside = (column[:, None] < columns) & (4 * four[None, :] < rows)
    tl.store(target + column[:, None] * (rows // 4) + four[None, :], tl.trans(words), mask=inside)


def launch_turn(source: Tensor, target: Tensor) -> None:
    """Bytes of (rows, columns) to words of (columns, rows / 4), on the current stream."""
    rows, columns = source.shape
    programs = triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    _turn[(programs,)](source, target, rows, columns, TILE=TILE, num_warps=8, enable_fp_fusion=False)
