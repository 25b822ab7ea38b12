"""JSON without what Python's parser lets through: keys that occur twice, and NaN."""

from __future__ import annotations

import json
from typing import Any, NoReturn


class _Refused(ValueError):
    """JSON that Python's parser lets through and that is almost certainly a mistake."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise _Refused(f"the key {duplicate!r} occurs twice in one object")
    return fields


def _no_constants(name: str) -> NoReturn:
    raise _Refused(f"{name} is not JSON")


STRICT = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
