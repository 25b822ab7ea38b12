"""Positions that a model knows, by the numbers of its config: what rows may be longer than, and what scaling gives.

Without torch or transformers, so that a plan says in a second what training would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.errors import RecipeError

AS_IS = "as-is"


def known_positions(most: int, rope: Mapping[str, Any]) -> int:
    """Of a config's `max_position_embeddings` and `rope_parameters`, its own scaling counted; 0 where it says none."""
    scaled = float(rope.get("factor") or 0) * float(rope.get("original_max_position_embeddings") or 0)
    return max(most, int(scaled)) if most else 0


def check_scaling(asked: str, rope: Mapping[str, Any], known: int) -> None:
    """Refuse to scale what is scaled already, or no rotary positions of one kind."""
    where = f"rope = {asked}"
    if "rope_type" not in rope:
        raise RecipeError("the model has no rotary positions of one kind", where=where, remedy="Leave it out.")
    if rope["rope_type"] != "default":
        what = f"the model has a scaling of its own, {rope['rope_type']}, for {known:,} positions"
        raise RecipeError(what, where=where, remedy=f"Leave it out, or use --rope {AS_IS} to go on beyond them.")


def enough_scaling(asked: str | None, rope: Mapping[str, Any], known: int, wanted: int) -> str:
    """The smallest whole factor that gives so many positions, of the kind asked for; empty where none can be.

    `rope` and `known` have the scaling that was asked for already.
    """
    kind, _, factor = (asked or "").partition(":")
    if not factor and rope.get("rope_type", "default") != "default":
        return ""
    plain = math.ceil(known / float(factor or 1) - 1e-9)  # scaled positions were rounded down
    return f"{kind or 'yarn'}:{-(-wanted // plain)}"


def ways_beyond(asked: str | None, rope: Mapping[str, Any], known: int, wanted: int) -> str:
    """How to train on so many positions, for those who paste."""
    enough = enough_scaling(asked, rope, known, wanted)
    return (f"--rope {enough} scales its positions; " if enough else "") + f"--rope {AS_IS} goes on beyond them."
