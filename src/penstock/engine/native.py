"""The native engine: forward and backward of packed rows under `OffloadAdamW`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.engine import MemoryUse, StepResult, UnitState
from penstock.engine.layerwise import LayerByLayer
from penstock.engine.packed import PackedModel
from penstock.engine.parked import ParkedInputs, saved_inputs
from penstock.engine.ranks import ALONE, World
from penstock.engine.trial import try_once, with_examples
from penstock.engine.weights import StreamedWeights, layer_by_layer, stream_weights
from penstock.errors import DoesNotFit
from penstock.flow.timeline import Span
from penstock.flow.transfers import link_of
from penstock.machine.hardware import pick_compile
from penstock.model.attention import VARLEN
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.behaviour import Behaviour, update_time
from penstock.offload.dtensors import is_streamed, local
from penstock.offload.placing import place
from penstock.offload.saved_tensors import SavedTensor, state_tensors, weight_tensors
from penstock.offload.trained import find_trained
from penstock.plan.job import LONG_ROW, TILES
from penstock.plan.layout import FORMATS
from penstock.plan.split import Manner
from penstock.recipe.lists import parse_homes
from penstock.recipe.recipe import Recipe, inputs_every, tile_tokens
from penstock.update.master import round_to_bf16_


class NativeEngine:
    """One device, or this rank's device among several (`fsdp.py` has then left it its rows of each weight)."""

    optimizer: OffloadAdamW

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        say: Callable[[str], None],
        world: World = ALONE,
        remainders: Mapping[nn.Parameter, Tensor] | None = None,
        device: torch.device | None = None,
        examples: int = 1,
    ) -> None:
        """`device`: where a model computes whose weights are in host memory, to be streamed.

        `examples`: the most that a micro-batch has.
        """
        self.model, self._recipe, self._world, self.rows_on_ranks = model, recipe, world, world.many
        # First of all: what is compiled, and what the trial takes, depends on the precision that is trained in.
        if recipe.dtype == "bf16":
            remainders = {**(remainders or {}), **round_to_bf16_(p for p in model.parameters() if p.requires_grad)}
        self._weights = stream_weights(model, recipe, device, world)
        one_by_one = layer_by_layer(recipe) and not world.many
        self.packed = PackedModel(model, recipe, say, one_by_one=one_by_one)
        link = link_of(self.packed.device)
        self._layerwise = None
        if one_by_one:
            inputs = saved_inputs(self.packed, recipe, link)
            every = inputs_every(recipe.inputs)
            weights = self._weights if isinstance(self._weights, StreamedWeights) else None
            self._layerwise = LayerByLayer(self.packed, weights, inputs, link.streams.timeline, every)
            if isinstance(inputs, ParkedInputs):
                say(f"{inputs.arena.num_bytes / 1e9:,.2f} GB of host memory for inputs that are parked")
        behaviour = Behaviour(
            recipe.max_grad_norm,
            recipe.states,
            recipe.update if recipe.mode == "superoffload" else "after-norm",
            overlap=recipe.mode == "superoffload",
        )
        in_backward = update_time(behaviour) == "in-backward"
        manner = Manner(in_backward, behaviour.overlap, world.many, recipe.accumulate_dtype)
        with self._memory_explained():
            profile = try_once(self.packed, recipe, world, manner, self._layerwise)
        if model.config._attn_implementation == VARLEN:
            profile = with_examples(profile, model.config, examples)
        if self.packed.device.type == "cuda":
            torch.cuda.empty_cache()  # or state would lie in the middle of what activations need in one piece
        if profile.activation_bytes and profile.kept_bytes:
            if pick_compile(recipe, self.packed.device):
                say(f"layers compiled in {profile.start_seconds:.1f} s; what was made is kept for the next run")
            say(f"a micro-batch: {profile.activation_bytes / 1e9:.1f} GB of activations, with gradients "
                f"{profile.kept_bytes / 1e9:.1f} GB; {profile.forward_seconds:.3f} s forward, "
                f"{profile.backward_seconds:.3f} s backward")  # fmt: skip
        homes: Any = parse_homes(recipe.homes) if recipe.mode == "superoffload" else "host"
        groups, layers = decay_groups(model, recipe.weight_decay), self.packed.decoder.layers
        placement = place(
            find_trained(model, groups, layers),
            FORMATS[recipe.states],
            homes,
            profile,
            manner,
            cpu_adam_cores=recipe.cpu_adam_cores,
            remedy=for_long_rows(recipe, world.size),
        )
        self.optimizer = OffloadAdamW(
            model,
            lr=recipe.lr,
            betas=recipe.betas,
            eps=recipe.eps,
            max_grad_norm=recipe.max_grad_norm,
            params=groups,
            states=recipe.states,
            homes=placement,
            update=behaviour.update,
            overlap=behaviour.overlap,
            units=layers,
            accumulate_dtype=recipe.accumulate_dtype,
        )
        self.optimizer.take_remainders(remainders or {})
        if self._weights is not None:
            say(self._weights.describe())
        if isinstance(self._weights, StreamedWeights):
            self._weights.updated = self._settle
        of_rank = f"rank {world.rank} of {world.size}: " if world.many else ""
        for line in (self.optimizer.describe_host_memory(), self.optimizer.describe()):
            if line:
                say(f"{of_rank}{line}")
        self._loss = torch.zeros((), device=self.packed.device)
        self._batches: list[MicroBatch] = []  # of a step whose micro-batches go through the layers together
        if self.packed.device.type == "cuda":
            _look_for_no_garbage()

    def begin(self, lr: float) -> None:
        """Set the learning rate of the step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def accumulate(self, batch: MicroBatch, trained_in_step: int, *, last: bool) -> None:
        """Forward and backward; the gradients of the last micro-batch are final."""
        if self._layerwise is not None:
            self._batches.append(batch)
            if not last and self._recipe.order != "rows":
                return
            batches, self._batches = self._batches, []
            with self._memory_explained():
                held = self.optimizer.accumulate
                self._loss += self._layerwise.run(batches, trained_in_step, held, last=last, done=self._finish)
            return
        with self._memory_explained():
            with self.optimizer.timeline.on_device("forward"):
                loss = self.packed.loss_sum(batch) / trained_in_step
            with nullcontext() if last else self.optimizer.accumulate(), self.optimizer.timeline.on_device("backward"):
                loss.backward()
            self._loss += loss.detach()

    def _settle(self, layer: nn.Module) -> None:
        """In a thread: the weights of a layer are those of the last step, where they live."""
        if (unit := self.optimizer.unit_of(layer)) is not None:
            unit.settle()

    def _finish(self, layer: nn.Module) -> None:
        """The gradients of a layer are final, while its weights are on the device."""
        if (unit := self.optimizer.unit_of(layer)) is not None:
            self.optimizer.finish_gradients(unit)

    def step(self) -> StepResult:
        """Enqueue the update."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        report = self.optimizer.report
        assert report is not None, "a step follows at least one micro-batch"
        result = StepResult.of(self._world.total(self._loss), report.grad_norm, ~report.applied)
        self._loss = torch.zeros((), device=self.packed.device)
        return result

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """Mean loss over the trained tokens of all ranks, without dropout."""
        with self._memory_explained():
            return mean_loss(self.model, self.packed.loss_sum, batches, self.packed.device, self._world)

    def saved_tensors(self) -> dict[str, list[SavedTensor]]:
        """Weights, frozen ones and lasting buffers too, and the state of those that are trained."""
        self.optimizer.synchronize()
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {"weights": weight_tensors(self.model), "state": state_tensors(self.optimizer, names)}

    def restored(self) -> None:
        """Let the homes see the new weights."""
        self.optimizer.restored()
        if self._weights is not None:
            self._weights.forget()

    def placement(self) -> list[UnitState]:
        """Units under the names of their modules, in forward order."""
        names = module_names(self.model)
        return [
            UnitState(names[module], home, num_bytes)
            for module, homes in self.optimizer.unit_bytes()
            for home, num_bytes in homes.items()
        ]

    def memory(self) -> list[MemoryUse]:
        """Weights, state by home, and the rest: of the GPU's peak, and of what this process holds."""
        weights = sum(local(p).nbytes for p in self.model.parameters())
        others: list[MemoryUse] = []
        if self._weights is not None:
            weights -= sum(local(p).nbytes for p in self._weights.parameters)
            beside = "gpu" if self.packed.device.type == "cuda" else "host"
            if isinstance(self._weights, StreamedWeights):
                others.append(MemoryUse(beside, "slots of weights", self._weights.slot_bytes))
            others.append(MemoryUse("host", "streamed weights", self._weights.num_bytes))
        if self._layerwise is not None and isinstance(self._layerwise.inputs, ParkedInputs):
            others.append(MemoryUse("host", "parked inputs", self._layerwise.inputs.arena.num_bytes))
        return measure_memory(self.packed.device, weights, self.optimizer.state_bytes(), others=others)

    def start_timeline(self) -> None:
        """Begin with everything made."""
        self.optimizer.synchronize()
        self.optimizer.timeline.start()

    def stop_timeline(self) -> list[Span]:
        """Threads that still gave work to the lanes would be cut off in the middle, so they are waited for."""
        self.optimizer.synchronize()
        return self.optimizer.timeline.stop()

    @contextmanager
    def _memory_explained(self) -> Iterator[None]:
        """Out of GPU memory: what takes it, and what to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            parts = {
                "weights": sum(local(p).nbytes for p in self.model.parameters() if not is_streamed(p)),
                "gradients": sum(local(p.grad).nbytes for p in self.model.parameters() if p.grad is not None),
            }
            if hasattr(self, "optimizer"):  # not yet in the trial
                parts["resident state"] = self.optimizer.state_bytes().get("gpu", 0)
            if self.packed.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.packed.device)
                parts["activations and the rest"] = max(0, peak - sum(parts.values()))
            raise out_of_memory(parts, self._recipe, self._world.size) from error

    def release(self) -> None:
        """Let the last updates finish, then give state back."""
        self.optimizer.close()
        gc.unfreeze()  # what dies from here on can be found again
        if self._layerwise is not None:
            self._layerwise.inputs.close()
        self.packed.compute_in("bf16")  # the model answers and is exported as whoever loads it will compute
        if isinstance(self._weights, StreamedWeights):  # through the same slots
            self._weights.updated = lambda module: None

    def drop_weights(self) -> None:
        """Give back what weights stream through, after `release`: nobody calls the model any more."""
        if self._weights is not None:
            self._weights.close()


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """What a person would call the parts of a model."""
    return {module: name.removeprefix("model.") or "model" for name, module in model.named_modules()}


def mean_loss(
    model: nn.Module,
    loss_sum: Callable[[MicroBatch], Tensor],
    batches: Iterable[MicroBatch],
    device: torch.device,
    world: World,
) -> float:
    """Mean loss over the trained tokens that all ranks have, without dropout."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses and of trained tokens
    for batch in batches:
        sums[0] += loss_sum(batch)
        sums[1] += batch.num_trained
    model.train()
    total, trained = world.total(sums)
    return float(total / trained)


