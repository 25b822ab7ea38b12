"""Attention kernels over packed rows: flash attention 2 of torch against cuDNN, how fast, how exact, cost of a packing.

    OUT=out python benchmarks/attention.py

Rows of 4096 tokens, heads as in llama-8b. Prints one JSON line a case and appends them to $OUT/attention.jsonl.
"""

import itertools
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

HEADS, KEY_HEADS, HEAD_DIM, LENGTH = 32, 8, 128, 4096
OUT = Path(os.environ.get("OUT", "."))


def flash(q, k, v, offsets, longest):
    return varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0))


class Cudnn(torch.autograd.Function):
    """cuDNN's kernel for segments of any length."""

    @staticmethod
    def forward(ctx, q, k, v, offsets, longest):
        """All segments at once."""
        result = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, offsets, offsets, longest, longest, True, 0.0, True, False
        )
        out, lse, seed, offset = result[0], result[1], result[6], result[7]
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, offsets)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx, grad):
        """Gradients of queries, keys and values."""
        q, k, v, out, lse, seed, offset, offsets = ctx.saved_tensors
        grads = torch.ops.aten._cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, offsets, offsets, ctx.longest, ctx.longest, 0.0, True
        )
        return *grads, None, None


def dense(q, k, v, offsets, longest):
    """Rows of one segment each, through torch's own choice with cuDNN first."""
    rows = len(offsets) - 1
    q, k, v = (x.view(rows, longest, -1, HEAD_DIM).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(rows * longest, -1, HEAD_DIM)


KERNELS = {"flash": flash, "cudnn": Cudnn.apply, "dense": dense}


def inputs(tokens, seed=0):
    torch.manual_seed(seed)
    shapes = [(tokens, HEADS, HEAD_DIM), (tokens, KEY_HEADS, HEAD_DIM), (tokens, KEY_HEADS, HEAD_DIM)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]


def packing(rows, segments, seed=0):
    """Offsets of `rows` rows, each with `segments` segments of random lengths."""
    draw = random.Random(seed)
    ends = [0]
    for row in range(rows):
        cuts = sorted(draw.sample(range(1, LENGTH), segments - 1))
        ends += [row * LENGTH + c for c in (*cuts, LENGTH)]
    return ends


def seconds(call, repeats=10):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def speed(name, rows, segments):
    ends = packing(rows, segments)
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    longest = max(b - a for a, b in itertools.pairwise(ends))
    q, k, v = inputs(rows * LENGTH)
    kernel = KERNELS[name]
    grad = torch.randn_like(q)
    forward = seconds(lambda: kernel(q, k, v, offsets, longest))
    both = seconds(lambda: kernel(q, k, v, offsets, longest).backward(grad))
    flops = sum(4 * (b - a) ** 2 / 2 * HEADS * HEAD_DIM for a, b in itertools.pairwise(ends))
    return {
        "case": "speed", "kernel": name, "rows": rows, "segments": segments, "forward_ms": 1e3 * forward,
        "backward_ms": 1e3 * (both - forward), "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / (both - forward) / 1e12,
    }  # fmt: skip


def exact(name, ends, longest=None):
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    q, k, v = inputs(ends[-1])
    longest = longest or max(b - a for a, b in itertools.pairwise(ends))
    out = KERNELS[name](q, k, v, offsets, longest)
    grad = torch.randn_like(out)
    out.backward(grad)
    found = [out, q.grad, k.grad, v.grad]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    parts = []
    for a, b in itertools.pairwise(ends):
        if a == b:
            continue
        one, two, three = wide[0][a:b], *(x[a:b].repeat_interleave(HEADS // KEY_HEADS, 1) for x in wide[1:])
        scores = torch.einsum("qhd,khd->hqk", one, two) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones(b - a, b - a, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), three))
    truth = torch.cat(parts)
    truth.backward(grad.double())
    want = [truth, *(x.grad for x in wide)]
    errors = [float(((f.double() - w).norm() / w.norm()).detach()) for f, w in zip(found, want, strict=True)]
    return {"case": "exact", "kernel": name, "ends": ends, "longest": longest, "relative_errors": errors}


def fresh(name):
    """Seconds of a first call with another number of segments, and of the same number with other lengths."""
    q, k, v = inputs(LENGTH)
    taken = []
    for segments, seed in ((31, 1), (33, 2), (33, 3), (35, 4)):
        ends = packing(1, segments, seed)
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        longest = LENGTH
        torch.cuda.synchronize()
        start = time.perf_counter()
        KERNELS[name](q, k, v, offsets, longest).sum().backward()
        torch.cuda.synchronize()
        taken.append(round(time.perf_counter() - start, 4))
    return {"case": "new packing", "kernel": name, "segments": [31, 33, 33, 35], "seconds": taken}


def main():
    cases = []
    for name in KERNELS:
        cases += [(speed, name, 4, 1), (speed, name, 1, 1)]
        if name == "dense":
            continue
        cases += [(speed, name, 4, 20), (speed, name, 4, 4)]
        cases += [(exact, name, [0, 100, 355, 356, 512]), (exact, name, [0, 100, 355, 356, 512], 4096)]
        cases += [(exact, name, [0, 100, 355, 356, 512, 512, 512], 4096), (fresh, name)]
    for function, *words in cases:
        try:
            row = function(*words)
        except Exception as error:  # a kernel that refuses is a result
            row = {"case": function.__name__, "words": words, "error": f"{type(error).__name__}: {error}"[:300]}
        row["versions"] = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
        print(json.dumps(row), flush=True)
        with (OUT / "attention.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
