"""A Hugging Face decoder, taken apart: an embedding, one list of layers, a final norm, a head.

Found from the structure, never from a table of model names. What is not understood is refused by name: a parameter that
belongs to none of these would silently not be trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ModelError
from penstock.model.units import Unit, find_units


@dataclass(frozen=True)
class Head:
    """How logits come from hidden states: softcap(scale * (hidden @ weight.T + bias))."""

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @property
    def weight(self) -> Tensor:
        """Read anew each time: sharding and loading replace parameters."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """None for nearly every model."""
        return getattr(self.module, "bias", None)


@dataclass(frozen=True)
class Decoder:
    """The model, taken apart."""

    units: tuple[Unit, ...]
    """Embedding, layers, norm, head: in forward order. What has no weights of its own (a tied head) is left out."""
    backbone: PreTrainedModel
    """Everything but the head: token ids in, hidden states out."""
    layers: tuple[nn.Module, ...]
    head: Head
    tied: dict[str, str]
    """Other names of a weight, each with the name that it is listed under."""

    @contextmanager
    def only(self, chosen: Sequence[int]) -> Iterator[None]:
        """For a trial: the backbone passes these layers."""
        path, layers = next(
            (path, found) for path, found in _outermost_lists(self.backbone) if self.layers == (*found,)
        )
        within, _, name = path.rpartition(".")
        holder = self.backbone.get_submodule(within)
        setattr(holder, name, nn.ModuleList(layers[number] for number in chosen))
        try:
            yield
        finally:
            setattr(holder, name, layers)


def find_decoder(model: PreTrainedModel) -> Decoder:
    """Take the model apart, or say what about it was not understood."""
    _refuse_auxiliary_loss(model)
    backbone, head = _backbone(model), model.get_output_embeddings()
    if not isinstance(head, nn.Module) or getattr(head, "weight", None) is None:
        raise _not_understood(model, "it has no output head with a weight")
    path, layers = _layer_list(model, backbone)
    parts = [*_around(backbone, path), *layers, head]
    _refuse_leftovers(model, {id(p) for part in parts for p in part.parameters()})
    names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    tied = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if names[id(p)] != name}
    return Decoder(tuple(find_units(model, layers)), backbone, tuple(layers), _head(model, head), tied)


def _backbone(model: PreTrainedModel) -> PreTrainedModel:
    if model.config.is_encoder_decoder:
        raise _not_understood(model, "it has an encoder and a decoder")
    backbone = model.base_model
    if backbone is model or not isinstance(backbone, PreTrainedModel):
        raise _not_understood(model, "it is not a backbone with a head on top")
    return backbone


def _layer_list(model: PreTrainedModel, backbone: nn.Module) -> tuple[str, list[nn.Module]]:
    """The one list of layers, and its path in the backbone. Lists inside a layer (experts) do not count."""
    count = model.config.get_text_config().num_hidden_layers
    lists = {
        name: list(module)
        for name, module in _outermost_lists(backbone)
        if len(module) == count and any(True for _ in module.parameters())
    }
    if len(lists) != 1:
        found = ", ".join(lists) or "none"
        raise _not_understood(model, f"one list of {count} layers was expected, found: {found}")
    return next(iter(lists.items()))


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _outermost_lists(child, f"{prefix}{name}.")


def _around(backbone: nn.Module, path: str) -> list[nn.Module]:
    """Modules before the layers and after them, at every level down to the list."""
    found: list[nn.Module] = []
    container = backbone
    for step in path.split("."):
        found += [child for name, child in container.named_children() if name != step]
        container = getattr(container, step)
    return found


def _head(model: PreTrainedModel, module: nn.Module) -> Head:
    """What the model does to its logits, from its config. `check_logits` proves it against the model itself."""
    config = model.config.get_text_config()
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    scale = (1.0 if factor is None else float(factor)) / (1.0 if divisor is None else float(divisor))
    return Head(module, scale, getattr(config, "final_logit_softcapping", None))


def _refuse_auxiliary_loss(model: PreTrainedModel) -> None:
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ModelError(
            "the config asks for the experts' auxiliary loss (output_router_logits), which is not implemented",
            where=type(model).__name__,
            remedy="Set output_router_logits to false in its config.json to train without.",
        )


def _refuse_leftovers(model: PreTrainedModel, known: set[int]) -> None:
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise _not_understood(model, f"these weights belong to no embedding, layer, norm or head: {shown}")


def _not_understood(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"the structure was not understood: {reason}",
        where=type(model).__name__,
        remedy="Penstock trains decoders with one list of layers, such as Llama, Qwen3, Phi-3, Mistral or gpt-oss.",
    )
