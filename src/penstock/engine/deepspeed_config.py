"""DeepSpeed's JSON, as the reference example has it, from a recipe.

A file of one's own (`deepspeed_config`) is laid over it: its values win, key by key, so that a file says only what it
changes. Replacing the whole was rejected: a copy of the example's JSON would carry its batch size and its missing
clipping into a run whose flags say otherwise. What the recipe decides (batch, clipping, precision, optimizer, schedule)
may stand in the file only as it is in the recipe, or as `auto`; a different value is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.ranks import World
from penstock.errors import RecipeError
from penstock.recipe.recipe import Recipe

LEAF_MODULES = ("GptOssExperts", "Qwen3MoeSparseMoeBlock")
"""Modules that ZeRO-3 must gather as one: which experts run differs between ranks, and the others would wait."""

_FLAGS = {
    "train_batch_size": "--batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "--micro-batch-size",
    "gradient_clipping": "--max-grad-norm",
}
"""Values that a recipe decides, and where."""
_SECTIONS = {
    "optimizer": "--lr, --betas, --eps and --weight-decay",
    "scheduler": "--lr, --warmup and --schedule",
    "fp16": "--dtype bf16",
    "amp": "--dtype bf16",
}
"""Sections that a recipe has no need of, and what it has instead."""


def deepspeed_json(recipe: Recipe, world: World) -> dict[str, Any]:
    """The configuration of a run, with the user's own file over it."""
    rows = recipe.rows_on(world.size)
    generated: dict[str, Any] = {
        # DeepSpeed wants the product of these three to be exact. Its own count of micro-batches is not used: the last
        # step of an epoch may have fewer, and a micro-batch weighs what it has of trained tokens.
        "train_batch_size": rows * world.size,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.max_grad_norm,
        "bf16": {"enabled": recipe.dtype == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": recipe.bucket_size,
            "sub_group_size": recipe.bucket_size,
            "offload_optimizer": _offload_optimizer(recipe),
            **_offload_param(recipe),
        },
        "wall_clock_breakdown": False,
    }
    if recipe.dtype == "bf16" and recipe.reduce_dtype == "fp32":  # by itself it adds gradients up as they are
        generated["communication_data_type"] = "fp32"
    if recipe.deepspeed_config is None:
        return generated
    return _merged(generated, _read(Path(recipe.deepspeed_config)), recipe.deepspeed_config)


def _offload_optimizer(recipe: Recipe) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True, "ratio": recipe.offload_ratio}
    if recipe.mode == "superoffload":
        offload |= {"super_offload": True, "cpuadam_cores_perc": recipe.cpu_adam_cores}
    return offload


def _offload_param(recipe: Recipe) -> dict[str, Any]:
    if recipe.param_offload == "none":
        return {}
    place = {"nvme_path": recipe.nvme_path} if recipe.param_offload == "nvme" else {}
    return {"offload_param": {"device": recipe.param_offload, "pin_memory": True, **place}}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot be read ({error.strerror})", where=str(path), remedy="Is the path right?") from None
    except (ValueError, UnicodeDecodeError) as error:
        remedy = "--deepspeed-config takes DeepSpeed's own JSON; leave it out to have one made."
        raise RecipeError(f"is not JSON: {error}", where=str(path), remedy=remedy) from None
    if not isinstance(values, dict):
        remedy = 'DeepSpeed\'s configuration is an object such as {"zero_optimization": {"stage": 3}}.'
        raise RecipeError("must hold one JSON object", where=str(path), remedy=remedy)
    return values


def _merged(generated: dict[str, Any], own: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name, instead in _SECTIONS.items():
        section = own.get(name)
        if section and not (isinstance(section, dict) and section.get("enabled") in (False, "auto")):
            raise RecipeError(f"{name}: the recipe decides this", where=where, remedy=f"Remove it and use {instead}.")
    for name, flag in _FLAGS.items():
        if own.get(name, "auto") not in ("auto", generated[name]):
            what = f"{name} = {own[name]!r}, and by the recipe it is {generated[name]!r}"
            raise RecipeError(what, where=where, remedy=f"Remove it and use {flag}.")
    for name in ("bf16", "zero_optimization"):
        if not isinstance(own.get(name, {}), dict):
            raise RecipeError(f"{name} must be a section", where=where, remedy=f'For example "{name}": {{}}.')
    bf16 = own.get("bf16", {})
    if bf16.get("enabled", "auto") not in ("auto", generated["bf16"]["enabled"]):
        raise RecipeError("bf16: the recipe decides this", where=where, remedy="Remove it and use --dtype.")
    if own.get("zero_optimization", {}).get("stage", 3) not in (3, "auto"):
        raise RecipeError("zero_optimization.stage is not 3", where=where, remedy="This engine runs ZeRO-3 only.")
    return _over(generated, {name: value for name, value in own.items() if name not in _SECTIONS})


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, section by section; `auto` leaves what is below."""
    merged = dict(below)
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name, {}), dict):
            merged[name] = _over(below.get(name, {}), value)
        elif value != "auto":
            merged[name] = value
    return merged
