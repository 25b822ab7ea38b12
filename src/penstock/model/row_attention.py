"""Attention over rows of one length, for which torch has faster kernels than for segments of any length.

On an H200 cuDNN's takes 0.55 of flash attention's time, forward and backward (`benchmarks/attention.py`); torch prefers
it there. cuDNN's own kernel for segments was rejected: torch builds its plan anew in every call (50 ms), and with fewer
key than query heads its gradients are wrong.

cuDNN's kernel is called as one operation that always hands it tensors that lie token by token. torch keeps a plan of
backward for the shapes and strides of queries, keys and values, whatever those of the result and of its gradient are
(`aten/src/ATen/native/cudnn/MHA.cpp`; seen with 2.11): when one of these lies otherwise than it did in the first call,
it is read wrongly, and nothing says so. The compiler lays tensors out as it likes, and did so where attention is
computed again: gradients of queries and keys were off by 94 % (`benchmarks/attention_layouts.py`). Into an operation
of ours it does not look.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten
_ASKED_TOKENS = 256  # enough for any kernel


def attend_rows(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """Causal attention, (tokens, heads, head size) in and out; tokens are rows of `length` laid end to end."""
    q, k, v = (x.unflatten(0, (-1, length)) for x in (q, k, v))
    sizes = _sizes(q, v)
    if length > 1 and _is_cudnn(*sizes, q.dtype, q.device):
        out: Tensor = _attend(q, k, v, scale)[0]
    else:
        if _repeats(*sizes, q.dtype, q.device):
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    return out.flatten(0, 1)


def is_fast(q: Tensor, v: Tensor) -> bool:
    """Whether rows have that kernel: of queries and values, (tokens, heads, head size)."""
    return bool(_is_cudnn(*_sizes(q, v), q.dtype, q.device))


def _sizes(q: Tensor, v: Tensor) -> list[int]:
    """Heads and their sizes, of queries and of values: whole numbers to the compiler too."""
    return [int(guard_scalar(size)) for size in (*q.shape[-2:], *v.shape[-2:])]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_cudnn(heads: int, size: int, kv_heads: int, value_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch would choose cuDNN's kernel. It does not depend on the number of tokens."""
    if device.type != "cuda":
        return False
    return _choice(heads, size, kv_heads, value_size, dtype, device) == SDPBackend.CUDNN_ATTENTION.value


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _repeats(heads: int, size: int, kv_heads: int, value_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether only keys and values that are repeated, one for every query head, have a kernel.

    So it is in fp32 and with heads of more than 256 on a GPU: torch would make logits of row by row.
    """
    if heads == kv_heads:
        return False
    grouped, repeated = (_choice(heads, size, n, value_size, dtype, device) for n in (kv_heads, heads))
    return grouped == SDPBackend.MATH.value != repeated


def _choice(heads: int, size: int, kv_heads: int, value_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """The kernel that torch would choose."""
    q, k, v = (
        torch.empty(1, number, _ASKED_TOKENS, width, dtype=dtype, device=device, requires_grad=True)
        for number, width in ((heads, size), (kv_heads, size), (kv_heads, value_size))
    )
    return int(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True))


def _heads_first(x: Tensor) -> Tensor:
    """As kernels name dimensions; in memory it lies token by token."""
    return x.contiguous().transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(rows, tokens, heads, head size) in and out, and of each head and token the logarithm of its sum."""
    out, sums = _kernel(_heads_first(q), _heads_first(k), _heads_first(v), scale)
    return _tokens_first(out), sums.view(q.shape[0], q.shape[2], q.shape[1])


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows, length, heads, _ = q.shape
    return q.new_empty(rows, length, heads, v.shape[3]), q.new_empty(rows, heads, length, dtype=torch.float32)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given that of the result."""
    gradient, q, k, v, out = map(_heads_first, (gradient, q, k, v, out))
    by_q, by_k, by_v = _backward_kernel(gradient, q, k, v, out, sums.contiguous(), scale)
    return _tokens_first(by_q), _tokens_first(by_k), _tokens_first(by_v)


def _backward_shapes(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, sums, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    return out, sums


def _backward_kernel(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed, length, sums = torch.zeros((), dtype=torch.int64, device=q.device), q.shape[2], sums.unsqueeze(-1)
    found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, out, sums, no_seed, no_seed, None, None, None, length, length, 0.0, True, scale=scale
    )
    return found


_attend = torch.library.custom_op("penstock::attend_rows", forward, mutates_args=())
_attend_backward = torch.library.custom_op("penstock::attend_rows_backward", backward, mutates_args=())


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    by_q, by_k, by_v = _attend_backward(gradient, *ctx.saved_tensors, ctx.scale)
    return by_q, by_k, by_v, None


_attend.register_fake(_forward_shapes)
_attend.register_autograd(_gradients, setup_context=_save)
_attend_backward.register_fake(_backward_shapes)

ATTEND_ROWS = torch.ops.penstock.attend_rows.default
"""The operation, as it is named in graphs."""
