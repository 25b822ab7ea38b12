"""Decoder layers compiled for training.

`layer.forward` is replaced, not the module compiled: `module.compile()` traces forward hooks together with the module,
and the hook that waits for a unit's update is then lost without a word, so that forward reads weights that are still
being written. Layers of one kind share their code, so that one compilation serves all of them; rows have one length, so
that it serves all steps. Without gradients (evaluation, generation) the plain forward runs: shapes change there all the
time, and every shape would be compiled again.

On a GPU a compiled layer keeps for backward what matrix products and attention gave, and computes the rest again inside
the kernels that need it. That costs nothing and takes 0.6 of the memory: qwen3-14b, 4 x 4096 tokens on an H200, six
layers, 0.499 s and 13.5 GB against 0.498 s and 20.2 GB as the compiler chooses by itself. Its own dial
(`activation_memory_budget`) was rejected: at 0.5 it took 0.514 s and 11.5 GB; it does not know what attention costs.
Recompute is compiled in as well: what backward does not need, such as the layer's last product, is not computed again.

Experts stay out of it. Compiled, the gradients of grouped products come in a layout whose kernel wants every expert's
number of tokens to be a multiple of eight, and ends the process where it is not (torch 2.11).
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.machine.cache import cache_dir
from penstock.model.recompute import Recomputed, keeping_narrow, keeping_products, keeping_scales
from penstock.recipe.recipe import Recompute

Say = Callable[[str], None]
_MOST_GRAPHS = 32
"""Of one function, before the compiler gives up: packed rows and whole ones, what is recomputed, kinds of layers."""


def set_compile(
    layers: Sequence[nn.Module],
    on: bool,
    say: Say,
    chosen: Sequence[Recompute] = (),
    *,
    forward_too: bool = False,
) -> list[Recompute]:
    """Compile every layer at its first forward with gradients, or undo it. Returns what is left for `set_recompute`.

    That is nothing of layers that are compiled. `forward_too`: while the model trains, forwards without gradients are
    compiled as well.
    """
    chosen = chosen or ["none"] * len(layers)
    for layer in layers:
        forward = vars(layer).get("forward")
        if isinstance(forward, _Compiled):
            del layer.forward
            if layer.forward != forward.plain:
                layer.forward = forward.plain
        for experts in experts_of(layer):
            vars(experts).pop("forward", None)
    if not on:
        return list(chosen)
    prepare_compiler()
    attempt = Attempt(say)
    for layer, recompute in zip(layers, chosen, strict=True):
        leave_out_experts(layer)
        layer.forward = _Compiled(layer, attempt, recompute, forward_too=forward_too)
    return ["none"] * len(layers)


def prepare_compiler() -> None:
    """Settings of torch's compiler that all layers share."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir("compiled")))  # the default is emptied with /tmp
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    # Together with forward: while that is called, layers can still run as they are written if it fails. Besides, torch
    # 2.13 has these settings for each thread, and autograd's, which would compile it, has its own.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    # It warns of operations in place in what is computed again; compiled code has none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def leave_out_experts(layer: nn.Module) -> None:
    """The experts of a layer run as they are written."""
    for experts in experts_of(layer):
        experts.forward = torch.compiler.disable(experts.forward)


