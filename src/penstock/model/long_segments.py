"""Attention over segments of which some are long: each of those as a row of its own, what is between them together.

Rows have a faster kernel (`row_attention.py`), and a long document hardly ever fills its row to the last token. torch
makes that kernel's plan for every length anew, once forward and once backward, in 0.05 s each; so much is saved from
some sixteen thousand tokens on.

One operation, into which the compiler does not look: how many segments there are is nobody's business but its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operations
from torch import Tensor

from penstock.model import row_attention
from penstock.plan.layout import LONG_SEGMENT

_varlen = torch.ops.torch_attn
Span = tuple[int, int, tuple[int, ...]]
"""From token, to token, and the boundaries in between, itself from 0; two of one long segment."""


def has_long(lengths: Sequence[int]) -> bool:
    """Whether any of these segments is."""
    return max(lengths) >= LONG_SEGMENT


def attend_segments(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float) -> Tensor:
    """Causal attention, (tokens, heads, head size) in and out; `boundaries` of segments, on the host."""
    out: Tensor = _attend(q, k, v, boundaries, scale)[0]
    return out


def _spans(boundaries: Tensor) -> Iterator[Span]:
    """Long segments alone, and all short ones from one to the next."""
    waiting: list[int] = []
    for start, end in itertools.pairwise(boundaries.tolist()):
        waiting = waiting or [start]
        if end - start < LONG_SEGMENT:
            waiting.append(end)
            continue
        if len(waiting) > 1:
            yield _span(waiting)
        yield _span([start, end])
        waiting = []
    if len(waiting) > 1:
        yield _span(waiting)


def _span(boundaries: Sequence[int]) -> Span:
    first, last = boundaries[0], boundaries[-1]
    return first, last, tuple(boundary - first for boundary in boundaries)


def _is_long(span: Span) -> bool:
    return len(span[2]) == 2 and span[1] - span[0] >= LONG_SEGMENT


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What comes out, and of each head and token the logarithm of its sum."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, sums = _forward_shapes(q, k, v, boundaries, scale)
    for span in _spans(boundaries):
        here = slice(*span[:2])
        one = q[here], k[here], v[here]
        if _is_long(span):
            rows = [x.unsqueeze(0) for x in one]
            parts = [x[0] for x in row_attention.forward(rows[0], rows[1], rows[2], scale)]
        else:
            parts = _short(*one, span[2], scale)
        out[here], sums[:, here] = parts
    return out, sums


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty(tokens, heads, v.shape[2]), q.new_empty(heads, tokens, dtype=torch.float32)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, boundaries: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, q, k, v, out = (x.contiguous() for x in (gradient, q, k, v, out))
    found = _backward_shapes(gradient, q, k, v, out, sums, boundaries, scale)
    for span in _spans(boundaries):
        here = slice(*span[:2])
        one = [x[here] for x in (gradient, q, k, v, out)] + [sums[:, here]]
        if _is_long(span):
            g, a, b, c, result, of_sums = (x.unsqueeze(0) for x in one)
            parts = [x[0] for x in row_attention.backward(g, a, b, c, result, of_sums, scale)]
        else:
            parts = _short_backward(one, span[2], scale)
        for whole, part in zip(found, parts, strict=True):
            whole[here] = part
    return found


def _backward_shapes(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, boundaries: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _short(q: Tensor, k: Tensor, v: Tensor, boundaries: Sequence[int], scale: float) -> list[Tensor]:
    out, sums, _ = _varlen._varlen_attn(q, k, v, *_where(q, boundaries), True, scale, [-1, 0])
    return [out, sums]


def _short_backward(saved: Sequence[Tensor], boundaries: Sequence[int], scale: float) -> list[Tensor]:
    """`saved`: the gradient, queries, keys, values, the result and its sums."""
    *tokens, sums = saved
    no_seed = torch.zeros(2, dtype=torch.uint64, device=sums.device)
    where = _where(sums, boundaries)
    return list(_varlen._varlen_attn_backward(*tokens, sums.contiguous(), *where, True, no_seed, scale, [-1, 0]))


def _where(x: Tensor, boundaries: Sequence[int]) -> tuple[Tensor, Tensor, int, int]:
    """Segments of queries and of keys, as the kernel for them wants to know it."""
    offsets = torch.tensor(boundaries, dtype=torch.int32)
    if x.is_cuda:  # from pageable memory the copy would wait for all work queued on the GPU
        offsets = offsets.pin_memory().to(x.device, non_blocking=True)
    longest = max(end - start for start, end in itertools.pairwise(boundaries))
    return offsets, offsets, longest, longest


_attend = torch.library.custom_op("penstock::attend_segments", _forward, mutates_args=())
_attend_backward = torch.library.custom_op("penstock::attend_segments_backward", _backward, mutates_args=())


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    *tensors, boundaries, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output, boundaries)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None, None]:
    by_q, by_k, by_v = _attend_backward(gradient, *ctx.saved_tensors, ctx.scale)
    return by_q, by_k, by_v, None, None


_attend.register_fake(_forward_shapes)
_attend.register_autograd(_gradients, setup_context=_save)
_attend_backward.register_fake(_backward_shapes)

ATTEND_SEGMENTS = torch.ops.penstock.attend_segments.default
"""The operation, as it is named in graphs."""
