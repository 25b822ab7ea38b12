"""The native engine: forward and backward of packed rows under `OffloadAdamW`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.engine import StepResult
from penstock.model.attention import Segments, use_attention
from penstock.model.loss import packed_loss
from penstock.model.recompute import set_recompute
from penstock.model.units import find_units
from penstock.offload.optimizer import OffloadAdamW
from penstock.recipe import Recipe


class NativeEngine:
    """One device."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        self.model = model
        self.units = find_units(model)
        self.device = next(model.parameters()).device
        use_attention(model, recipe.attention)
        set_recompute(self.units.layers, recipe.recompute)
        model.train()
        self.optimizer = OffloadAdamW(
            model,
            lr=recipe.lr,
            betas=recipe.betas,
            eps=recipe.eps,
            max_grad_norm=recipe.max_grad_norm,
            params=decay_groups(model, recipe.weight_decay),
            units=self.units.layers,
            working_dtype=torch.bfloat16 if recipe.dtype == "bf16" else None,
        )
        # The loss reads the head's weight without calling the head, so nothing else would wait for its update.
        self.units.backbone.register_forward_hook(lambda *_: self.optimizer.wait_for(self.units.head))
        self._loss = torch.zeros((), device=self.device)

    def accumulate(self, batch: MicroBatch, trained_in_step: int, *, last: bool) -> None:
        """Forward and backward; the gradients of the last micro-batch are final."""
        loss = self._loss_sum(batch) / trained_in_step
        with nullcontext() if last else self.optimizer.accumulate():
            loss.backward()  # type: ignore[no-untyped-call]
        self._loss += loss.detach()

    def step(self, lr: float) -> StepResult:
        """Enqueue the update."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        report = self.optimizer.report
        assert report is not None, "a step follows at least one micro-batch"
        result = StepResult(self._loss, report.grad_norm, ~report.taken, report.done)
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
        """Let the last updates finish, then give state back."""
        self.optimizer.close()

    def _loss_sum(self, batch: MicroBatch) -> Tensor:
        batch = batch.to(self.device)
        segments = Segments.of(batch.boundaries, self.device)
        return packed_loss(self.units, batch.input_ids, batch.position_ids, segments, batch.target_index, batch.targets)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms, biases and attention sinks do not. Biases of experts are matrices, so names count too."""
    decayed, plain = [], []
    for name, p in model.named_parameters():
        (plain if p.ndim < 2 or name.endswith("bias") else decayed).append(p)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
