"""Gradients of cuDNN's attention for tensors that lie otherwise in memory: token by token, head by head, and mixed.

    python benchmarks/attention_layouts.py [LENGTH ...]

The numbers are the same, so the gradients should be. They are not where only the result or its gradient lies otherwise
than in the first call: torch keeps cuDNN's plan by the strides of queries, keys and values. Compiled layers that are
computed again hand over such a result (`penstock.model.row_attention` says more, and keeps all token by token). Each
line has, for the gradients of queries, keys and values, how far they are from the first ones, and from those of flash
attention.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, SIZE = 32, 8, 128
SCALE = SIZE**-0.5
aten = torch.ops.aten


def drawn(heads, length):
    """Token by token, as projections give them: (1, heads, tokens, size), with a part that all tokens have."""
    x = torch.randn(1, length, heads, SIZE, device="cuda") + 0.5 * torch.randn(SIZE, device="cuda")
    return x.bfloat16().transpose(1, 2)


def no_stride(x):
    """Head by head; the stride of a dimension of one is anything, and the compiler writes 0."""
    x = x.contiguous()
    return x.as_strided(x.shape, (0, *x.stride()[1:]))


def cudnn(q, k, v, grad):
    out, sums, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=SCALE
    )
    length = q.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, sums, seed, offset, None, None, None, length, length, 0.0, True, scale=SCALE
    )


def flash(q, k, v, grad):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=SCALE, enable_gqa=True)
    return torch.autograd.grad(out, leaves, grad)


def off(found, wanted):
    return [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True)]


def main(*lengths):
    for length in map(int, lengths or ("4096", "32768", "131072")):
        torch.manual_seed(0)
        q, k, v, grad = (drawn(heads, length) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
        first, other = cudnn(q, k, v, grad), flash(q, k, v, grad)
        layouts = {
            "token by token": (q, k, v, grad),
            "mixed, stride 0": (no_stride(q), no_stride(k), v, grad),
            "mixed": (q.contiguous(), k.contiguous(), v, grad),
            "head by head": tuple(x.contiguous() for x in (q, k, v, grad)),
            "gradient head by head": (q, k, v, grad.contiguous()),
        }
        for name, tensors in layouts.items():
            # A kernel that reads memory it was not given would show.
            filled = torch.full((torch.cuda.mem_get_info()[0] // 4,), 1e4, device="cuda", dtype=torch.bfloat16)
            del filled
            found = cudnn(*tensors)
            for what, wanted in (("first", first), ("flash", other)):
                numbers = "  ".join(f"{x:.2e}" for x in off(found, wanted))
                print(f"{length:8,} {name:22} from {what}: q k v {numbers}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