@dataclass
class Attempt:
    """What all layers know of the compiler: whether it failed, or did not see one of them whole."""

    say: Say
    failed: bool = False
    took_apart: bool = False

    def call(self, compiled: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compiled, or as it is written once the compiler has failed."""
        if not self.failed:
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:  # not what the model itself may raise
                self.failed = True
                self.say(f"layers run uncompiled, which is slower: the compiler failed ({_first_lines(error)})")
        return plain(*args, **kwargs)

    def take_apart(self, error: Exception) -> None:
        """Say it of the first layer that the compiler does not see whole."""
        if not self.took_apart:
            self.took_apart = True
            self.say(
                "a layer is compiled in pieces, which is slower and keeps more for backward: the compiler does not see "
                f"it whole ({_first_lines(error)})"
            )


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).strip().splitlines()[:2])  # a backend's second line says what it raised


class _Compiled:
    """A forward that is compiled where gradients are wanted."""

    def __init__(self, layer: nn.Module, attempt: Attempt, recompute: Recompute, *, forward_too: bool = False) -> None:
        self.plain, self._attempt, self._layer = layer.forward, attempt, weakref.ref(layer)
        functools.update_wrapper(self, self.plain)  # transformers reads the signatures of forwards
        self._recompute, self._forward_too = recompute, forward_too
        self._compiled = self._uncompiled = self.plain
        self._forward: Callable[..., Any] | None = None
        if _in_one_piece(layer):
            self._compile_whole(layer)
        else:
            self._compile_pieces()

    def _compile_whole(self, layer: nn.Module) -> None:
        # The layer is an argument: bound to the function, each would be one of its own, and compiled for itself.
        # Unless the compiler has to see all of it, one layer that it does not would leave all of them uncompiled.
        forward = cast(MethodType, self.plain).__func__
        recomputed = functools.partial(torch.compile(_recomputed, fullgraph=True), self._recompute, forward, layer)
        self._compiled = functools.partial(self._seen_whole, recomputed)
        if self._forward_too:
            alone = functools.partial(torch.compile(_forward, fullgraph=True), forward, layer)
            self._forward = functools.partial(self._seen_whole, alone)
        if self._recompute != "none":
            self._uncompiled = Recomputed(self.plain, self._recompute)

    def _compile_pieces(self) -> None:
        """What the compiler sees of it. All is computed again then where anything is."""
        self._compiled = compiled = torch.compile(self.plain)
        self._forward = compiled if self._forward_too else None
        if self._recompute != "none":
            # What is called again is what was called, though the compiler may have failed at a later layer.
            self._compiled = functools.partial(checkpoint, compiled, use_reentrant=False)
            self._uncompiled = Recomputed(self.plain, "full")

    def _seen_whole(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            self._attempt.take_apart(error)
        self._compile_pieces()
        return self(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled
        if not torch.is_grad_enabled():
            layer = self._layer()
            if self._forward is None or self._attempt.failed or layer is None or not layer.training:
                return self.plain(*args, **kwargs)
            compiled = self._forward
        return self._attempt.call(compiled, self._uncompiled, *args, **kwargs)


def _in_one_piece(layer: nn.Module) -> bool:
    """Whether the compiler sees all of a layer; elsewhere attention runs outside of it, segment by segment."""
    return (
        isinstance(layer.forward, MethodType)
        and not experts_of(layer)
        and not _changes_in_place(layer)
        and all((p.is_cuda or p.is_pinned()) and p.dtype is torch.bfloat16 for p in layer.parameters())  # or it streams
    )


def experts_of(layer: nn.Module) -> list[nn.Module]:
    """Parts with weights of several experts in one tensor."""
    return [part for part in layer.modules() if any(p.ndim == 3 for p in part.parameters(recurse=False))]


def _forward(forward: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(layer, *args, **kwargs)


def _recomputed(recompute: Recompute, forward: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if recompute == "none":
        return checkpoint(forward, layer, *args, use_reentrant=False, context_fn=keeping_products, **kwargs)
    if recompute == "selected":
        return checkpoint(forward, layer, *args, use_reentrant=False, context_fn=keeping_narrow, **kwargs)
    # Without contexts torch 2.11 keeps fp8 products.
    return checkpoint(forward, layer, *args, use_reentrant=False, context_fn=keeping_scales, **kwargs)


def _changes_in_place(layer: nn.Module) -> bool:
    """Layers that the compiler gives up in part and that add to a product in place: replayed, they would add twice.

    They are known by name: that the compiler has given up is not told, and what it left runs as it is written.
    """
    return type(layer).__name__.startswith("Gemma3n")
