"""The native engine: forward and backward of packed rows, and AdamW with fp32 master weights.

The master is a second, fp32 copy of every bf16 weight; gradients of micro-batches are added up in fp32, so that many
small micro-batches lose nothing. A weight that is already fp32 is its own master.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.engine import StepResult
from penstock.model.attention import Segments, use_attention
from penstock.model.loss import packed_loss
from penstock.model.recompute import set_recompute
from penstock.model.units import find_units
from penstock.recipe import Recipe


class NativeEngine:
    """One device, everything resident on it."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        self.model = model
        self.units = find_units(model)
        self.device = next(model.parameters()).device
        use_attention(model, recipe.attention)
        set_recompute(self.units.layers, recipe.recompute)
        model.train()
        self._max_grad_norm = recipe.max_grad_norm
        working = torch.bfloat16 if recipe.dtype == "bf16" else torch.float32
        self._weights, self._masters = _split_masters(model, working)
        self._optimizer = torch.optim.AdamW(
            _decay_groups(self._weights, self._masters, recipe.weight_decay),
            lr=recipe.lr,
            betas=recipe.betas,
            eps=recipe.eps,
        )
        self._loss = torch.zeros((), device=self.device)

    def accumulate(self, batch: MicroBatch, trained_in_step: int, *, last: bool) -> None:
        """Forward and backward; gradients move to the fp32 masters at once, so nothing is special about the last."""
        loss = self._loss_sum(batch) / trained_in_step
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss += loss.detach()
        for (_, weight), master in zip(self._weights, self._masters, strict=True):
            if weight is not master and weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        """Clip, update the masters, round them into the working weights. A gradient that is not finite skips all."""
        gradients = [m.grad for m in self._masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        skipped = ~(torch.isfinite(norm) & torch.isfinite(self._loss))
        if not skipped:
            if self._max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(self._masters, self._max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            for (_, weight), master in zip(self._weights, self._masters, strict=True):
                if weight is not master:
                    weight.copy_(master)
        self._optimizer.zero_grad()
        result = StepResult(loss=self._loss, grad_norm=norm, skipped=skipped)
        self._loss = torch.zeros((), device=self.device)
        return result

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """Mean loss over the trained tokens, without dropout."""
        self.model.eval()
        total, trained = torch.zeros((), device=self.device), 0
        for batch in batches:
            total += self._loss_sum(batch)
            trained += batch.num_trained
        self.model.train()
        return float(total / trained)

    def release(self) -> None:
        """Drop masters and moments."""
        self._optimizer.state.clear()
        self._optimizer.param_groups.clear()
        self._masters = []

    def _loss_sum(self, batch: MicroBatch) -> Tensor:
        batch = batch.to(self.device)
        segments = Segments.of(batch.boundaries, self.device)
        return packed_loss(self.units, batch.input_ids, batch.position_ids, segments, batch.target_index, batch.targets)


def _split_masters(
    model: PreTrainedModel, working: torch.dtype
) -> tuple[list[tuple[str, nn.Parameter]], list[nn.Parameter]]:
    """Every trainable weight in the working precision, and the fp32 master of each, in the same order."""
    weights = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    masters = []
    for _, weight in weights:
        if working is torch.float32:
            masters.append(weight)
        else:
            masters.append(nn.Parameter(weight.detach().float().clone()))
            weight.data = weight.data.to(working)
    return weights, masters


def _decay_groups(
    weights: list[tuple[str, nn.Parameter]], masters: list[nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Matrices decay; norms, biases and attention sinks do not. Biases of experts are matrices, so names count too."""
    decayed, plain = [], []
    for (name, weight), master in zip(weights, masters, strict=True):
        (plain if weight.ndim < 2 or name.endswith("bias") else decayed).append(master)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
