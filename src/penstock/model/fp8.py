"""Linear layers whose three products run in fp8: the result, the input's gradient and the weight's gradient.

Before each product its two factors are cast: input and weight to e4m3, the gradient to e5m2, each with one scale, by
which its largest number becomes the largest of the type. The scale is that of the tensor at hand. Nothing is remembered
from one call to the next, so that there is nothing to save, nothing to go stale when a weight is updated, moved or
gathered, and a product that is computed again has the same bits. Sums are fp32, and the result is rounded once to the
type that the model computes in.

The operation is torch's `_scaled_mm`. A CPU has it too, where it multiplies the same fp8 numbers in fp32: the casts,
the scales and their order are tested everywhere, and only the order of a sum differs.

torchao's `Float8Linear` computes the same (`tests/model/test_fp8.py` compares them where torchao is installed; torchao
0.18.0 passed with torch 2.13 on a CPU) and was rejected: it is a module put in the place of another, where FSDP2, the
optimizer's units and hooks hold on to the first one, while here a module changes its class and stays itself; it cannot
leave out a product that backward does not need (`unneeded.py`); and each of its versions wants a version of torch. It
also leaves rows and columns of a factor to one compiled kernel, which on Hopper may store garbage (`turned.py`).

No cast clamps. It need not: what is less than 3.5 % over MAX in e4m3, or 7 % in e5m2, is cast to MAX; beyond that e5m2
has infinity, and e4m3 no number before torch 2.13. |x| * (MAX / largest) is over MAX by two roundings of fp32, and by
more where a compiled layer keeps the scale and computes x again: x is then rounded otherwise, by 0.4 % a time in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock.model.turned import cast_columns, turned
from penstock.recipe.recipe import FP8_MULTIPLE

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TINY = 1e-30
"""A tensor with nothing larger is cast as it is, to zeros: its scale would be infinite."""


def fp8_product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in fp8, and in backward both gradients."""
    product: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return product


def fp8_largest(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the casts of both depend on."""
    return _largest(x), _largest(weight)


def fp8_gradients(
    x: Tensor, weight: Tensor, gradient: Tensor, largest: tuple[Tensor, Tensor], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Of the product by `x` and by `weight`, as far as they are wanted. `largest`: as `fp8_largest` gives it."""
    rows, tokens = _whole(gradient.reshape(-1, gradient.shape[-1])), gradient.numel() // gradient.shape[-1]
    top = _largest(rows)
    by_x = by_weight = None
    narrow = _cast(rows, top, _E5M2)
    if wanted[0]:
        down = cast_columns(weight, _rate(largest[1], _E4M3))
        by_x = _multiply(narrow, down, _step(top, _E5M2), _step(largest[1], _E4M3), gradient.dtype)
        by_x = by_x[:tokens].view(x.shape)
    if wanted[1]:
        across = turned(_cast(_whole(x.reshape(-1, x.shape[-1])), largest[0], _E4M3))
        by_weight = _multiply(turned(narrow), across, _step(top, _E5M2), _step(largest[0], _E4M3), weight.dtype)
    return by_x, by_weight


class _Product(torch.autograd.Function):
    """Input and weight are kept as they came, and cast again in backward: fp8 copies would be beside them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        largest = fp8_largest(x, weight)
        ctx.save_for_backward(x, weight, *largest)
        rows = _cast(x.reshape(-1, x.shape[-1]), largest[0], _E4M3)
        steps = _step(largest[0], _E4M3), _step(largest[1], _E4M3)
        # Sums of forward may be kept in fewer bits on Hopper, as torchao has it too; those of gradients not.
        product = _multiply(rows, _cast(weight, largest[1], _E4M3), *steps, x.dtype, fast=True)
        return product.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, of_x, of_weight = ctx.saved_tensors
        return fp8_gradients(x, weight, gradient, (of_x, of_weight), ctx.needs_input_grad)


class Fp8Linear(nn.Linear):
    """A linear layer that became one of fp8 products by changing its class: parameters and names are what they were."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`. The bias is added to the rounded product."""
        product = fp8_product(x, self.weight)
        return product if self.bias is None else product + self.bias


def _largest(x: Tensor) -> Tensor:
    """The largest absolute value, in fp32. One that is no number makes the whole product none, as it should be."""
    if not x.numel():  # a rank without rows
        return x.new_ones((), dtype=torch.float32)
    largest = x.abs().amax().float()
    return torch.where(largest < _TINY, torch.ones_like(largest), largest)


def _cast(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * _rate(largest, dtype)).to(dtype)


def _rate(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.finfo(dtype).max / largest


def _step(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What a number that was cast is multiplied with to have it back."""
    return largest / torch.finfo(dtype).max


def _multiply(
    a: Tensor, b: Tensor, step_a: Tensor, step_b: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`a @ b.T`: tensor cores take fp8 only with both factors stored along the axis that is summed over."""
    return torch._scaled_mm(a, b.t(), scale_a=step_a, scale_b=step_b, out_dtype=dtype, use_fast_accum=fast)


def _whole(rows: Tensor) -> Tensor:
    """Rows with zeros after them up to a multiple of FP8_MULTIPLE: the weight's gradient sums over tokens."""
    missing = -len(rows) % FP8_MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
