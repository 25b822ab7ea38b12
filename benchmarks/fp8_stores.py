"""Do compiled kernels store fp8 numbers as they are where rows become columns? With every tile that the compiler tries.

    python benchmarks/fp8_stores.py

It times the tiles of a kernel and keeps the fastest, so that another run may keep another. Here each is kept in turn.
Kernels may read what others left in shared memory (`penstock.model.turned`), so a product comes before every call.
A line has, for one way to turn rows into columns, how many numbers were wrong with each tile, in rows and in columns.
"""

import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from penstock.model.fp8 import _cast
from penstock.model.turned import turned

MOST_TILES = 12


def plainly(x):
    return x.t().contiguous()


def normed(x, weight, largest, turn):
    """As before the products of an MLP that is computed again: a norm, then both."""
    wide = x.float()
    out = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    narrow = _cast(out, largest, torch.float8_e4m3fn)
    return narrow, turn(narrow)


def gated(x, gradient, largest, turn):
    """As after them in backward."""
    wide = x.float()
    out = (gradient.float() * torch.sigmoid(wide) * (1 + wide * (1 - torch.sigmoid(wide)))).to(x.dtype)
    narrow = _cast(out, largest, torch.float8_e5m2)
    return narrow, turn(narrow)


def columns_only(x, weight, largest, turn):
    return (turn(normed(x, weight, largest, plainly)[0]),)


def wrong(found, wanted):
    """Of each, how many numbers are no numbers, or off by more than the next one of their type."""

    def count(a, b):
        a, b = a.float(), b.float()
        near = (a - b).abs() <= 0.51 * torch.maximum(a.abs(), b.abs()) + 0.01
        return int((~near).sum())

    return [count(a, b) for a, b in zip(found, wanted, strict=True)]


def main():
    torch._inductor.config.force_disable_caches = True
    kept = {"tile": 0, "most": 1}

    def chosen(tuner, *args, **kwargs):
        kept["most"] = max(kept["most"], len(tuner.launchers))
        return {launcher: float(n != kept["tile"] % len(tuner.launchers)) for n, launcher in enumerate(tuner.launchers)}

    CachingAutotuner.benchmark_all_configs = chosen
    torch.manual_seed(0)
    for rows, width in ((4096, 1024), (4096, 4096), (16384, 14336)):
        x, gradient = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight, largest = torch.rand(width, device="cuda", dtype=torch.bfloat16), torch.tensor(6.0, device="cuda")
        for work, other in ((normed, weight), (columns_only, weight), (gated, gradient)):
            wanted = work(x, other, largest, plainly)
            for name, turn in (("plainly", plainly), ("turned", turned)):
                kept.update(tile=0, most=1)
                found = []
                while kept["tile"] < min(kept["most"], MOST_TILES):
                    torch._dynamo.reset()
                    compiled = torch.compile(work)
                    compiled(x, other, largest, turn)
                    x @ gradient.t()
                    found.append(wrong(compiled(x, other, largest, turn), wanted))
                    kept["tile"] += 1
                print(f"{rows:6} x {width:5} {work.__name__:12} {name:8} {found}", flush=True)


if __name__ == "__main__":
    main()
