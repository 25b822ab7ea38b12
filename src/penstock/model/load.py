"""Config, tokenizer and weights of the model that a recipe names.

The model is built without memory and its weights are streamed in from safetensors (`weight_files.py`), through
transformers' own loader for the sake of its conversions: names that changed, experts that are stored one by one, MXFP4.
Random weights take the same way with nothing to stream, so that what is missing is initialized where it will stay, in
its own precision.  Weights come as bf16 if the checkpoint holds no more than that, and as fp32 if it holds more (fp32,
fp16, dequantized GGUF) or if the recipe asks for fp32. The engine keeps what fp32 has over bf16 in its master weights
and then rounds. Loading at 4 bytes a parameter never needs more than training, which holds 2 bytes of weight and 2 of
gradient. Nothing is left random by accident: a weight that is missing, or of another shape, is an error.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging
from transformers.utils.quantization_config import Mxfp4Config

from penstock.errors import ModelError, RecipeError
from penstock.model.initial import draw_weights
from penstock.model.rope import scales, with_positions, with_rope
from penstock.model.shape import MUST_AGREE, with_shape
from penstock.model.source import Source, find_source, is_local
from penstock.model.weight_files import Progress, StoredTensor, read_headers
from penstock.recipe.presets import ARCHITECTURES
from penstock.recipe.recipe import Recipe

Say = Callable[[str], None]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")


_DIRECTORY = "Name a directory with config.json, a tokenizer and safetensors, such as save_pretrained writes."
FETCH_AGAIN = "Config and weights do not belong together, or a file is damaged: fetch the model again."


def load_config(recipe: Recipe) -> PreTrainedConfig:
    """The architecture. With random weights the presets' models need no network: their numbers are known here."""
    if recipe.init == "random" and recipe.model in ARCHITECTURES and not is_local(recipe.model):
        architecture = ARCHITECTURES[recipe.model]
        config = AutoConfig.for_model(architecture.model_type, **architecture.config_values())
    else:
        config = _read_config(recipe)
    _refuse_other_models(recipe, config)
    with quiet():
        return with_rope(with_shape(config, recipe.shape) if recipe.shape else config, recipe)


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer, from `tokenizer` if the recipe has one, else from the model."""
    if recipe.tokenizer:
        source = find_source(recipe.tokenizer, flag="--tokenizer")
    else:
        source = find_source(recipe.model, recipe.revision)
    if not source.gguf_file and not any(any(source.directory.glob(file)) for file in _TOKENIZER_FILES):
        remedy = "Name another with --tokenizer: a Hub name, a directory, or demo."
        raise ModelError("there is no tokenizer", where=str(source.directory), remedy=remedy)
    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.directory, trust_remote_code=recipe.trust_remote_code, **source.gguf
            )
    except Exception as error:  # the tokenizers library raises no class of its own
        remedy = "Fetch the model again, or name another tokenizer with --tokenizer."
        raise ModelError(
            f"the tokenizer cannot be loaded: {error}", where=str(source.directory), remedy=remedy
        ) from error
    return with_positions(tokenizer, load_config(recipe)) if scales(recipe) else tokenizer


def load_model(recipe: Recipe, config: PreTrainedConfig, device: torch.device, say: Say) -> PreTrainedModel:
    """The model with its weights on `device`, in bf16 or fp32 (see above), ready to be trained and saved."""
    config = copy.deepcopy(config)
    drop_dropout(config, say)
    if recipe.trust_remote_code:
        say(f"WARNING: running Python code that comes with {recipe.model}, because of --trust-remote-code")
    with quiet():
        if recipe.init == "random":
            model = _random_model(recipe, config, device)
        else:
            source = find_source(recipe.model, recipe.revision, weights=True)
            if source.gguf_file:
                model = _gguf_model(config, source, device, say)
            else:
                model = _streamed_model(recipe, config, source, device, say)
    model.config.name_or_path = recipe.model
    left = [name for name, tensor in _tensors(model) if tensor.is_meta]
    assert not left, f"never materialized: {left[:3]}"
    return model


def _read_config(recipe: Recipe) -> PreTrainedConfig:
    source = find_source(recipe.model, recipe.revision)
    where = str(source.directory / (source.gguf_file or "config.json"))
    if not source.gguf_file and not (source.directory / "config.json").is_file():
        raise ModelError("there is no config.json", where=str(source.directory), remedy=_DIRECTORY)
    try:
        with quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                source.directory, trust_remote_code=recipe.trust_remote_code, **source.gguf
            )
    except Exception as error:  # transformers and its validators raise many kinds for a bad config
        message = str(error).strip()
        if "trust_remote_code" in message:
            remedy = "Read that code first; then add --trust-remote-code."
            raise ModelError("the model needs Python code of its own to run", where=where, remedy=remedy) from None
        what = f"the config cannot be used: {message.splitlines()[0]}"
        remedy = "Fetch the model again; a type that transformers does not know may need a newer one."
        raise ModelError(what, where=where, remedy=remedy) from error
    return config


def _refuse_other_models(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Only causal language models, and only weights that are numbers."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    name = known.__name__ if isinstance(known, type) else ""
    named: list[str] = config.architectures or [name]
    causal = any(n == name or n.endswith("ForCausalLM") for n in named)
    if not _custom_class(recipe, config) and (config.is_encoder_decoder or not name or not causal):
        what = ", ".join(filter(None, named)) or config.model_type
        remedy = "Use a decoder such as Llama, Qwen3 or Mistral."
        raise ModelError(f"is not a causal language model ({what})", where=recipe.model, remedy=remedy)
    method = quantization(config)
    if recipe.init == "pretrained" and method and method != "mxfp4":
        remedy = "Full fine-tuning needs plain weights: use the model that this one was made from."
        raise ModelError(f"the weights are quantized ({method})", where=recipe.model, remedy=remedy)


def quantization(config: PreTrainedConfig) -> str:
    """How the weights are packed, or nothing."""
    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method", "") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method))


def drop_dropout(config: PreTrainedConfig, say: Say) -> None:
    """Train without dropout, of layers too, and without noise on what experts are chosen by, whatever the config says.

    A dropped-out step depends on how rows share a batch, so micro-batches would not add up to a batch and a packed row
    would not equal its examples; and the flash kernels for packed rows have none. `check_logits` refuses what is left.
    """
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if not (isinstance(value, float) and value > 0):
            continue
        used = not name.startswith(("classifier", "summary"))  # heads that a causal language model does not have
        if used and ("dropout" in name or name.endswith("_pdrop")):
            kind = "dropout"
        elif "layerdrop" in name or name == "layer_drop":
            kind = "dropout of layers"
        elif name.endswith("jitter_noise") and text.model_type != "phimoe":  # there it weighs experts in inference too
            kind = "noise"
        else:
            continue
        setattr(text, name, 0.0)
        say(f"  {name} = {value} in the model's config is set to 0: Penstock trains without {kind}")


def _random_model(recipe: Recipe, config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Random weights, seeded, made on the device in the working precision: an 8B model never exists in fp32."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = torch.float32 if recipe.dtype == "fp32" else torch.bfloat16
    generators = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=generators):
            torch.manual_seed(recipe.seed)
            model, _ = _load(model_class(recipe, config), config, {}, dtype, device)
            draw_weights(model, recipe.seed)
    except (ValueError, TypeError, AssertionError, ZeroDivisionError) as error:
        if not recipe.shape:
            raise
        what = f"gives no {config.model_type}: {error}"
        raise RecipeError(what, where=f"shape = {recipe.shape!r}", remedy=MUST_AGREE) from error
    return model


def _streamed_model(
    recipe: Recipe, config: PreTrainedConfig, source: Source, device: torch.device, say: Say
) -> PreTrainedModel:
    stored = read_headers(source.directory)
    dtype = precision(recipe, stored, say)
    progress = Progress(say)
    progress.expect(sum(t.num_bytes for t in stored.values()))
    wider = torch.float32 if dtype == torch.float32 else None
    lazy = {name: replace(t, device=device, dtype=wider, progress=progress) for name, t in stored.items()}
    try:
        model, info = _load(model_class(recipe, config), config, lazy, dtype, device)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        what, where = f"the weights cannot be loaded: {error}", str(source.directory)
        raise ModelError(what, where=where, remedy=FETCH_AGAIN) from error
    refuse_gaps(source, info, say)
    if quantization(config):
        _forget_quantization(model)
    if dtype == torch.float32:
        for parameter in model.parameters():  # MXFP4 always comes out as bf16
            parameter.data = parameter.data.float()
    if (source.directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.directory)
    return model


def _load(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: dict[str, StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Transformers' loader over tensors that are read when it asks for them."""
    loaded: Any = kind.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        device_map={"": device},
        ignore_mismatched_sizes=True,  # they are reported, and then refused here
        output_loading_info=True,
        quantization_config=Mxfp4Config(dequantize=True) if quantization(config) == "mxfp4" else None,
    )
    model, info = loaded
    return model, info


