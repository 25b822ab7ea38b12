"""The `deepspeed` engine: the reference's ZeRO-3 with CPU offload, and what the reference leaves out.

DeepSpeed gets a module whose forward is our loss of packed rows, so its hooks gather and release weights around the
same arithmetic that the native engine runs. Learning rate and decay reach both of its optimizers, the one on the host
and the one on the GPU, every step. Micro-batches weigh what they have of trained tokens, over all ranks.

Checkpoints are ours, not DeepSpeed's: its own are pickles, and leave out the moments of the share that is on the GPU.
Weights, masters and moments are written from where they lie in its flat buffers. SuperOffload's moments lie in a worker
process that nobody can ask for them, so such a run saves nothing, and says so before it starts.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.engine import StepResult
from penstock.engine.deepspeed_config import LEAF_MODULES, deepspeed_json
from penstock.engine.deepspeed_start import can_save, rank_device, start_deepspeed
from penstock.engine.native import PackedModel, decay_groups
from penstock.engine.ranks import find_world
from penstock.errors import Diverged
from penstock.model.attention import Segments
from penstock.model.loss import packed_loss
from penstock.model.units import Units
from penstock.offload.state import SavedTensor, whole
from penstock.recipe import Recipe

MOMENTS = ("exp_avg", "exp_avg_sq")


class _PackedLoss(nn.Module):
    """What DeepSpeed wraps: our loss as a module's forward, so that its hooks see every call of every part."""

    def __init__(self, model: PreTrainedModel, units: Units) -> None:
        super().__init__()
        self.model = model
        self._units = units

    def forward(self, batch: MicroBatch, segments: Segments) -> Tensor:
        return packed_loss(
            self._units, batch.input_ids, batch.position_ids, segments, batch.target_index, batch.targets
        )


