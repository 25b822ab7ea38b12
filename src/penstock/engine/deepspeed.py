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
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.engine import MemoryUse, StepResult, UnitState
from penstock.engine.deepspeed_config import LEAF_MODULES, deepspeed_json, settled
from penstock.engine.deepspeed_start import can_save, start_deepspeed
from penstock.engine.native import decay_groups, mean_loss, measure_memory, module_names
from penstock.engine.packed import PackedModel
from penstock.engine.ranks import ALONE, World
from penstock.errors import Diverged, RecipeError, did_you_mean
from penstock.flow.timeline import Span, Timeline
from penstock.machine.hardware import pick_device
from penstock.model.attention import Segments
from penstock.model.decoder import Decoder
from penstock.model.loss import packed_loss
from penstock.offload.saved_tensors import SavedTensor, weight_tensors, whole
from penstock.recipe.recipe import Recipe

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_BYTES = 12
"""Of a parameter: master and moments, all fp32."""


class _PackedLoss(nn.Module):
    """What DeepSpeed wraps: our loss as a module's forward, so that its hooks see every call of every part."""

    def __init__(self, model: PreTrainedModel, decoder: Decoder) -> None:
        super().__init__()
        self.model = model
        self._decoder = decoder

    def forward(self, batch: MicroBatch, segments: Segments) -> Tensor:
        return packed_loss(
            self._decoder, batch.input_ids, batch.position_ids, segments, batch.target_index, batch.targets
        )


