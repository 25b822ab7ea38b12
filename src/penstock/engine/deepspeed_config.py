"""DeepSpeed's JSON, as the reference example has it, from a recipe.

A file of one's own (`deepspeed_config`) is laid over it: its values win, key by key, so that a file says only what it
changes. Replacing the whole was rejected: a copy of the example's JSON would carry its missing clipping into a run
whose flags say otherwise. What the recipe decides (batch, clipping, optimizer, schedule) may stand in the file only as
it is in the recipe, or as `auto`; a different value is refused, never ignored. What the recipe leaves open, the file
decides: the mode, the precision if that is `auto`, and where weights lie (`settled`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from penstock.engine.ranks import World
from penstock.errors import RecipeError
from penstock.recipe.recipe import Recipe

Mode = Literal["superoffload", "zerooffload"]
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


def settled(recipe: Recipe) -> Recipe:
    """The recipe with what its own JSON decides. The same again is no change.

    A section `offload_optimizer` with a device is whole, as for DeepSpeed itself: without `super_offload` it is
    ZeRO-Offload's. One without a device only changes values of the generated one.
    """
    if recipe.engine != "deepspeed" or recipe.deepspeed_config is None:
        return recipe
    where = recipe.deepspeed_config
    own = _read(Path(where))
    zero, changes = _section(own, "zero_optimization", where), dict[str, Any]()
    bf16 = _section(own, "bf16", where).get("enabled", "auto")
    if recipe.dtype == "auto" and isinstance(bf16, bool):
        changes["dtype"] = "bf16" if bf16 else "fp32"
    offload = _section(zero, "offload_optimizer", where)
    changes |= _shares_in(offload, where)
    mode = _mode_in(offload, where) or recipe.mode
    if mode == "superoffload" and recipe.mode == "zerooffload":
        what = "super_offload is true in the file, and the recipe's mode is zerooffload"
        raise RecipeError(what, where=where, remedy="Leave --mode out, or remove super_offload from the file.")
    place = _section(zero, "offload_param", where)
    weights = recipe.param_offload if place.get("device") in (None, "auto") else place["device"]
    if weights not in ("none", "cpu", "nvme"):
        what = f"offload_param: {weights!r} is not none, cpu or nvme"
        raise RecipeError(what, where=where, remedy="Remove it and use --param-offload.")
    if recipe.param_offload not in ("none", weights):
        what = f"offload_param is on {weights} in the file, and the recipe's param_offload is {recipe.param_offload}"
        raise RecipeError(what, where=where, remedy="Say it in one of the two.")
    path = place.get("nvme_path", recipe.nvme_path) if weights == "nvme" else None
    return replace(recipe, mode=mode, param_offload=weights, nvme_path=path, **changes)


def _shares_in(offload: Mapping[str, Any], where: str) -> dict[str, float]:
    """Shares that the section `offload_optimizer` of a file has, under the recipe's names for them."""
    found: dict[str, float] = {"offload_ratio": 1.0} if "device" in offload else {}
    for key, field in (("ratio", "offload_ratio"), ("cpuadam_cores_perc", "cpu_adam_cores")):
        share = offload.get(key, "auto")
        if share == "auto":
            if key in offload:
                found.pop(field, None)
        elif isinstance(share, bool) or not isinstance(share, int | float):
            what = f"offload_optimizer.{key} is {share!r}"
            raise RecipeError(what, where=where, remedy="It is a share, from 0 to 1, or auto.")
        else:
            found[field] = float(share)
    return found


def _mode_in(offload: Mapping[str, Any], where: str) -> Mode | None:
    """The mode that the section `offload_optimizer` of a file asks for, if it does."""
    if offload.get("device", "cpu") not in ("cpu", "auto"):
        what = f"offload_optimizer.device is {offload['device']!r}"
        raise RecipeError(what, where=where, remedy='This engine keeps optimizer state on the host: "cpu".')
    flag = offload.get("super_offload", False if "device" in offload else "auto")
    if flag not in (True, False, "auto"):
        what = f"super_offload is {flag!r}"
        raise RecipeError(what, where=where, remedy="It is true or false; without it the mode is zerooffload.")
    return None if flag == "auto" else "superoffload" if flag else "zerooffload"


def deepspeed_json(recipe: Recipe, world: World) -> dict[str, Any]:
    """The configuration of a run, with the user's own file over it."""
    recipe = settled(recipe)
    rows = recipe.rows_on(world.size)
    micro_batches = -(-recipe.batch_size // (rows * world.size))
    generated: dict[str, Any] = {
        # DeepSpeed wants the product of rows, micro-batches and ranks to be exact: a batch that they do not divide is
        # rounded up. Its count of micro-batches is not used: the last step of an epoch may have fewer, and a
        # micro-batch weighs what it has of trained tokens.
        "train_batch_size": rows * micro_batches * world.size,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro_batches,
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
    return _merged(generated, _read(Path(recipe.deepspeed_config)), recipe)


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


def _section(values: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """A section of a file, empty if it is not there."""
    section = values.get(name, {})
    if not isinstance(section, dict):
        raise RecipeError(f"{name} must be a section", where=where, remedy=f'For example "{name}": {{}}.')
    return section


def _merged(generated: dict[str, Any], own: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    where = str(recipe.deepspeed_config)
    for name, instead in _SECTIONS.items():
        section = own.get(name)
        if section and not (isinstance(section, dict) and section.get("enabled") in (False, "auto")):
            raise RecipeError(f"{name}: the recipe decides this", where=where, remedy=f"Remove it and use {instead}.")
    # One accumulation is DeepSpeed's default and says nothing; the whole batch may have been rounded up above.
    decided = {**generated, "train_batch_size": recipe.batch_size}
    for name, flag in _FLAGS.items():
        silent = 1 if name == "gradient_accumulation_steps" else "auto"
        if own.get(name, "auto") not in ("auto", silent, decided[name]):
            what = f"{name} = {own[name]!r}, and by the recipe it is {decided[name]!r}"
            raise RecipeError(what, where=where, remedy=f"Remove it and use {flag}.")
    if _section(own, "bf16", where).get("enabled", "auto") not in ("auto", generated["bf16"]["enabled"]):
        raise RecipeError("bf16: the recipe decides this", where=where, remedy="Remove it and use --dtype.")
    if _section(own, "zero_optimization", where).get("stage", 3) not in (3, "auto"):
        raise RecipeError("zero_optimization.stage is not 3", where=where, remedy="This engine runs ZeRO-3 only.")
    offload = _section(own.get("zero_optimization", {}), "offload_optimizer", where)
    if "device" in offload:  # whole: what it leaves out is DeepSpeed's default, such as a ratio of 1
        made = generated["zero_optimization"]
        made["offload_optimizer"] = {n: v for n, v in made["offload_optimizer"].items() if offload.get(n) == "auto"}
    return _over(generated, {name: value for name, value in own.items() if name not in {*_SECTIONS, *_FLAGS}})


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, section by section; `auto` leaves what is below."""
    merged = dict(below)
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name, {}), dict):
            merged[name] = _over(below.get(name, {}), value)
        elif value != "auto":
            merged[name] = value
    return merged
