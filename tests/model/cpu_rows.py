"""A CPU's kernels of attention in the place of cuDNN's, which only a GPU has."""

import torch

_aten = torch.ops.aten


def kernel(q, k, v, scale):
    """As `row_attention._kernel`: heads first; keys and values may be fewer."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return torch.empty_like(q).copy_(out), sums.contiguous()


def backward_kernel(gradient, q, k, v, out, sums, scale):
    """As `row_attention._backward_kernel`."""
    long = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    by_q, *others = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, *long, out, sums, 0.0, True, scale=scale
    )
    by_k, by_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in others)
    return by_q, by_k, by_v
