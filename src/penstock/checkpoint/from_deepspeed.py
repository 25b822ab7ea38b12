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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.checkpoint.export import export, mend_generation
from penstock.errors import CheckpointError, ModelError, RecipeError
from penstock.model.load import load_config, load_model, load_tokenizer
from penstock.recipe.recipe import Recipe

PREFIXES = ("module.", "_orig_mod.", "model.")
"""What wrappers put before the names of weights."""


def is_deepspeed(path: Path) -> bool:
    """Whether a directory is a checkpoint of DeepSpeed's, in any of the three forms."""
    return _form(path) != ""


def _form(path: Path) -> str:
    """`zero`, `universal`, `consolidated`, or nothing."""
    tagged = _tagged(path)
    if any(tagged.glob("*_optim_states.pt")):
        return "zero"
    if any(tagged.glob("zero/*/fp32.pt")):
        return "universal"
    files = [*path.glob("pytorch_model*.bin"), *path.glob("model*.safetensors")]
    return "consolidated" if files and not (path / "config.json").exists() else ""


def _tagged(path: Path) -> Path:
    """The directory of one step: what the file `latest` names, or the path itself."""
    latest = path / "latest"
    if not latest.is_file():
        return path
    tag = path / latest.read_text(encoding="utf-8").strip()
    return tag if tag.resolve().is_relative_to(path.resolve()) else path  # a name may not lead elsewhere


def export_deepspeed(
    path: Path, directory: Path, name: str, *, file_size: str, trust_pickle: bool, say: Callable[[str], None]
) -> None:
    """Write the weights of a checkpoint at `path` as a Hugging Face directory; `name` is that of their model."""
    form = _form(path)
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
        remedy = "pip install 'penstock[deepspeed]', or run its own zero_to_fp32.py and export what that writes."
        what = "the package deepspeed is not installed, whose converter reads it"
        raise RecipeError(what, where=str(path), remedy=remedy)
    recipe = Recipe(model=name)
    config, tokenizer = load_config(recipe), load_tokenizer(recipe)
    say(f"Building {name} to take the weights")
    model = load_model(replace(recipe, init="random", dtype="fp32"), config, torch.device("cpu"), say)
    with _damage_explained(path):
        weights = {"zero": _zero, "universal": _universal, "consolidated": _consolidated}[form](path)
        fill(model, weights, str(path))
    say(f"Taken: {sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters in fp32")
    mend_generation(model, say)
    export(model, tokenizer, directory, file_size=file_size)


# --- reading ----------------------------------------------------------------------------------------------------------


def _zero(path: Path) -> Mapping[str, Any]:
    """By DeepSpeed's own converter, a tensor at a time."""
    with redirect_stdout(sys.stderr):  # it prints what it does
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        tagged = _tagged(path)
        found: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
            str(tagged.parent), tag=tagged.name, lazy_mode=True
        )
    return found


def _universal(path: Path) -> dict[str, Any]:
    return {file.parent.name: _Later(file) for file in _tagged(path).glob("zero/*/fp32.pt")}


def _consolidated(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(path.glob("model*.safetensors")):
        found |= load_file(file)
    for file in sorted(path.glob("pytorch_model*.bin")) if not found else ():
        found |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return found


class _Later:
    """A tensor that is read when it is wanted, as DeepSpeed's own are."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def contiguous(self) -> Tensor:
        """Read it."""
        held = torch.load(self._file, map_location="cpu", weights_only=True)
        tensor: Tensor = held["param"] if isinstance(held, dict) else held
        return tensor


# --- filling ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """Give every parameter its weight, by name. What is missing or left over is refused."""
    own, names = dict(model.named_parameters()), _as_named_here(weights, set(dict(model.named_parameters())))
    missing = sorted(set(own) - set(names))
    left = sorted(set(weights) - set(names.values()) - set(_tied_and_buffers(model)))
    if missing or left:
        wrong = f"has no weight {missing[0]!r}" if missing else f"has a weight {left[0]!r} that the model has not"
        what = f"{wrong} ({len(missing)} missing, {len(left)} too many)"
        raise ModelError(what, where=where, remedy="Name the model that was trained with --model.")
    for name, parameter in own.items():
        tensor = weights[names[name]].contiguous()
        if tensor.numel() != parameter.numel():
            what = f"{name} has {tensor.numel():,} elements, and the model's has {parameter.numel():,}"
            raise ModelError(what, where=where, remedy="Name the model that was trained with --model.")
        parameter.copy_(tensor.view(parameter.shape))


def _as_named_here(weights: Mapping[str, Any], own: set[str]) -> dict[str, str]:
    """{a parameter's name here: its name in the checkpoint}, whatever wrappers have put before it there."""
    found: dict[str, str] = {}
    for name in weights:
        short = name
        while short not in own and short.startswith(PREFIXES):
            short = short.split(".", 1)[1]
        if short in own:
            found[short] = name
    return found


def _tied_and_buffers(model: nn.Module) -> Iterator[str]:
    """Names that a checkpoint may have and that are no parameters of their own."""
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in model.named_buffers())


@contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        remedy = "It is damaged, in part only, or of a version that the installed DeepSpeed does not know."
        raise CheckpointError(what, where=str(path), remedy=remedy) from error
