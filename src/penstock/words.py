"""Numbers as people say them."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
