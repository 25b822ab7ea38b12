"""Numbers as people say them."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(num_bytes: float) -> str:
    """`37 MiB`, `1.5 GiB`."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:,.0f} MiB"
