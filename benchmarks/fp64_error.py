"""How far AdamW is from fp64 after 200 steps: OffloadAdamW beside torch's (one tensor at a time, foreach, fused).

    python benchmarks/fp64_error.py            # the table of docs/numerics.md

All of them get the same gradients, given micro-batch by micro-batch and already rounded to the weights' type, so that
only what an optimizer does with them is measured: adding them up, the update, and how the weight is kept. The error is
that of the weights, relative to how far they have moved: |w - w64| / |w64 - start|. Gradients have a mean that is a
tenth of their spread. Nothing is clipped.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from penstock import OffloadAdamW

STEPS, SIZE = 200, 20_000
TORCH = {"one by one": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SETTINGS = [(1e-3, 0.01), (1e-5, 0.0), (1e-5, 0.01), (1e-5, 0.1), (1e-6, 0.01)]
"""Learning rate and weight decay."""


class Weights(nn.Module):
    """A model whose gradient is what it is called with."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())

    def forward(self, gradient: Tensor) -> Tensor:
        """Their product."""
        return (self.weight * gradient).sum()


def gradients(step: int, micro_batches: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    mean = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)) * 1e-4
    return [(mean + 1e-3 * torch.randn(SIZE, generator=generator)).to(dtype) for _ in range(micro_batches)]


def trained(name: str, start: Tensor, micro_batches: int, lr: float, decay: float) -> tuple[Tensor, Tensor]:
    """The weights after all steps, and the masters, which are the weights themselves where there are none."""
    exact = name == "fp64"
    model = Weights(start.double() if exact else start)
    if name == "OffloadAdamW":
        optimizer: torch.optim.Optimizer = OffloadAdamW(model, lr=lr, weight_decay=decay, max_grad_norm=1e30)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, **TORCH.get(name, {}))
    for step in range(STEPS):
        found = gradients(step, micro_batches, start.dtype)
        for number, gradient in enumerate(found):
            waits = isinstance(optimizer, OffloadAdamW) and number < len(found) - 1
            with optimizer.accumulate() if waits else nullcontext():  # type: ignore[attr-defined]
                model(gradient.double() if exact else gradient).backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = master = model.weight.detach().double()
    if isinstance(optimizer, OffloadAdamW):
        optimizer.synchronize()
        master = optimizer.state_dict()["state"][0]["master"].double()
    return weight, master


def errors(dtype: torch.dtype, micro_batches: int, lr: float, decay: float) -> dict[str, float]:
    """Of the weights of each, and of our masters."""
    start = (torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    exact, _ = trained("fp64", start, micro_batches, lr, decay)
    found = {}
    for name in ("OffloadAdamW", *TORCH):
        weight, master = trained(name, start, micro_batches, lr, decay)
        found[name] = float((weight - exact).norm() / (exact - start.double()).norm())
        if name == "OffloadAdamW":
            found["masters"] = float((master - exact).norm() / (exact - start.double()).norm())
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| weights | micro-batches | lr | decay | ours | our masters | torch, one by one | foreach | fused |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dtype, micro_batches, (lr, decay) in itertools.product((torch.float32, torch.bfloat16), (1, 16), SETTINGS):
        values = [f"{value:.3e}" for value in errors(dtype, micro_batches, lr, decay).values()]
        row = [str(dtype).removeprefix("torch."), str(micro_batches), f"{lr:g}", f"{decay:g}", *values]
        print("|", " | ".join(row), "|", flush=True)
