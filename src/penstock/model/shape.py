"""Another shape for random weights: `num_hidden_layers=2,hidden_size=64`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from penstock.errors import RecipeError, did_you_mean

MUST_AGREE = "The sizes must agree: hidden_size is a multiple of the number of heads, say. Change fewer of them."


def with_shape(config: PreTrainedConfig, shape: str) -> PreTrainedConfig:
    """The config with the changes that `shape` lists. Lists with an entry a layer keep their pattern."""
    values = config.to_dict()
    changes = dict(_parse(item) for item in shape.split(",") if item.strip())
    known = {name for name, value in values.items() if not isinstance(value, dict | list)} | set(config.attribute_map)
    for name in changes:
        if name not in known:
            what = f"{config.model_type} has no setting {name!r}"
            raise RecipeError(what, where="shape", remedy=did_you_mean(name, known))
    aliases = config.attribute_map  # such as n_layer, which GPT-2's file says, for num_hidden_layers
    changes = {aliases.get(name, name): value for name, value in changes.items()}
    before = config.num_hidden_layers
    after = changes.get(aliases.get("num_hidden_layers", "num_hidden_layers"), before)
    if not isinstance(after, int) or after < 1:
        what = f"num_hidden_layers = {after!r} must be a positive number"
        raise RecipeError(what, where="shape", remedy="2 is enough for a test.")
    for name, value in values.items():
        if isinstance(value, list) and len(value) == before:
            values[name] = [value[number % before] for number in range(after)]
    values |= changes
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[name] = _within(values.get(name), values["vocab_size"])
    try:
        return type(config).from_dict(values)
    except Exception as error:  # the config classes' validators raise many kinds
        what = f"does not fit {config.model_type}: {error}"
        raise RecipeError(what, where=f"shape = {shape!r}", remedy=MUST_AGREE) from error


def _within(token_id: Any, vocab_size: int) -> Any:
    """A special token's id, or none where a smaller vocabulary has no such token."""
    if isinstance(token_id, list):
        return [i for i in token_id if i < vocab_size] or None
    return token_id if isinstance(token_id, int) and token_id < vocab_size else None


def _parse(item: str) -> tuple[str, Any]:
    name, sign, text = (part.strip() for part in item.partition("="))
    if not sign or not name:
        remedy = "Such as num_hidden_layers=2,hidden_size=64."
        raise RecipeError(f"{item!r} is not NAME=VALUE", where="shape", remedy=remedy)
    words: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return name, words[text.lower()]
    for number in (int, float):
        try:
            return name, number(text)
        except ValueError:
            continue
    return name, text
