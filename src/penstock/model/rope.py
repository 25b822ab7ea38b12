"""Positions that a model knows, and rows that are longer.

A model's rotary positions are trained up to a length. Beyond it they go on without an error and mean little, so that a
run would train on them in silence: whoever wants longer examples says how. Scaling is written into the config, so that
the exported model has it too.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from penstock.errors import ModelError
from penstock.recipe.positions import AS_IS, check_scaling, known_positions, ways_beyond
from penstock.recipe.recipe import Recipe


def scales(recipe: Recipe) -> bool:
    """Whether rotary positions are scaled."""
    return recipe.rope not in (None, AS_IS)


def with_rope(config: PreTrainedConfig, recipe: Recipe) -> PreTrainedConfig:
    """The config with the scaling that the recipe asks for."""
    if recipe.rope is None or not scales(recipe):
        return config
    kind, _, factor = recipe.rope.partition(":")
    text, own = config.get_text_config(), _rope(config)
    check_scaling(recipe.rope, own, positions_of(config))
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


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    return getattr(config.get_text_config(), "rope_parameters", None) or {}


def positions_of(config: PreTrainedConfig) -> int:
    """How many positions the model knows, its own scaling counted; 0 where the config does not say."""
    return known_positions(int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0), _rope(config))


def check_positions(recipe: Recipe, config: PreTrainedConfig, longest: int) -> None:
    """Refuse examples beyond the model's positions. Rows may be longer: positions begin anew with every example."""
    known, rope = positions_of(config), _rope(config)
    wanted = min(longest, recipe.max_length) if rope else recipe.max_length
    if not known or wanted <= known or (rope and recipe.rope == AS_IS):
        return
    ways = f"{ways_beyond(recipe.rope, rope, known, wanted)} " if rope else ""
    what = f"knows {known:,} positions, and an example would have {wanted:,}"
    raise ModelError(what, where=recipe.model, remedy=f"{ways}Or lower --max-length to {known}.")
