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
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import RecipeError


def set_recompute(layers: Sequence[nn.Module], choice: str | int) -> None:
    """Compute the activations of `full`, `none` or the first N layers again in backward instead of keeping them."""
    count = {"full": len(layers), "none": 0}[choice] if isinstance(choice, str) else choice
    if count > len(layers):
        raise RecipeError(
            f"recompute = {count}: the model has {len(layers)} layers", remedy="Use full for all of them."
        )
    for number, layer in enumerate(layers):
        _keep(layer)
        if number < count:
            layer.forward = _Recomputed(layer.forward)


def _keep(layer: nn.Module) -> None:
    """Undo the wrapping, to the class's own forward or to whatever had replaced it (a compiled one)."""
    wrapped = vars(layer).get("forward")
    if isinstance(wrapped, _Recomputed):
        del layer.forward
        if layer.forward != wrapped.inner:
            layer.forward = wrapped.inner


class _Recomputed:
    """A forward whose activations are dropped and computed again in backward."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        functools.update_wrapper(self, inner)  # transformers reads the signatures of forwards
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