class DeepSpeedEngine:
    """One rank of ZeRO-3."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.model, self._recipe = model, recipe
        self.world = find_world()
        self._device = rank_device(recipe, self.world)
        self._cores = os.sched_getaffinity(0)
        config = deepspeed_json(recipe, self.world)
        deepspeed = start_deepspeed(recipe, self._device, self.world)
        packed = PackedModel(model, recipe)
        # Before weights are cut, since they lose the number of dimensions that tells which decay.
        groups = [group for group in decay_groups(model, recipe.weight_decay) if group["params"]]
        if leaves := {type(module) for module in model.modules() if type(module).__name__ in LEAF_MODULES}:
            deepspeed.utils.set_z3_leaf_modules(model, list(leaves))
        dtype = torch.bfloat16 if recipe.dtype == "bf16" else torch.float32
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        # Cut before `initialize`, which would put the whole model on the GPU first. Every rank takes rank 0's weights.
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=dtype, **_remote(recipe))
        for module in model.modules():
            module._buffers = {n: None if b is None else b.to(self._device) for n, b in module._buffers.items()}
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
        loss = _PackedLoss(model, packed.units)
        self.engine: Any = deepspeed.initialize(model=loss, optimizer=optimizer, config=config)[0]
        self._zero: Any = self.engine.optimizer
        self._loss = torch.zeros((), device=self._device)
        self._steps = torch.zeros(1, dtype=torch.int64)
        if can_save(recipe):
            self._make_state()
        say(self._describe())

    def _describe(self) -> str:
        """Where the state is, in one line."""
        host = sum(master.numel() for number, master in self._masters() if self._on_host(number))
        total = sum(master.numel() for _, master in self._masters())
        return (
            f"DeepSpeed {self._recipe.mode}, ZeRO-3 on {self.world.size} ranks: optimizer state of this rank "
            f"{12 * host / 1e9:.2f} GB on the host, {12 * (total - host) / 1e9:.2f} GB on the GPU"
        )

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self, lr: float) -> None:
        """Set the learning rate, also of the optimizer for the GPU's share: DeepSpeed copies it once and forgets it."""
        for optimizer in (self._zero.optimizer, getattr(self._zero, "backup_optimizer", None)):
            for group in optimizer.param_groups if optimizer else ():
                group["lr"] = lr

    def accumulate(self, batch: MicroBatch, trained_in_step: int, *, last: bool) -> None:
        """Forward and backward; gradients are averaged over ranks, so that a sum needs the factor."""
        self.engine.set_gradient_accumulation_boundary(last)
        loss = self._loss_sum(batch) / trained_in_step
        if self._updates_in_backward and not torch.isfinite(self.world.total(loss.detach())):
            raise self._diverged("the loss is not finite")
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)
        self._loss += loss.detach()

    def step(self) -> StepResult:
        """Clip and update. DeepSpeed sees a norm that is not finite, and leaves weights and moments alone then."""
        self.engine.step()
        skipped = bool(self._zero.overflow)
        if skipped and self._updates_in_backward:
            raise self._diverged("a gradient is not finite, and SuperOffload has updated weights with it")
        self._steps += not skipped
        norm = torch.as_tensor(float(self.engine.get_global_grad_norm()), device=self._device)
        result = StepResult.of(self.world.total(self._loss), norm, torch.tensor(skipped, device=self._device))
        self._loss = torch.zeros((), device=self._device)
        return result

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """Mean loss over the trained tokens; ranks take turns, and all make the same number of forwards."""
        self.engine.eval()
        total, left, world = torch.zeros(2, dtype=torch.float64, device=self._device), iter(batches), self.world.size
        while turn := list(itertools.islice(left, world)):
            own = self.world.rank < len(turn)
            batch = turn[self.world.rank if own else 0]  # a rank with nothing left helps to gather, and does not count
            loss = self._loss_sum(batch)
            total += own * torch.tensor([float(loss), batch.num_trained], dtype=torch.float64, device=self._device)
        self.engine.train()
        loss_sum, trained = self.world.total(total).tolist()
        return float(loss_sum / trained)

    def _loss_sum(self, batch: MicroBatch) -> Tensor:
        batch = batch.to(self._device)
        loss: Tensor = self.engine(batch, Segments.of(batch.boundaries, self._device))
        return loss

    @property
    def _updates_in_backward(self) -> bool:
        """SuperOffload without clipping: weights have changed before anyone knows the norm."""
        return self._recipe.mode == "superoffload" and not self._recipe.max_grad_norm

    def _diverged(self, what: str) -> Diverged:
        remedy = "Lower --lr or lengthen --warmup. With --max-grad-norm 1 such a step is skipped and nothing is lost."
        return Diverged(what, where=f"step {int(self._steps) + 1}", remedy=remedy)

    # --- saving -------------------------------------------------------------------------------------------------------

    def saved_tensors(self) -> dict[str, list[SavedTensor]]:
        """On one rank every tensor where it lies. Of several, the first has gathered weights, and each its own state.

        Weights are gathered so that a checkpoint's model can be exported without DeepSpeed; nothing reads them back.
        """
        groups = {"weights": self._weights()} if self.world.first or not self.world.many else {}
        if self.world.many and not groups:
            self._weights()  # takes part in gathering
        if not can_save(self._recipe):
            return groups
        group = "state" if not self.world.many else f"state_{self.world.rank}_of_{self.world.size}"
        return groups | {group: list(self._state())}

    def _weights(self) -> list[SavedTensor]:
        lasting = self.model.state_dict().keys()
        buffers = [whole(name, buffer) for name, buffer in self.model.named_buffers() if name in lasting]
        return [whole(name, weight) for name, weight in self._gathered()] + buffers

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as a whole: where it lies if it is not cut, else on rank 0's host."""
        import deepspeed

        for name, parameter in self.model.named_parameters():
            shape = parameter.ds_shape  # type: ignore[attr-defined]
            if not self.world.many and self._recipe.param_offload != "nvme":
                yield name, parameter.ds_tensor.data.view(shape)  # type: ignore[attr-defined]
                continue
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.data.cpu().clone() if self.world.first else torch.empty(0)

    def _state(self) -> Iterator[SavedTensor]:
        yield whole("steps", self._steps)
        for name, parameter in self.model.named_parameters():
            number, start, count = self._zero.grad_position[self._zero.get_param_id(parameter)]
            master = self._zero.fp32_partitioned_groups_flat[number]
            own = self._optimizer_of(number).state[master]
            for part, flat in (("master", master), *((moment, own[moment]) for moment in MOMENTS)):
                yield whole(f"{name}.{part}", flat.detach()[start : start + count])

    def restored(self) -> None:
        """Steps to where both optimizers look for them, and weights from their masters."""
        for number, master in self._masters():
            own, steps = self._optimizer_of(number).state[master], int(self._steps)
            own["step"] = steps if self._on_host(number) else torch.tensor(float(steps))
            self._zero.fp16_partitioned_groups_flat[number].data.copy_(master.data)
            self._zero._unflatten_partitioned_parameters(number)
        self._replay_steps()
        if kept := self._zero.persistent_parameters:  # small weights that every rank keeps whole
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    def _replay_steps(self) -> None:
        """Take CPUAdam through the steps that were made, on one element that nobody uses.

        It multiplies powers of the betas up in fp32 from step to step, and a jump would compute them afresh: resumed
        weights then differ in most elements (measured: by 1.1e-5 after four steps of the demo).
        """
        adam, group = self._zero.optimizer, self._zero.optimizer.param_groups[0]
        rest = (group["lr"], *group["betas"], group["eps"], 0.0, group["bias_correction"])
        unused = [torch.zeros(1) for _ in range(4)]
        for step in range(1, int(self._steps) + 1):
            adam.ds_opt_adam.adam_update(adam.opt_id, step, *rest, *unused)

    def _make_state(self) -> None:
        """Moments, which both optimizers would make in their first step: a resumed run must have where to read to."""
        for number, master in self._masters():
            own = self._optimizer_of(number).state[master]
            own["step"] = 0 if self._on_host(number) else torch.tensor(0.0)
            own |= {moment: torch.zeros_like(master.data) for moment in MOMENTS}

    def _masters(self) -> Iterator[tuple[int, Tensor]]:
        yield from enumerate(self._zero.fp32_partitioned_groups_flat)

    def _on_host(self, number: int) -> bool:
        return bool(self._zero.subgroup_to_device[number] == "cpu")

    def _optimizer_of(self, number: int) -> Any:
        """DeepSpeed's CPUAdam, or torch's AdamW for the share on the GPU."""
        return self._zero.optimizer if self._on_host(number) else self._zero.backup_optimizer

    # --- the end ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Make a plain model of rank 0's again: whole weights, no hooks, nothing of DeepSpeed."""
        fresh = {}
        for (_, weight), parameter in zip(self._gathered(), self.model.parameters(), strict=True):
            fresh[parameter] = nn.Parameter(weight.cpu().clone() if self.world.first else weight)
        if self._recipe.mode == "superoffload":
            self._zero.superoffload_cpu_optimizer.close()
            os.sched_setaffinity(0, self._cores)  # it had left this process a tenth of them
        self.engine.destroy()
        for module in self.model.modules():
            module._parameters = {name: p if p is None else fresh[p] for name, p in module._parameters.items()}
        del self.engine, self._zero
        gc.collect()
        if self._device.type == "cuda" and not self.world.many:
            torch.cuda.empty_cache()
            num_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
            if torch.cuda.mem_get_info(self._device)[0] > 1.2 * num_bytes:
                self.model.to(self._device)  # type: ignore[arg-type]


def _remote(recipe: Recipe) -> dict[str, Any]:
    return {} if recipe.param_offload == "none" else {"remote_device": recipe.param_offload, "pin_memory": True}