class DeepSpeedEngine:
    """One rank of ZeRO-3."""

    rows_on_ranks = False

    def __init__(
        self, model: PreTrainedModel, recipe: Recipe, say: Callable[[str], None], world: World = ALONE
    ) -> None:
        recipe = settled(recipe)
        self.model, self._recipe, self._say, self._world = model, recipe, say, world
        self._device = world.pick(pick_device(recipe.device))
        self._timeline = Timeline(self._device)
        self._cores = os.sched_getaffinity(0)
        config = deepspeed_json(recipe, world)
        deepspeed = start_deepspeed(self._device, world)
        packed = PackedModel(model, recipe, say)
        names = module_names(model)
        # Of units and parameters the names only: the parameters themselves would outlive `release`.
        by_parameter = {parameter: name for name, parameter in model.named_parameters()}
        self._units = [(names[u.module], [by_parameter[p] for p in u.parameters]) for u in packed.decoder.units]
        # Before weights are cut, since they lose the number of dimensions that tells which decay.
        groups = [group for group in decay_groups(model, recipe.weight_decay) if group["params"]]
        if leaves := leaf_classes(model, recipe):
            deepspeed.utils.set_z3_leaf_modules(model, leaves)
        dtype = torch.bfloat16 if recipe.dtype == "bf16" else torch.float32
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        # Cut before `initialize`, which would put the whole model on the GPU first. Every rank takes rank 0's weights.
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=dtype, **_remote(recipe))
        for module in model.modules():
            module._buffers = {n: None if b is None else b.to(self._device) for n, b in module._buffers.items()}
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
        loss = _PackedLoss(model, packed.decoder)
        self.engine: Any = deepspeed.initialize(model=loss, optimizer=optimizer, config=config)[0]
        self._zero: Any = self.engine.optimizer
        self._loss = torch.zeros((), device=self._device)
        self._steps = torch.zeros(1, dtype=torch.int64)
        if can_save(recipe):
            self._make_state()
        say(self._describe())

    def _describe(self) -> str:
        """Where the state is, in one line."""
        state = self._state_bytes()
        ranks = f"rank {self._world.rank} of {self._world.size}: " if self._world.many else ""
        return (
            f"{ranks}DeepSpeed {self._recipe.mode}, ZeRO-3, optimizer state {state['host'] / 1e9:.2f} GB on the host, "
            f"{state['gpu'] / 1e9:.2f} GB on the GPU"
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
        with self._timeline.on_device("forward"):
            loss = self._loss_sum(batch) / trained_in_step
        if self._updates_in_backward and not torch.isfinite(self._world.total(loss.detach())):
            raise self._diverged("the loss is not finite")
        with self._timeline.on_device("backward"):
            self.engine.backward(loss * self._world.size, scale_wrt_gas=False)
        self._loss += loss.detach()

    def step(self) -> StepResult:
        """Clip and update. DeepSpeed sees a norm that is not finite, and leaves weights and moments alone then."""
        with self._timeline.on_device("wait"):
            self.engine.step()
        skipped = bool(self._zero.overflow)
        if skipped and self._updates_in_backward:
            raise self._diverged("a gradient is not finite, and SuperOffload has updated weights with it")
        self._steps += not skipped
        norm = torch.as_tensor(float(self.engine.get_global_grad_norm()), device=self._device)
        result = StepResult.of(self._world.total(self._loss), norm, torch.tensor(skipped, device=self._device))
        self._loss = torch.zeros((), device=self._device)
        return result

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """Mean loss over the trained tokens of all ranks, without dropout. All must make as many forwards."""
        return mean_loss(self.engine, self._loss_sum, batches, self._device, self._world)

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
        weights = weight_tensors(self.model, dict(self._gathered()))  # takes all ranks
        groups = {"weights": weights} if self._world.first else {}
        if not can_save(self._recipe):
            return groups
        group = f"state_{self._world.rank}_of_{self._world.size}" if self._world.many else "state"
        return groups | {group: list(self._state())}

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as a whole: where it lies if it is not cut, else on rank 0's host."""
        import deepspeed

        for name, parameter in self.model.named_parameters():
            shape = parameter.ds_shape  # type: ignore[attr-defined]
            if not self._world.many and self._recipe.param_offload != "nvme":
                yield name, parameter.ds_tensor.data.view(shape)  # type: ignore[attr-defined]
                continue
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.data.cpu().clone() if self._world.first else torch.empty(0)

    def _state(self) -> Iterator[SavedTensor]:
        yield whole("steps", self._steps)
        for name, parameter in self.model.named_parameters():
            number, start, count = self._place(parameter)
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

    def _place(self, parameter: Tensor) -> tuple[int, int, int]:
        """Of this rank's part of a parameter: which flat master it is in, where it begins there, and its elements."""
        number, start, count = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return number, start, count

    def _on_host(self, number: int) -> bool:
        return bool(self._zero.subgroup_to_device[number] == "cpu")

    def _optimizer_of(self, number: int) -> Any:
        """DeepSpeed's CPUAdam, or torch's AdamW for the share on the GPU."""
        return self._zero.optimizer if self._on_host(number) else self._zero.backup_optimizer

    # --- looking on ---------------------------------------------------------------------------------------------------

    def placement(self) -> list[UnitState]:
        """This rank's part of every unit, in forward order."""
        parameters = dict(self.model.named_parameters())
        found: list[UnitState] = []
        for unit, names in self._units:
            homes: dict[str, int] = {}
            for name in names:
                number, _, count = self._place(parameters[name])
                home = "host" if self._on_host(number) else "gpu"
                homes[home] = homes.get(home, 0) + STATE_BYTES * count
            found += [UnitState(unit, home, num_bytes) for home, num_bytes in homes.items()]
        return found

    def _state_bytes(self) -> dict[str, int]:
        homes = {"host": 0, "gpu": 0}
        for number, master in self._masters():
            homes["host" if self._on_host(number) else "gpu"] += STATE_BYTES * master.numel()
        return homes

    def memory(self) -> list[MemoryUse]:
        """This rank's weights and state, and the rest. Weights on NVMe take none."""
        offload = self._recipe.param_offload
        parts: list[Tensor] = [p.ds_tensor for p in self.model.parameters() if offload != "nvme"]  # type: ignore[attr-defined]
        place = "gpu" if offload == "none" else "host"
        state = {home: num_bytes for home, num_bytes in self._state_bytes().items() if num_bytes}
        return measure_memory(self._device, sum(part.nbytes for part in parts), state, place)

    def start_timeline(self) -> None:
        """Forward, backward and the wait for the update: what DeepSpeed does beside them is not seen from here."""
        self._timeline.start()

    def stop_timeline(self) -> list[Span]:
        """Nothing is left to wait for: a step ends with its update."""
        return self._timeline.stop()

    # --- the end ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Make a plain model of rank 0's again: whole weights, no hooks, nothing of DeepSpeed.

        The model is written after this, and of SuperOffload there is nothing else: weights come first, and what
        DeepSpeed then fails at is said and not raised.
        """
        fresh = {}
        for (_, weight), parameter in zip(self._gathered(), self.model.parameters(), strict=True):
            fresh[parameter] = nn.Parameter(weight.cpu().clone() if self._world.first else weight)
        for part in (self._end_worker, self._zero.parameter_offload.destroy, self.engine.destroy):
            with self._failure_said():
                part()
        for module in self.model.modules():
            module._parameters = {name: p if p is None else fresh[p] for name, p in module._parameters.items()}
        del self.engine, self._zero
        gc.collect()
        if self._device.type == "cuda" and not self._world.many:
            torch.cuda.empty_cache()
            num_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
            if torch.cuda.mem_get_info(self._device)[0] > 1.2 * num_bytes:
                self.model.to(self._device)  # type: ignore[arg-type]

    def _end_worker(self) -> None:
        """Of SuperOffload: its process, and the cores that it took; it had left this process a tenth of them."""
        if worker := getattr(self._zero, "superoffload_cpu_optimizer", None):
            os.sched_setaffinity(0, self._cores)
            worker.close()

    @contextmanager
    def _failure_said(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, the model is worth more
            what = f"DeepSpeed did not end cleanly ({type(error).__name__}: {error})"
            self._say(f"WARNING: {what}. The trained weights are whole and are written next.")


def leaf_classes(model: nn.Module, recipe: Recipe) -> list[type[nn.Module]]:
    """The classes of the model that ZeRO-3 must gather as one: those that are known, and those of the recipe."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    for name in recipe.leaf_list:
        if name not in classes:
            what = f"the model has no module of the class {name!r}"
            raise RecipeError(what, where=f"leaf_module = {recipe.leaf_module!r}", remedy=did_you_mean(name, classes))
    return [classes[name] for name in dict.fromkeys([*LEAF_MODULES, *recipe.leaf_list]) if name in classes]


def _remote(recipe: Recipe) -> dict[str, Any]:
    return {} if recipe.param_offload == "none" else {"remote_device": recipe.param_offload, "pin_memory": True}
