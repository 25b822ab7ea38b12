"""Weights out of a checkpoint that DeepSpeed wrote, as a model that can be trained on here or anywhere.

Three forms: ZeRO's own (`*_optim_states.pt`, read by DeepSpeed's converter), universal (`zero/NAME/fp32.pt`), and
consolidated (`zero_to_fp32.py`: safetensors or .bin without a config). All hold fp32 masters, and fp32 is written: a
run that begins with them has the same masters. Moments are left behind: our optimizer does not start from DeepSpeed's.

ZeRO's own files are pickles of arbitrary objects. Reading one can run any code, so that it must be asked for by a flag;
the other two are read as tensors and nothing else.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig

from penstock.checkpoint.export import export, mend_generation
from penstock.checkpoint.places import deepspeed_form, deepspeed_step
from penstock.errors import CheckpointError, ModelError, RecipeError
from penstock.model.load import load_config, load_tokenizer, model_of_tensors
from penstock.model.load_rows import build_on_meta
from penstock.model.source import find_source
from penstock.recipe.recipe import Recipe

WRAPPERS = ("module.", "_orig_mod.")
"""What DeepSpeed's engine and torch's compiler put before the names of weights."""


def export_deepspeed(
    path: Path, directory: Path, name: str, *, file_size: str, trust_pickle: bool, say: Callable[[str], None]
) -> None:
    """Write the weights of a checkpoint at `path` as a Hugging Face directory; `name` is that of their model."""
    form = deepspeed_form(path)
    if not form:
        what = "is no checkpoint of DeepSpeed's"
        remedy = "Name the directory with its file `latest`. For a run of ours leave --model and --trust-pickle out."
        raise CheckpointError(what, where=str(path), remedy=remedy)
    if not name:
        what = "is a checkpoint of DeepSpeed's, which does not say of what model"
        raise RecipeError(what, where=str(path), remedy="Name it with --model: a Hub name or a directory.")
    if form == "zero" and not trust_pickle:
        what = "is a pickle of DeepSpeed's, and reading it can run any code"
        raise RecipeError(what, where=str(path), remedy="If you trust where it comes from, add --trust-pickle.")
    if form == "zero" and importlib.util.find_spec("deepspeed") is None:
        remedy = (
            "pip install 'penstock-train[deepspeed]' (in a checkout: pip install -c constraints.txt '.[deepspeed]'), "
            "or run its own zero_to_fp32.py and export what that writes."
        )
        what = "the package deepspeed is not installed, whose converter reads it"
        raise RecipeError(what, where=str(path), remedy=remedy)
    recipe = Recipe(model=name)
    config, tokenizer = load_config(recipe), load_tokenizer(recipe)
    with _damage_explained(path):
        say(f"Reading {path}")
        tensors = {_plain(key): tensor for key, tensor in _READERS[form](path)}
    if form == "universal":
        shape_like(build_on_meta(recipe, config, torch.float32, lambda model: model.tie_weights()), tensors)
    model, info = model_of_tensors(recipe, config, tensors, say)
    refuse_gaps(info, str(path))
    say(f"Taken: {sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters in fp32")
    source = find_source(name, None).directory
    if (source / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    mend_generation(model, say)
    export(model, tokenizer, directory, file_size=file_size)


def shape_like(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give tensors the shapes of the model's: a universal checkpoint of ZeRO-3 has flat ones."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in tensors and tensors[name].numel() == parameter.numel():
            tensors[name] = tensors[name].view(parameter.shape)


def refuse_gaps(info: Mapping[str, Any], where: str) -> None:
    """Refuse weights that are not all of the model's, or more, or of another shape."""
    wrong = {
        kind: sorted(str(name) for name in info[f"{kind}_keys"]) for kind in ("missing", "unexpected", "mismatched")
    }
    if any(wrong.values()):
        kinds = ", ".join(f"{len(names)} {kind}, such as {names[0]}" for kind, names in wrong.items() if names)
        what = f"does not hold the weights of that model: {kinds}"
        raise ModelError(what, where=where, remedy="Name the model that was trained with --model.")


def _plain(name: str) -> str:
    """A weight's name without what wrappers have put before it."""
    while name.startswith(WRAPPERS):
        name = name.split(".", 1)[1]
    return name


# --- reading ----------------------------------------------------------------------------------------------------------

Weights = Iterator[tuple[str, Tensor]]


def _zero(path: Path) -> Weights:
    """By DeepSpeed's own converter."""
    with redirect_stdout(sys.stderr):  # it prints what it does
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        tagged = deepspeed_step(path)
        yield from get_fp32_state_dict_from_zero_checkpoint(str(tagged.parent), tag=tagged.name).items()


def _universal(path: Path) -> Weights:
    for file in deepspeed_step(path).glob("zero/*/fp32.pt"):
        held = torch.load(file, map_location="cpu", weights_only=True)
        yield file.parent.name, held["param"] if isinstance(held, dict) else held


def _consolidated(path: Path) -> Weights:
    safe = sorted(path.glob("model*.safetensors"))
    for file in safe:
        yield from load_file(file).items()
    for file in [] if safe else sorted(path.glob("pytorch_model*.bin")):
        yield from torch.load(file, map_location="cpu", mmap=True, weights_only=True).items()


_READERS: dict[str, Callable[[Path], Weights]] = {
    "zero": _zero,
    "universal": _universal,
    "consolidated": _consolidated,
}


@contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        remedy = "It is damaged, in part only, or of a version that the installed DeepSpeed does not know."
        raise CheckpointError(what, where=str(path), remedy=remedy) from error
