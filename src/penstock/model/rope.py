"""Positions that a model knows, and rows that are longer.

A model's rotary positions are trained up to a length. Beyond it they go on without an error and mean little, so that a
run would train on them in silence: whoever wants longer examples says how. Scaling is written into the config, so that
the exported model has it too.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from penstock.errors import ModelError, RecipeError
from penstock.recipe.recipe import Recipe

AS_IS = "as-is"


def scales(recipe: Recipe) -> bool:
    """Whether rotary positions are scaled."""
    return recipe.rope not in (None, AS_IS)


def with_rope(config: PreTrainedConfig, recipe: Recipe) -> PreTrainedConfig:
    """The config with the scaling that the recipe asks for."""
    if recipe.rope is None or not scales(recipe):
        return config
    kind, _, factor = recipe.rope.partition(":")
    text, where = config.get_text_config(), f"rope = {recipe.rope}"
    own = getattr(text, "rope_parameters", None)
    if not own or "rope_type" not in own:
        raise RecipeError("the model has no rotary positions of one kind", where=where, remedy="Leave it out.")
    if own["rope_type"] != "default":
        what = f"the model has a scaling of its own, {own['rope_type']}, for {positions_of(config):,} positions"
        raise RecipeError(what, where=where, remedy=f"Leave it out, or use --rope {AS_IS} to go on beyond them.")
    known = int(text.max_position_embeddings)
    scaled = own | {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = known
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.rope_parameters, text.max_position_embeddings = scaled, int(known * float(factor))
    return config


def with_positions(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with as many positions as the config. It would cut at the earlier number, or warn of errors."""
    tokenizer.model_max_length = max(tokenizer.model_max_length, positions_of(config))
    return tokenizer


def positions_of(config: PreTrainedConfig) -> int:
    """How many positions the model knows, its own scaling counted; 0 where the config does not say."""
    text: Any = config.get_text_config()
    own = getattr(text, "rope_parameters", None) or {}
    known = int(getattr(text, "max_position_embeddings", 0) or 0)
    scaled = float(own.get("factor") or 0) * float(own.get("original_max_position_embeddings") or 0)
    return max(known, int(scaled)) if known else 0


def check_positions(recipe: Recipe, config: PreTrainedConfig, longest: int) -> None:
    """Refuse examples beyond the model's positions. Rows may be longer: positions begin anew with every example."""
    known, rotary = positions_of(config), bool(getattr(config.get_text_config(), "rope_parameters", None))
    wanted = min(longest, recipe.max_length) if rotary else recipe.max_length
    if not known or wanted <= known or (rotary and recipe.rope == AS_IS):
        return
    enough = enough_scaling(recipe, config, wanted) if rotary else ""
    scale = f"--rope {enough} scales its positions; " if enough else ""
    anyway = f"--rope {AS_IS} goes on beyond them. " if rotary else ""
    raise ModelError(
        f"knows {known:,} positions, and an example would have {wanted:,}",
        where=recipe.model,
        remedy=f"{scale}{anyway}Or lower --max-length to {known}.",
    )


def enough_scaling(recipe: Recipe, config: PreTrainedConfig, wanted: int) -> str:
    """The smallest whole factor that gives so many positions, of the recipe's kind; empty where none can be asked for.

    `config` has the scaling of the recipe already.
    """
    kind, _, factor = (recipe.rope or "").partition(":")
    own = (getattr(config.get_text_config(), "rope_parameters", None) or {}).get("rope_type", "default")
    if not factor and own != "default":
        return ""
    plain = math.ceil(positions_of(config) / float(factor or 1) - 1e-9)  # scaled positions were rounded down
    return f"{kind or 'yarn'}:{-(-wanted // plain)}"
