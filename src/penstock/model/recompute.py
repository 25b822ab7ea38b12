"""Activation checkpointing, layer by layer.

`layer.forward` is wrapped, not the module: hooks that wait for a unit's update run outside of what is saved and
replayed, once in forward. Transformers' own `gradient_checkpointing_enable` was rejected: it wraps the whole call,
hooks included, and knows only all layers or none. Replaying gives the same bits, so gradients do not change.

What is worth computing again is what takes much memory for little time. A product gives back bytes in proportion to one
over its inner size, so all products over the model's width are alike; those that widen (the first of an MLP, and
experts) are most of a layer. Of qwen3-14b, 4 x 4096 tokens, they hold 1.1 of 1.9 GB a layer and take 7.8 ms; the whole
layer takes 18 ms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operation
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from penstock.recipe import Dial

_aten = torch.ops.aten
_MATRIX = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_ATTENTION = {
    _aten._flash_attention_forward.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
}
PRODUCTS = _MATRIX | _ATTENTION | {_aten._grouped_mm.default}
"""Matrix products and attention: nearly all the time of a layer, and half of what it keeps."""
WIDENS = 2
"""A product whose result is more than so many times as wide as what went in is computed again by `selected`."""


def set_recompute(layers: Sequence[nn.Module], chosen: Sequence[Dial]) -> None:
    """Compute activations of a layer again in backward instead of keeping them.

    `full`: all of them; `selected`: all but attention and the products that do not widen; `none`.
    """
    for layer, dial in zip(layers, chosen, strict=True):
        _keep(layer)
        if dial != "none":
            layer.forward = _Recomputed(layer.forward, {} if dial == "full" else {"context_fn": keeping_narrow})


def keeping_products() -> Any:
    """For `checkpoint`: contexts of a forward that keeps products and attention, and of one that repeats the rest."""
    return create_selective_checkpoint_contexts(lambda _, operation, *args, **kwargs: _saved(operation in PRODUCTS))


def keeping_narrow() -> Any:
    """The same, but products that widen, and those of experts, are repeated too."""
    return create_selective_checkpoint_contexts(lambda _, operation, *args, **kwargs: _saved(_narrow(operation, args)))


def _narrow(operation: Any, args: Sequence[Any]) -> bool:
    if operation in _MATRIX:
        inner, width = args[-1].shape[-2:]
        return bool(width <= WIDENS * inner)
    return operation in _ATTENTION


def _saved(yes: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if yes else CheckpointPolicy.PREFER_RECOMPUTE


def _keep(layer: nn.Module) -> None:
    """Undo the wrapping, to the class's own forward or to whatever had replaced it (a compiled one)."""
    wrapped = vars(layer).get("forward")
    if isinstance(wrapped, _Recomputed):
        del layer.forward
        if layer.forward != wrapped.inner:
            layer.forward = wrapped.inner


class _Recomputed:
    """A forward whose activations are dropped and computed again in backward."""

    def __init__(self, inner: Callable[..., Any], how: dict[str, Any]) -> None:
        functools.update_wrapper(self, inner)  # transformers reads the signatures of forwards
        self.inner, self._how = inner, how

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        return checkpoint(self.inner, *args, use_reentrant=False, **self._how, **kwargs)