def measure_memory(
    device: torch.device,
    weights: int,
    state: Mapping[str, int],
    weights_at: str = "gpu",
    others: Iterable[MemoryUse] = (),
) -> list[MemoryUse]:
    """Weights, state by home, and the rest: of the GPU's peak, and of what this process holds."""
    cuda = device.type == "cuda"
    beside = "gpu" if cuda else "host"
    uses = [MemoryUse(beside if weights_at == "gpu" else "host", "weights", weights), *others]
    names = {} if cuda else {"gpu": "state: beside the weights"}  # there is no GPU that it could be on
    uses += [
        MemoryUse(beside if home == "gpu" else "host", names.get(home, f"state: {home}"), size)
        for home, size in state.items()
    ]

    def rest(place: str, total: int) -> int:
        return max(0, total - sum(part.num_bytes for part in uses if part.place == place))

    if cuda:
        peak = torch.cuda.max_memory_allocated(device)
        uses.append(MemoryUse("gpu", "gradients, activations", rest("gpu", peak)))
    uses.append(MemoryUse("host", "this process, the rest", rest("host", psutil.Process().memory_info().rss)))
    return uses


def out_of_memory(parts: dict[str, int], recipe: Recipe, ranks: int) -> DoesNotFit:
    """An error with the largest parts and the cheapest changes first."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    held = ", ".join(f"{name} {num_bytes / 2**30:.1f} GiB" for name, num_bytes in largest if num_bytes)
    rows, for_long = recipe.rows_on(ranks), for_long_rows(recipe, ranks)
    changes = [
        (recipe.homes not in ("auto", "stream", "host"), "--homes auto"),
        (rows > 1, f"--micro-batch-size {rows // 2}"),
        (recipe.recompute != "full", "--recompute full"),
        (recipe.mode == "superoffload" and recipe.weights != "streamed", "--weights streamed --recompute full"),
        (recipe.states == "fp32", "--states bf16"),
        (bool(for_long), for_long),
        (True, f"--max-length {recipe.max_length // 2}"),
    ]
    return DoesNotFit(
        f"the GPU is out of memory with {rows} rows of {recipe.max_length} tokens at once: {held}",
        where=recipe.name,
        remedy=f"Try {', or '.join(flag for useful, flag in changes if useful)}.",
    )


def for_long_rows(recipe: Recipe, ranks: int) -> str:
    """The flags, of those not given yet, with which long rows take least of one GPU."""
    if ranks > 1 or recipe.max_length < LONG_ROW:
        return ""
    row_by_row = not layer_by_layer(recipe)
    flags = [
        (row_by_row, "--order layers"),
        (row_by_row and recipe.recompute not in ("auto", "full"), "--recompute full"),
        (not recipe.inputs.startswith("parked"), "--inputs parked"),
        (not tile_tokens(recipe) and recipe.attention in ("auto", "varlen"), f"--tile {TILES[0]}"),
    ]
    return " ".join(flag for useful, flag in flags if useful)


def _look_for_no_garbage() -> None:
    """What there is now stays, so that Python need not look through it for garbage in the middle of a step.

    It took 0.3 s on an H200's host, once in a few steps. No thread runs meanwhile, and where weights stream the host is
    not far enough ahead of the device for that.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms, biases and attention sinks do not. Biases of experts are matrices, so names count too."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        (plain if p.ndim < 2 or name.endswith("bias") else decayed).append(p)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