def model_of_tensors(
    recipe: Recipe, config: PreTrainedConfig, tensors: dict[str, torch.Tensor], say: Say
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model in fp32 on the host with these weights, under names of this version of transformers or an earlier one.

    And what did not fit: names that are missing, too many, or of another shape.
    """
    config = copy.deepcopy(config)
    drop_dropout(config, say)
    if hasattr(config, "quantization_config"):  # of what the model was published in; these are plain numbers
        del config.quantization_config
    with quiet():
        lazy: Any = tensors
        model, info = _load(model_class(recipe, config), config, lazy, torch.float32, torch.device("cpu"))
    model.config.name_or_path = recipe.model
    return model, info


def _gguf_model(config: PreTrainedConfig, source: Source, device: torch.device, say: Say) -> PreTrainedModel:
    """A GGUF file, dequantized. This one is not streamed: transformers unpacks it in host memory first."""
    where = source.directory / (source.gguf_file or "")
    try:
        refuse_lost_scaling(where, config)
        say(f"  unpacking {source.gguf_file}; its weights keep the precision that they were quantized to")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.directory,
            config=config,
            dtype=torch.float32,
            device_map={"": device},
            output_loading_info=True,
            **source.gguf,
            **_gguf_settings(),
        )
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        remedy = "Take the model that it was made from, or another file: transformers unpacks some kinds only."
        raise ModelError(f"the GGUF file cannot be loaded: {error}", where=str(where), remedy=remedy) from error
    model, info = loaded
    assert isinstance(model, PreTrainedModel)
    refuse_gaps(source, info, say)
    _forget_quantization(model)
    return model


def refuse_lost_scaling(path: Path, config: PreTrainedConfig) -> None:
    """The file's scaling of positions must have come into the config.

    llama.cpp keeps that of Llama 3.1 and later as a tensor, `rope_freqs.weight`, and others under keys of their own.
    transformers reads neither for most models, and would train with other positions than the model was made with.
    """
    from gguf import GGUFReader  # needed for GGUF files only

    reader = GGUFReader(path)
    found = [t.name for t in reader.tensors if t.name.startswith(("rope_freqs", "rope_factors"))]
    fields = {name: field.contents() for name, field in reader.fields.items() if name.endswith(".rope.scaling.type")}
    found += [f"{name} = {value}" for name, value in fields.items() if value != "none"]
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    if found and all(one.get("rope_type", "default") == "default" for one in by_layer):
        what = f"the file scales positions (RoPE: {_some(found)}), and transformers leaves that out"
        remedy = "Take the model that the file was made from."
        raise ModelError(what, where=str(path), remedy=remedy)


def _gguf_settings() -> dict[str, Any]:
    """Newer versions of transformers would keep the weights packed, where they cannot be trained."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _forget_quantization(model: PreTrainedModel) -> None:
    """Keep the numbers and nothing of the quantizer.

    It would refuse to save them (GGUF), or save them under the names of the packed ones (MXFP4: `gate_up_proj_blocks`),
    where nothing finds them again.
    """
    for name in ("hf_quantizer", "quantization_method", "_weight_conversions", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def model_class(recipe: Recipe, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that AutoModelForCausalLM would choose."""
    if custom := _custom_class(recipe, config):
        found: Any = get_class_from_dynamic_module(custom, find_source(recipe.model, recipe.revision).directory)
    else:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind: type[PreTrainedModel] = found
    return kind


def _custom_class(recipe: Recipe, config: PreTrainedConfig) -> str:
    """The class in the model's own code, if it has one and may run it."""
    auto_map = getattr(config, "auto_map", None) or {}
    return str(auto_map.get("AutoModelForCausalLM", "")) if recipe.trust_remote_code else ""


def precision(recipe: Recipe, stored: dict[str, StoredTensor], say: Say) -> torch.dtype:
    """fp32 if the recipe wants it or most of the checkpoint's numbers need it; what is rounded then is said."""
    exact = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # bf16 holds every value of these
    floating = {name: t for name, t in stored.items() if t.stored.is_floating_point}
    wide = [name for name, t in floating.items() if t.stored not in exact]
    elements = Counter({n: t.num_elements for n, t in floating.items()})
    if recipe.dtype == "fp32" or 2 * sum(elements[name] for name in wide) > elements.total():
        return torch.float32
    if wide:
        say(f"  {len(wide)} of {len(stored)} tensors are stored in more than bf16 and are rounded, such as {wide[0]}")
    return torch.bfloat16


def refuse_gaps(source: Source, info: dict[str, Any], say: Say) -> None:
    """Every weight of the model must have come from the checkpoint, in its own shape."""
    where = str(source.directory / (source.gguf_file or ""))
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"the checkpoint lacks {_some(missing)}", where=where, remedy=FETCH_AGAIN)
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        what = f"{name} is {list(found)} in the checkpoint and {list(expected)} by its config"
        remedy = "config.json and weights are of different models: fetch both again."
        raise ModelError(f"{len(mismatched)} weights have another shape: {what}", where=where, remedy=remedy)
    if unexpected := sorted(info["unexpected_keys"]):
        say(f"  the checkpoint has weights that the model does not use, and that are left out: {_some(unexpected)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers' reports and progress bars say in its own words what is said here."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    reading: Any = modeling_gguf_pytorch_utils
    bar = reading.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reading.tqdm = lambda items, **_: items  # it asks nobody, and fills a log
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        reading.tqdm = bar
        if bars:
            logging.enable_progress_bar()
