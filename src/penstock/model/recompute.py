"""Activation checkpointing, layer by layer.

`layer.forward` is wrapped, not the module: hooks that wait for a unit's update run outside of what is saved and
replayed, once in forward. Transformers' own `gradient_checkpointing_enable` was rejected: it wraps the whole call,
hooks included, and knows only all layers or none. Replaying gives the same bits, so gradients do not change.

What is worth computing again is what takes much memory for little time. A product gives back bytes in proportion to one
over its inner size, so all products over the model's width are alike; those that widen (the first of an MLP, and
experts) are most of a layer. Of qwen3-14b, 4 x 4096 tokens, they hold 1.1 of 1.9 GB a layer and take 7.8 ms; the whole
layer takes 18 ms.

What is kept must not be written over before it is replayed. torch looks for that by version counters and misses it
where `matmul` gave the product, because its result is a view with a counter of its own: gradients of gemma3n_text,
which adds to such a product in place, were off by up to 99 %. So storages are compared here, and such a layer gets
`full`, whose replay starts from nothing but the layer's inputs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operation
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from penstock.model.long_segments import ATTEND_SEGMENTS
from penstock.model.row_attention import ATTEND_ROWS
from penstock.recipe.recipe import Recompute

_aten = torch.ops.aten
_MATRIX = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_ATTENTION = {
    _aten._flash_attention_forward.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    ATTEND_ROWS,
    ATTEND_SEGMENTS,
}
_FP8 = _aten._scaled_mm.default
PRODUCTS = _MATRIX | _ATTENTION | {_aten._grouped_mm.default, _FP8}
"""Matrix products and attention: nearly all the time of a layer, and half of what it keeps."""
WIDENS = 2
"""A product whose result is more than so many times as wide as what went in is computed again by `selected`."""
_CHANGED = "layers that change a product in place get `full` where `selected` was asked for, which is slower"


def set_recompute(layers: Sequence[nn.Module], chosen: Sequence[Recompute]) -> None:
    """Compute activations of a layer again in backward instead of keeping them.

    `full`: all of them; `selected`: all but attention and the products that do not widen; `none`.
    """
    for layer, recompute in zip(layers, chosen, strict=True):
        _keep(layer)
        if recompute != "none":
            layer.forward = Recomputed(layer.forward, recompute)


def keeping_products() -> Any:
    """For `checkpoint`: contexts of a forward that keeps products and attention, and of one that repeats the rest."""
    return create_selective_checkpoint_contexts(
        lambda _, operation, *args, **kwargs: _saved(operation in PRODUCTS or _is_scale(operation, args))
    )


def keeping_narrow() -> Any:
    """The same, but products that widen, and those of experts, are repeated too."""
    return create_selective_checkpoint_contexts(
        lambda _, operation, *args, **kwargs: _saved(_narrow(operation, args) or _is_scale(operation, args))
    )


def keeping_scales() -> Any:
    """The same, but everything is repeated except the scales of fp8 casts."""
    return create_selective_checkpoint_contexts(
        lambda _, operation, *args, **kwargs: _saved(_is_scale(operation, args))
    )


class _Watch(TorchDispatchMode):
    """Looks for operations that write into what `keeping_narrow` keeps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        self._kept = set[int]()  # what is kept stays allocated, so that no other storage gets its address

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(operation, torch._ops.OpOverload):  # one of higher order, which keeps nothing here
            return operation(*args, **kwargs)
        if operation._schema.is_mutable and not self._kept.isdisjoint(_storages(_written(operation, args, kwargs))):
            self.found = True
        result = operation(*args, **kwargs)
        if _narrow(operation, args):
            self._kept |= _storages(result)
        return result


def _written(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    named = {declared.name: value for declared, value in zip(operation._schema.arguments, args, strict=False)} | kwargs
    changes = [declared.name for declared in operation._schema.arguments if declared.is_write]
    return [named[name] for name in changes if name in named]


def _storages(tensors: Any) -> set[int]:
    """Addresses of their memory, whatever part of it they view."""
    return {x.untyped_storage().data_ptr() for x in tree_leaves(tensors) if isinstance(x, Tensor) and x.numel()}


def _narrow(operation: Any, args: Sequence[Any]) -> bool:
    if operation in _MATRIX or operation is _FP8:
        inner, width = args[1 if operation is _FP8 else -1].shape[-2:]
        return bool(width <= WIDENS * inner)
    return operation in _ATTENTION


def _is_scale(operation: Any, args: Sequence[Any]) -> bool:
    """The largest number of a whole tensor, by which fp8 casts are scaled: four bytes for a pass over all of it."""
    return operation is _aten.amax.default and len(args) == 1


def _saved(yes: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if yes else CheckpointPolicy.PREFER_RECOMPUTE


def _keep(layer: nn.Module) -> None:
    """Undo the wrapping, to the class's own forward or to whatever had replaced it (a compiled one)."""
    wrapped = vars(layer).get("forward")
    if isinstance(wrapped, Recomputed):
        del layer.forward
        if layer.forward != wrapped.inner:
            layer.forward = wrapped.inner


class Recomputed:
    """A forward whose activations are dropped and computed again in backward: `full` or `selected`."""

    def __init__(self, inner: Callable[..., Any], recompute: Recompute) -> None:
        functools.update_wrapper(self, inner)  # transformers reads the signatures of forwards
        self.inner, self._recompute, self._watched = inner, recompute, recompute == "full"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `inner`. A layer whose first forward changes what `selected` keeps gets `full`."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if not self._watched:
            self._watched = True
            with _Watch() as watch:
                result = self._selected(*args, **kwargs)
            if not watch.found:
                return result
            del result  # and with it what was kept
            warnings.warn(_CHANGED, stacklevel=1)
            self._recompute = "full"
        if self._recompute == "selected":
            return self._selected(*args, **kwargs)
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)

    def _selected(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, context_fn=keeping_narrow, **kwargs)
