"""The Triton side of `turned.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = {"ROWS": 128, "COLUMNS": 128, "num_warps": 8}
"""What one program moves: a row and a column of it are what the memory gives and takes at once."""


@triton.jit
def _byte(source, rate, row, column, words, columns, CAST: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = (row[:, None] < 4 * words) & (column[None, :] < columns)
    number = tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0)
    if CAST:
        number = (number.to(tl.float32) * rate).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return number.to(tl.int32)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    source, rate, target, words, columns, CAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    across = tl.cdiv(columns, COLUMNS)
    word = (tl.program_id(0) // across).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    if CAST:
        rate = tl.load(rate)
    four = _byte(source, rate, 4 * word, column, words, columns, CAST)
    four |= _byte(source, rate, 4 * word + 1, column, words, columns, CAST) << 8
    four |= _byte(source, rate, 4 * word + 2, column, words, columns, CAST) << 16
    four |= _byte(source, rate, 4 * word + 3, column, words, columns, CAST) << 24
    inside = (column[:, None] < columns) & (word[None, :] < words)
    tl.store(target + column[:, None] * words + word[None, :], tl.trans(four), mask=inside)


def launch_turn(
    source: Tensor,
    target: Tensor,
    rate: Tensor | None = None,
    tile: dict[str, int] | None = None,
) -> None:
    """Columns of (rows, columns) to `target`, which has them as rows, on the current stream.

    With `rate`: of what they are multiplied with it and cast to e4m3.
    """
    rows, columns = source.shape
    tile = tile or TILE
    programs = triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(columns, tile["COLUMNS"])
    _turn[(programs,)](
        source if rate is not None else source.view(torch.uint8),
        rate,
        target.view(torch.int32),
        rows // 4,
        columns,
        CAST=rate is not None,
        enable_fp_fusion=False,
        **tile,
    )
