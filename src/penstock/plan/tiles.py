"""A layer in tiles (`model/tiles.py`): what it takes, and what it computes and moves more often.

Counted tensor by tensor, as `memory.py` does. What kernels of attention take for themselves is known for flash
attention; it stands here for the others too, since they have not been measured on long rows yet.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.plan.layout import TOKENS_IN_FP32, layer_parameters
from penstock.plan.memory import Work, in_flight_bytes, saved_in_layer
from penstock.recipe.presets import Architecture


def tiled_bytes(a: Architecture, work: Work) -> float:
    """The most that backward of one layer takes beside its input, with sums of the gradients of its weights.

    Of the whole row there are the gradient that came, queries, keys and values, what attention gave and its gradient;
    and beside those what a tile takes, or attention's backward.
    """
    b, q, kv = work.dtype_bytes, a.heads * a.head_dim, a.kv_heads * a.head_dim
    whole = work.tokens * (b * (a.hidden + 3 * q + 2 * kv) + 4 * a.heads)
    tokens = min(work.tile, work.tokens)
    one = replace(work, rows=1, length=tokens)
    tile = saved_in_layer(a, one) + in_flight_bytes(a, one)
    if work.tokens > tokens:  # its gradients of weights, until they are added
        tile += b * (_params(a) - projection_weights(a))
    attention = work.tokens * (b * (q + 2 * kv) + _kernel_bytes(a, b))
    if a.sinks:  # gradient and result in fp32, and their product, of some tokens (`model/sinks.py`)
        attention += 12 * q * min(work.tokens, TOKENS_IN_FP32)
    return whole + max(tile, attention) + sum_bytes(a, work)


def _kernel_bytes(a: Architecture, b: int) -> float:
    """Of a token, in attention's backward: queries' gradients in fp32, and keys' and values' of every head."""
    q = a.heads * a.head_dim
    found = 4 * (q + a.heads) + (2 * b * q if a.kv_heads < a.heads else 0)
    return found + b * q if a.sinks else found  # the gradient times its gate


def sum_bytes(a: Architecture, work: Work) -> float:
    """Gradients of a layer's weights, which add up over tiles in fp32; of one tile they are as they come."""
    return float((work.dtype_bytes if work.tokens <= work.tile else 4) * _params(a))


def sum_traffic(a: Architecture, work: Work) -> float:
    """Bytes read and written for sums of gradients: of every tile after the first its own, and the sum in fp32.

    The gradient of the first micro-batch is kept as it came, and becomes fp32 where there are more than two.
    """
    b, n, each = work.dtype_bytes, work.passes, max(work.sum_bytes, work.dtype_bytes)
    if work.tile:
        parts = max(0.0, work.tokens / work.tile - 1) * (b + 8)
    elif n > 2 and each > b:
        parts = (b + each) + (n - 2) * (2 * each + b) + (each + 2 * b)
    else:
        parts = (n - 1) * 3 * b
    return float(parts * _params(a))


def projection_weights(a: Architecture) -> int:
    """Of a layer, those of queries, keys and values."""
    return a.hidden * (a.heads + 2 * a.kv_heads) * a.head_dim


def _params(a: Architecture) -> int:
    return sum(p.size for p in layer_parameters(a))
