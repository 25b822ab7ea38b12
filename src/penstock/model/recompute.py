"""Activation checkpointing, layer by layer.

`layer.forward` is wrapped, not the module: hooks that wait for a unit's update run outside of what is saved and
replayed, once in forward. Transformers' own `gradient_checkpointing_enable` was rejected: it wraps the whole call,
hooks included, and knows only all layers or none. Replaying gives the same bits, so gradients do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operation
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from penstock.errors import RecipeError

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._flash_attention_forward.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
}
"""Matrix products and attention: nearly all the time of a layer, and half of what it keeps."""


def set_recompute(layers: Sequence[nn.Module], choice: str | int) -> None:
    """Compute activations again in backward instead of keeping them.

    `full`: of all layers; N: of the first N; `selected`: of all layers, but for products and attention; `none`.
    """
    count = {"full": len(layers), "selected": len(layers), "none": 0}[choice] if isinstance(choice, str) else choice
    if count > len(layers):
        raise RecipeError(
            f"the model has {len(layers)} layers", where=f"recompute = {count}", remedy="Use full for all of them."
        )
    if choice == "selected" and any(_adds_in_place(layer) for layer in layers):
        raise RecipeError(
            "experts with biases add them in place to the products that should be kept",
            where="recompute = 'selected'",
            remedy="Use full, none, or a number of layers; or --compile, which keeps products by itself.",
        )
    for number, layer in enumerate(layers):
        _keep(layer)
        if number < count:
            layer.forward = _Recomputed(layer.forward, selected=choice == "selected")


def _adds_in_place(layer: nn.Module) -> bool:
    """Transformers' grouped products do so. Torch notices, but not before the first backward."""
    return any("experts" in name and "bias" in name for name, _ in layer.named_parameters())


def keeping_products() -> Any:
    """For `checkpoint`: contexts of a forward that keeps products and attention, and of one that repeats the rest."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _keep(layer: nn.Module) -> None:
    """Undo the wrapping, to the class's own forward or to whatever had replaced it (a compiled one)."""
    wrapped = vars(layer).get("forward")
    if isinstance(wrapped, _Recomputed):
        del layer.forward
        if layer.forward != wrapped.inner:
            layer.forward = wrapped.inner


class _Recomputed:
    """A forward whose activations are dropped and computed again in backward."""

    def __init__(self, inner: Callable[..., Any], *, selected: bool) -> None:
        functools.update_wrapper(self, inner)  # transformers reads the signatures of forwards
        self.inner = inner
        self._how: dict[str, Any] = {"context_fn": keeping_products} if selected else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        return checkpoint(self.inner, *args, use_reentrant=False, **self._how, **kwargs)
