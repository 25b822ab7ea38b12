"""A model of which every rank loads its own rows and nothing else.

The model is built without memory and sharded over the ranks (FSDP2), and only then do its weights come: transformers'
loader asks for the rows of a rank where a parameter is sharded, and `StoredTensor` reads no more than those. So no rank
ever holds the model; the most beyond its rows is one tensor of a module that is drawn at random.

What cannot be read in rows is refused: GGUF files and MXFP4 weights are unpacked whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from penstock.errors import ModelError
from penstock.model.initial import draw_weights
from penstock.model.load import FETCH_AGAIN, Say, drop_dropout, model_class, precision, quantization, quiet, refuse_gaps
from penstock.model.source import Source, find_source
from penstock.model.weight_files import Progress, read_headers
from penstock.recipe.recipe import Recipe

ShardOverRanks = Callable[[PreTrainedModel], None]
"""Leaves every rank its rows of each weight of a model that is on the meta device, in place."""


def load_own_rows(
    recipe: Recipe,
    config: PreTrainedConfig,
    device: torch.device,
    shard: ShardOverRanks,
    say: Say,
    draw_on: torch.device | None = None,
) -> PreTrainedModel:
    """The model with this rank's rows on `device`, in bf16, or in fp32 if the checkpoint or the recipe has that.

    Random weights are those that `draw_on` draws.
    """
    config = copy.deepcopy(config)
    drop_dropout(config, say)
    if recipe.trust_remote_code:
        say(f"WARNING: running Python code that comes with {recipe.model}, because of --trust-remote-code")
    with quiet():
        if recipe.init == "random":
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            dtype = torch.float32 if recipe.dtype == "fp32" else torch.bfloat16
            model = build_on_meta(recipe, config, dtype, shard)
            _draw(model, recipe.seed, device, draw_on or device)
        else:
            source = find_source(recipe.model, recipe.revision, weights=True)
            model = _read(recipe, config, source, device, shard, say)
    model.config.name_or_path = recipe.model
    return model


def draw_model(
    recipe: Recipe, config: PreTrainedConfig, device: torch.device, draw_on: torch.device, say: Say
) -> PreTrainedModel:
    """Random weights on `device` that are those that `draw_on` would have drawn for itself."""
    config = copy.deepcopy(config)
    drop_dropout(config, say)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = torch.float32 if recipe.dtype == "fp32" else torch.bfloat16
    with quiet():
        model = build_on_meta(recipe, config, dtype, lambda model: model.tie_weights())
        _draw(model, recipe.seed, device, draw_on)
    model.config.name_or_path = recipe.model
    return model


def count_parameters(recipe: Recipe, config: PreTrainedConfig) -> int:
    """Of the model that will be loaded; a tied head counts once. Nothing is allocated."""
    model = build_on_meta(recipe, config, torch.bfloat16, lambda model: model.tie_weights())
    return sum(p.numel() for p in model.parameters())


def build_on_meta(
    recipe: Recipe, config: PreTrainedConfig, dtype: torch.dtype, shard: ShardOverRanks
) -> PreTrainedModel:
    """The architecture on the meta device, sharded as `shard` does it: nothing is allocated."""
    kind = model_class(recipe, config)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = kind(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(default)
    model.config.dtype = dtype
    shard(model)
    return model


def _draw(model: PreTrainedModel, seed: int, device: torch.device, draw_on: torch.device) -> None:
    model.to_empty(device=device)
    model.tie_weights()
    with torch.random.fork_rng(devices=[draw_on] if draw_on.type == "cuda" else []):
        draw_weights(model, seed, draw_on)


def _read(
    recipe: Recipe, config: PreTrainedConfig, source: Source, device: torch.device, shard: ShardOverRanks, say: Say
) -> PreTrainedModel:
    packed = source.gguf_file or (quantization(config) and "its MXFP4 weights")
    if packed:
        remedy = "Load it once with one rank and --max-steps 1 --lr 1e-30, and train on the model that this exports."
        raise ModelError(f"{packed} cannot be read in rows by several ranks", where=recipe.model, remedy=remedy)
    stored = read_headers(source.directory)
    dtype = precision(recipe, stored, say)
    model = build_on_meta(recipe, config, dtype, shard)
    progress = Progress(say)
    progress.expect(sum(p.to_local().nbytes for p in model.parameters()))  # type: ignore[attr-defined]
    wider = torch.float32 if dtype == torch.float32 else None
    lazy: dict[str, Any] = {n: replace(t, device=device, dtype=wider, progress=progress) for n, t in stored.items()}
    mapping: Any = get_model_conversion_mapping(model)
    settings = LoadStateDictConfig(
        ignore_mismatched_sizes=True, device_map={"": device}, dtype=dtype, weight_mapping=mapping
    )
    try:
        info, _ = convert_and_load_state_dict_in_model(model, lazy, settings, None)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        what, where = f"the weights cannot be loaded: {error}", str(source.directory)
        raise ModelError(what, where=where, remedy=FETCH_AGAIN) from error
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    found = info.to_dict()
    refuse_gaps(source, found | {"missing_keys": set(found["missing_keys"]) - tied}, say)
    model.tie_weights()
    _fill_buffers(model, device)
    if (source.directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.directory)
    return model


@torch.no_grad()
def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Buffers that no checkpoint holds, such as the frequencies of rotary positions, as the model computes them."""
    for module in model.modules():
        own = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in own.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        if own:
            model._init_weights(module)  # weights that were loaded carry a mark that keeps them
