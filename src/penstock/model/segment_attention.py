"""Attention of one segment where no kernel of a GPU does it: with windows and sinks, on a CPU or in fp32.

Without either it is torch's own causal attention. Otherwise there is a mask, of which a long segment would have more
than any memory holds: 131,072 tokens squared are 17 G. So queries are taken in blocks, each with the keys that it may
reach, and a block is computed again in backward. Short segments are one block, written as ever.

Backward adds what a block gives where its keys and values lie. Left to autograd, it gave each block gradients of all
keys and values of the segment, so that its time grew with the square of the length, whatever the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_LOGITS = 2**24
"""Of a segment of one block, and, of all heads, of one of several blocks."""


def attend_segment(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """(tokens, heads, head size) in and out."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    heads, length = q.shape[:2]
    windowed = window is not None and length > window
    if sinks is None and not windowed:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0].transpose(0, 1)
    reach = window if windowed and window is not None else length
    if length * length <= _MOST_LOGITS:
        return _block(q, k, v, 0, scale, reach, sinks).transpose(0, 1)
    size = max(1, min(reach, _MOST_LOGITS // (heads * reach)))
    out: Tensor = _Blocks.apply(q, k, v, sinks, scale, reach, size)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1)


class _Blocks(torch.autograd.Function):
    """(heads, tokens, head size) in and out, by blocks of `size` queries."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, reach: int, size: int
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.settings = scale, reach, size
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for queries, keys in _spans(q.shape[1], reach, size):
            before = queries.start - keys.start
            out[:, queries] = _block(q[:, queries], k[:, keys], v[:, keys], before, scale, reach, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale, reach, size = ctx.settings
        inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad[:4]
        found = [torch.zeros_like(x) if yes else None for x, yes in zip(inputs, wanted, strict=True)]
        for queries, keys in _spans(gradient.shape[1], reach, size):
            places = (slice(None), queries), (slice(None), keys), (slice(None), keys), (slice(None),)
            cut = zip(inputs, places, wanted, strict=True)
            parts: list[Any] = [x if x is None else x.detach()[at].requires_grad_(yes) for x, at, yes in cut]
            q, k, v, sinks = parts
            with torch.enable_grad():
                out = _block(q, k, v, queries.start - keys.start, scale, reach, sinks)
            leaves = [x for x, yes in zip(parts, wanted, strict=True) if yes]
            gradients = iter(torch.autograd.grad(out, leaves, gradient[:, queries]))
            for whole, at in zip(found, places, strict=True):
                if whole is not None:
                    whole[at] += next(gradients)
        return (*found, None, None, None)


def _spans(length: int, reach: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that each of them reaches."""
    for first in range(0, length, size):
        end = min(first + size, length)
        yield slice(first, end), slice(max(0, first - reach + 1), end)


def _block(q: Tensor, k: Tensor, v: Tensor, before: int, scale: float, reach: int, sinks: Tensor | None) -> Tensor:
    """Queries with `before` keys before the first of them, each of which reaches so many keys, itself counted."""
    allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(before)
    if reach < k.shape[1]:
        allowed = allowed.triu(before + 1 - reach)
    if sinks is None:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=allowed, scale=scale)[0]
    logits = ((q @ k.transpose(1, 2)).float() * scale).masked_fill(~allowed, float("-inf"))
    sink = sinks.float()[:, None, None].expand(-1, q.shape[1], 1)
    weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v
