"""The last product of a layer, left out where the layer is computed again for its gradients alone.

A layer that ends with a product and an addition has gradients that do not depend on what they give. Of llama-8b it is
a quarter of a layer's forward. Compiled recompute leaves it out by itself (`compiled.py`), as it knows what backward
uses; here the layer is called for its gradients only. Whether the value is used is not guessed from names: every layer
is tried with and without, and keeps its product unless all gradients are the same to the bit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.fp8 import Fp8Linear, fp8_gradients, fp8_largest


def _shaped(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _left_out(x: Tensor, weight: Tensor) -> Tensor:
    product = _shaped(x, weight)
    return product.fill_(math.nan) if _TRIED.is_set() else product  # or it might be the very memory of the product


_TRIED = threading.Event()
_unneeded = torch.library.custom_op("penstock::unneeded_product", _left_out, mutates_args=())
_unneeded_fp8 = torch.library.custom_op("penstock::unneeded_fp8_product", _left_out, mutates_args=())


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    rows = gradient.reshape(-1, gradient.shape[-1])
    by_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
    by_weight = rows.t().mm(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
    return by_x, by_weight


def _fp8_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    return fp8_gradients(x, weight, gradient, fp8_largest(x, weight), ctx.needs_input_grad)


for _product, _gradients_of in ((_unneeded, _backward), (_unneeded_fp8, _fp8_backward)):
    _product.register_fake(_shaped)
    _product.register_autograd(_gradients_of, setup_context=_save)


class _LastLinear(nn.Linear):
    """A linear layer that gives its product without gradients, and with gradients memory of its shape.

    A class and not another forward of its own: what is compiled for one of them serves all.
    """

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`, where the value is needed."""
        if not torch.is_grad_enabled():
            return nn.functional.linear(x, self.weight)
        product: Tensor = _unneeded(x, self.weight)
        return product


class _LastFp8Linear(Fp8Linear):
    """The same of fp8 products."""

    def forward(self, x: Tensor) -> Tensor:
        """As `Fp8Linear`, where the value is needed."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        product: Tensor = _unneeded_fp8(x, self.weight)
        return product


_LAST: dict[type[nn.Linear], type[nn.Linear]] = {nn.Linear: _LastLinear, Fp8Linear: _LastFp8Linear}
_WHOLE = {last: whole for whole, last in _LAST.items()}


def keep_last_products(layers: Sequence[nn.Module]) -> None:
    """Undo what `leave_out_last_product` did."""
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, nn.Linear) and type(module) in _WHOLE:
            module.__class__ = _WHOLE[type(module)]


def leave_out_last_product(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Leave it out when gradients are wanted, if they stay the same for this call; whether they did."""
    called: list[nn.Linear] = []
    linears = [m for m in layer.modules() if isinstance(m, nn.Linear) and type(m) in _LAST and m.bias is None]
    hooks = [m.register_forward_hook(lambda module, *_: called.append(module)) for m in linears]
    try:
        with_it = _gradients(layer, args, kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if not called or called.count(called[-1]) > 1:
        return False
    last = called[-1]
    whole = type(last)
    last.__class__ = _LAST[whole]
    _TRIED.set()
    try:
        without = _gradients(layer, args, kwargs)
    finally:
        _TRIED.clear()
    same = all(map(_same, with_it, without))
    if not same:
        last.__class__ = whole
    return same


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _gradients(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Of the input and of all weights, for a gradient of the result that is the same each time."""
    hidden = args[0] if args else kwargs["hidden_states"]
    x = hidden.detach().requires_grad_()
    rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    weights = [p for p in layer.parameters() if p.requires_grad]
    with torch.enable_grad():
        result = layer.forward(x, *args[1:], **rest)
        if not isinstance(result, Tensor):
            return ()
        at = torch.linspace(-1, 1, result.numel(), dtype=torch.float32, device=result.device)
        return torch.autograd.grad(result, [x, *weights], at.view(result.shape).to(result.dtype), allow_unused=True)
