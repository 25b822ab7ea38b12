"""Experts whose tokens go to them and come back by permutations, so that backward has no sums by index.

transformers sorts pairs of tokens and experts by expert, and picks rows and biases by index. Autograd answers each pick
with a sum by index: pair after pair in the working precision, rounded every time. So of a bias, to which thousands of
tokens add, a gradient in bf16 loses what is small beside the sum so far, and a GPU adds them one after another. Here
each pick knows its inverse: the copies of a token are summed in fp32 and rounded once, those of a bias by a product.
Forward computes what transformers computes, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations import moe

NAME = "penstock"


def use_experts(model: PreTrainedModel) -> None:
    """Compute the model's experts here, where transformers would compute them as grouped products.

    Answers too, for which transformers would take other products on a GPU, faster for single tokens.
    """
    has_experts = any(hasattr(part, "has_gate") for part in model.modules())
    if has_experts and model.config._experts_implementation == "grouped_mm":
        moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
        model.set_experts_implementation(NAME)


def experts_forward(experts: nn.Module, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What the chosen experts of each token give, with its weights: all pairs of one expert in one product."""
    e: Any = experts
    each = chosen.shape[-1]
    ids, order = torch.sort(chosen.reshape(-1))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    offsets = _ends(ids, e.num_experts)
    rows = _picked(tokens, order // each, back, each)
    first, first_bias = ("gate_up_proj", "gate_up_proj_bias") if e.has_gate else ("up_proj", "up_proj_bias")
    rows = _product(e, rows, first, first_bias, ids, offsets)
    rows = e._apply_gate(rows) if e.has_gate else e.act_fn(rows)
    rows = _product(e, rows, "down_proj", "down_proj_bias", ids, offsets)
    rows = e.post_expert_norm(rows) if getattr(e, "has_post_expert_norm", False) else rows
    rows = rows * _picked(weights.reshape(-1), order, back).unsqueeze(-1)
    summed = _picked(rows, back, order).view(*chosen.shape, tokens.shape[-1]).sum(dim=1)
    return summed.to(tokens.dtype)


def _ends(ids: Tensor, num_experts: int) -> Tensor:
    """Where the pairs of each expert end."""
    counted = ids.float() if ids.device.type == "cpu" else ids.int()  # as far as histc has kernels
    counts = torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)
    return torch.cumsum(counts, dim=0, dtype=torch.int32)


def _product(experts: Any, rows: Tensor, name: str, bias_name: str, ids: Tensor, offsets: Tensor) -> Tensor:
    found: Tensor = moe._grouped_linear(rows, getattr(experts, name), offsets, is_transposed=experts.is_transposed)
    if experts.has_bias:
        found.add_(_Biases.apply(getattr(experts, bias_name), ids))  # type: ignore[no-untyped-call]
    return found


def _picked(rows: Tensor, index: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    found: Tensor = _Picked.apply(rows, index, back, copies)  # type: ignore[no-untyped-call]
    return found


class _Picked(torch.autograd.Function):
    """Rows by index, each of them `copies` times; `back` says where the copies of each row went, one after another."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        gathered = gradient[back]
        if ctx.copies > 1:
            gathered = gathered.view(-1, ctx.copies, *gradient.shape[1:]).sum(dim=1)
        return gathered, None, None, None


class _Biases(torch.autograd.Function):
    """The bias of each pair's expert."""

    @staticmethod
    def forward(ctx: Any, biases: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_experts = len(biases)
        return biases[ids]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        own = torch.arange(ctx.num_experts, device=ids.device)[:, None] == ids  # which pairs are each expert's
        return own.to(gradient.dtype) @ gradient, None
