"""The numbers of the model that a recipe names, without torch, transformers or a network.

Presets carry theirs. Anything else has a config.json: in its directory, in the package (`demo`), or in Hugging Face's
cache if the model was ever fetched. Model types are read by name, since each spells its numbers in its own way; a type
that is not known here is refused, because a plan that guesses is worse than none.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from penstock.errors import ModelError, RecipeError
from penstock.recipe.positions import AS_IS, check_scaling, known_positions, ways_beyond
from penstock.recipe.presets import ARCHITECTURES, Architecture
from penstock.recipe.recipe import FP8_MULTIPLE, Recipe, fp8_layers

_WINDOWS = {"mistral": 4096, "phi3": None, "qwen2": 4096, "qwen3": 4096, "qwen3_moe": 4096, "gpt_oss": 128}
"""The window of types that may have one, where the config does not say."""
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "seed_oss", "gpt_oss")


def architecture_of(recipe: Recipe) -> Architecture:
    """From the presets' table, or from a config.json; with the recipe's --shape."""
    path = Path(recipe.model).expanduser()
    if recipe.model in ARCHITECTURES and not path.is_dir():
        known = ARCHITECTURES[recipe.model]
        if not recipe.shape:
            return known
        values = {"model_type": known.model_type, **known.config_values()}
    else:
        values = _config(recipe, path)
    return from_config(values | _shape(recipe.shape or ""), recipe.model)


def _config(recipe: Recipe, path: Path) -> dict[str, Any]:
    if recipe.model == "demo":
        text = (resources.files("penstock.demo") / "model" / "config.json").read_text(encoding="utf-8")
    elif (path / "config.json").is_file():
        text = (path / "config.json").read_text(encoding="utf-8")
    else:
        text = _cached(recipe, path)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ModelError(f"the config is not JSON: {error}", where=recipe.model, remedy="Fetch it again.") from None
    assert isinstance(values, dict), "a config is an object"
    return values


def _cached(recipe: Recipe, path: Path) -> str:
    from huggingface_hub import try_to_load_from_cache

    remedy = "Plan a preset, a directory with a config.json, or a model of the Hub by its name."
    if path.exists():
        raise ModelError("has no config.json", where=recipe.model, remedy=remedy)
    try:
        found = try_to_load_from_cache(recipe.model, "config.json", revision=recipe.revision)
    except ValueError:  # not a name that the Hub could have
        raise ModelError("no such directory", where=recipe.model, remedy=remedy) from None
    if not isinstance(found, str):
        raise ModelError(
            "its config.json is neither here nor in Hugging Face's cache",
            where=recipe.model,
            remedy=f"Plan a preset, or fetch it once: hf download {recipe.model} config.json.",
        )
    return Path(found).read_text(encoding="utf-8")


def _shape(text: str) -> dict[str, Any]:
    """The changes of --shape; `model/shape.py` checks them when the model is built."""
    changes: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        changes[name.strip()] = int(value) if value.strip().isdigit() else value.strip()
    return changes


def from_config(values: dict[str, Any], where: str) -> Architecture:
    """An architecture out of a config.json of one of the known types."""
    values = values.get("text_config") or values
    kind = values.get("model_type", "")
    if kind not in KNOWN:
        raise RecipeError(
            f"plan does not know models of type {kind!r}", where=where, remedy=f"Known: {', '.join(KNOWN)}."
        )
    heads = int(values["num_attention_heads"])
    sparse = kind in ("gpt_oss", "qwen3_moe")
    experts = int(values.get("num_experts") or values.get("num_local_experts") or 0) if sparse else 0
    inner = int(values["intermediate_size"])
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope = {"rope_type": rope.get("type", "default"), **rope}  # as older configs spell it, or leave it out
    window = _window(values)
    bias = bool(values.get("attention_bias", kind in ("qwen2", "seed_oss", "gpt_oss")))
    return Architecture(
        model_type=kind,
        layers=int(values["num_hidden_layers"]),
        hidden=int(values["hidden_size"]),
        intermediate=inner,
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or values["hidden_size"] // heads),
        vocab=int(values["vocab_size"]),
        max_positions=int(values.get("max_position_embeddings") or 0),
        norm_eps=float(values.get("rms_norm_eps") or 1e-6),
        rope=tuple((name, value) for name, value in rope.items() if not isinstance(value, list | dict)),
        tied=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=bias and kind != "phi3",
        output_bias=bias and kind in ("llama", "gpt_oss") and bool(values.get("attention_out_bias", True)),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        sinks=kind == "gpt_oss",
        sliding_window=window,
        windowed=_windowed(values) if window is not None else 0,
        experts=experts,
        experts_per_token=int(values.get("num_experts_per_tok") or 0) if experts else 0,
        moe_intermediate=(inner if kind == "gpt_oss" else int(values["moe_intermediate_size"])) if experts else 0,
        expert_bias=kind == "gpt_oss",
    )


def _window(values: dict[str, Any]) -> int | None:
    """Of attention, in whichever layers; as the config class of each type understands what is not there."""
    kind = values["model_type"]
    if kind not in _WINDOWS or (kind.startswith("qwen") and not values.get("use_sliding_window", False)):
        return None
    window = values.get("sliding_window", _WINDOWS[kind])
    return None if window is None else int(window)


def _windowed(values: dict[str, Any]) -> int:
    """Layers that have the window: those that are said to, or as many as the type has by itself."""
    kind, layers = values["model_type"], int(values["num_hidden_layers"])
    if kinds := values.get("layer_types"):
        return list(kinds)[:layers].count("sliding_attention")
    if kind == "gpt_oss":
        return -(-layers // 2)
    return max(0, layers - int(values.get("max_window_layers", 28))) if kind in ("qwen2", "qwen3") else layers


def check_fp8(a: Architecture, model: str) -> None:
    """Refuse fp8 where `train` does: no product of the model can run in it."""
    sides = {"heads x head size": a.heads * a.head_dim, "key heads x head size": a.kv_heads * a.head_dim}
    sides |= {} if a.experts else {"intermediate": a.intermediate}
    if not fp8_layers(a.layers):
        raise no_fp8(model)
    if a.hidden % FP8_MULTIPLE or all(side % FP8_MULTIPLE for side in sides.values()):
        found = ", ".join(f"{name} {side}" for name, side in {"hidden": a.hidden, **sides}.items())
        raise no_fp8(model, f"both sides must be multiples of {FP8_MULTIPLE}: {found}")


def check_rope(a: Architecture, recipe: Recipe) -> str:
    """Refuse a scaling that `train` refuses; what it would say of examples that fill these rows, or nothing."""
    rope = dict(a.rope)
    known, wanted = known_positions(a.max_positions, rope), recipe.max_length
    if recipe.rope == AS_IS:
        return ""
    if recipe.rope:
        check_scaling(recipe.rope, rope, known)
        known = int(known * float(recipe.rope.partition(":")[2]))
    if not known or wanted <= known:
        return ""
    ways = ways_beyond(recipe.rope, rope, known, wanted)
    return f"the model knows {known:,} positions, and longer examples are refused by `train`; {ways}"


def no_fp8(model: str, why: str = "") -> ModelError:
    """What is said of a model without such products; of one without inner layers if there is no other reason."""
    why = why or "the first and the last layer stay as they are, and it has no other"
    return ModelError(f"no product can run in fp8 ({why})", where=model, remedy="Use --matmul bf16.")
