"""Flash attention with sinks (gpt-oss), exact in forward and backward, out of torch's own kernels.

A sink is one learned logit a head. It takes part in the softmax's sum and in nothing else, so the output is the plain
one times g = sigmoid(lse - sink), where lse is the logarithm of the sum that flash attention returns anyway.

Backward needs no new kernel either. With O' = g O and gradient D of O', the chain rule through lse turns flash
attention's delta = rowsum(g D * O) into rowsum(g D * O'): the correction g (1 - g) rowsum(D * O) is exactly the
difference. So its own backward, given g D as gradient and O' as output, is right for queries, keys and values, and the
sink's gradient is -sum((1 - g) rowsum(D * O')).

Rejected: softmax written out, segment by segment. It is right (the CPU does it so), but its logits take 17 GB for one
segment of 8192 tokens and 64 heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.plan.layout import TOKENS_IN_FP32


def flash_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, offsets: Tensor, max_length: int, scale: float, window_left: int
) -> Tensor:
    """Causal attention over segments, (tokens, heads, head size) in and out; `window_left` tokens back, -1 for all."""
    settings = (max_length, scale, window_left)
    out: Tensor = _FlashWithSinks.apply(q, k, v, sinks, offsets, *settings)  # type: ignore[no-untyped-call]
    return out


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    """Every head of every token times its gate, in fp32, and rounded."""
    cuts = zip(_cut(x), _cut(gate.t()), strict=True)
    parts = [(part * of_heads.unsqueeze(-1)).to(x.dtype) for part, of_heads in cuts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cut(x: Tensor) -> tuple[Tensor, ...]:
    """By tokens, so that no long row is there in fp32."""
    return torch.split(x, TOKENS_IN_FP32)


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, offsets: Tensor, *settings: Any) -> Tensor:
        max_length, scale, window_left = settings
        causal = window_left < 0
        window = {"window_size_left": window_left, "window_size_right": 0}
        out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, max_length, max_length, 0.0, causal, False, scale=scale, **window
        )
        gate = torch.sigmoid(lse - sinks.float()[:, None])  # (heads, tokens)
        out = _gated(out, gate)
        ctx.save_for_backward(q, k, v, out, lse, gate, offsets, rng, unused)
        ctx.settings = (max_length, scale, causal, window, sinks.dtype)
        assert isinstance(out, Tensor)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, gate, offsets, rng, unused = ctx.saved_tensors
        max_length, scale, causal, window, sink_dtype = ctx.settings
        (grad,) = grads
        gated = _gated(grad, gate)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            gated, q, k, v, out, lse, offsets, offsets, max_length, max_length, 0.0, causal, rng, unused,
            scale=scale, **window,
        )  # fmt: skip
        along = torch.cat([(a.float() * b.float()).sum(-1) for a, b in zip(*map(_cut, (grad, out)), strict=True)])
        dsinks = -((1 - gate.t()) * along).sum(0)
        return dq, dk, dv, dsinks.to(sink_dtype), None, None, None, None
