"""Attention of one segment where no kernel of a GPU does it: with windows and sinks, on a CPU or in fp32.

Without either it is torch's own causal attention. Otherwise there is a mask, of which a long segment would have more
than any memory holds: 131,072 tokens squared are 17 G. So queries are taken in blocks, each with the keys that it may
reach, and a block is computed again in backward. Short segments are one block, written as ever.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
    found: list[Tensor] = []
    for first in range(0, length, size):
        end, start = min(first + size, length), max(0, first - reach + 1)
        block = (q[:, first:end], k[:, start:end], v[:, start:end], first - start, scale, reach, sinks)
        result: Tensor = checkpoint(_block, *block, use_reentrant=False) if torch.is_grad_enabled() else _block(*block)
        found.append(result)
    return torch.cat(found, dim=1).transpose(0, 1)


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
