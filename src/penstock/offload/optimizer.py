"""OffloadAdamW: exact AdamW whose state lives where there is room, in anyone's training loop.

    optimizer = OffloadAdamW(model, lr=1e-5)
    for batch in data:
        with optimizer.accumulate():          # around every micro-batch but the last
            model(batch.first).backward()
        model(batch.last).backward()
        optimizer.step()
        optimizer.zero_grad()

Schedule `after-norm`: gradients stay until the global norm is known on the device. `step` then enqueues the updates in
forward order, and the next forward of each unit waits only for its own. Schedule `in-backward`: a unit is updated as
soon as its gradients are final, which leaves no global norm to clip by. Speculating on the norm and rolling back was
rejected: a rollback cannot restore the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.flow.lanes import Mark, Tape, ToHost, main_mark
from penstock.machine.hardware import near_cores
from penstock.offload.dtensors import check_blocks, group_of, local
from penstock.offload.homes import Coefficients, HostHome, Update
from penstock.offload.housing import Housing, round_off
from penstock.offload.misuse import (
    Changes,
    check_parameters,
    refuse_clipping,
    refuse_late_ones,
    refuse_misuse,
    refuse_other_type,
)
from penstock.offload.placing import choose_homes, need_of
from penstock.offload.prefetch import Ahead
from penstock.offload.state_dict import check_saved, read_state, write_state
from penstock.offload.units import Unit, attach, attach_to_files, find_units
from penstock.plan.layout import DEFAULT_CHUNK, HomeName
from penstock.plan.split import EARLY_SHARE
from penstock.update.formats import StateName, StateView, format_named
from penstock.update.kernels import GO
from penstock.update.norm import Norm, Scalars, clip

Schedule = Literal["after-norm", "in-backward"]


@dataclass(frozen=True)
class StepReport:
    """A step, on the device: reading a value makes the host wait."""

    grad_norm: Tensor
    """The global norm, before clipping."""
    taken: Tensor
    """False if a gradient was not finite: weights and state are then as before."""
    done: Mark


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW with an exact fp32 master for bf16 weights and state in three homes. See the module's docstring.

    - `params`: parameter groups, as torch's optimizers take them; without, all trainable parameters are one group.
    - `max_grad_norm`: gradients are scaled down to this global norm. 0: never; `schedule="auto"` is then `in-backward`.
    - `states`: `fp32` is exact; `bf16` and `int8` keep the moments in fewer bits, with stochastic rounding that depends
      on nothing but element, parameter and step, so homes and chunks stay invisible. See `formats.py`.
    - `homes`: `auto`, one home, or shares such as `{"gpu": 0.5, "stream": 0.3, "host": 0.2}`. Homes, `overlap`,
      `chunk_size` (elements) and `cpu_adam_cores` (the share of the cores near the GPU that update the home `host`) are
      questions of speed and change no bit; so are `forward_seconds` and `backward_seconds`, what can hide the updates.
    - `working_dtype`: bf16 rounds fp32 weights and keeps what they lose.
    - `activation_bytes`, `kept_bytes`: the most that forward and backward take on the GPU, without and with gradients,
      so that `homes="auto"` can fill the rest; unknown, a quarter of the GPU is left to them. `taken_after` is what is
      taken from the gradient of each parameter to the end of backward, at most and with all gradients: what it leaves
      of `kept_bytes` is room for streamed state. `accumulates` says that all gradients of one micro-batch are there
      while the next one runs.
    - `micro_batches`: backward passes in a step, for loops that cannot call `accumulate()`.
    - `units`: modules that are called as a whole, if those are not the elements of each ModuleList.
    - `remainders`: what bf16 weights lost when whoever loaded them rounded them, by `kernels.split`, as flat tensors.

    Parameters may be sharded by FSDP2's `fully_shard`. Each rank then updates its shards, a unit is what FSDP2 gathers
    at once, and its gather waits for its update; clipping is by the norm over all ranks. `ranks_here` of them share the
    memory of this machine.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        *,
        params: Iterable[dict[str, Any]] | None = None,
        states: StateName = "fp32",
        homes: Literal["auto"] | HomeName | Mapping[HomeName, float] = "auto",
        schedule: Schedule | Literal["auto"] = "auto",
        overlap: bool = True,
        chunk_size: int | None = None,
        cpu_adam_cores: float = 0.9,
        working_dtype: torch.dtype | None = None,
        activation_bytes: int | None = None,
        kept_bytes: int | None = None,
        taken_after: Mapping[nn.Parameter, int] | None = None,
        accumulates: bool = False,
        micro_batches: int = 1,
        forward_seconds: float = 0.0,
        backward_seconds: float = 0.0,
        units: Iterable[nn.Module] | None = None,
        remainders: Mapping[nn.Parameter, Tensor] | None = None,
        ranks_here: int = 1,
    ) -> None:
        self.schedule: Schedule = ("after-norm" if max_grad_norm else "in-backward") if schedule == "auto" else schedule
        if self.schedule == "in-backward":
            refuse_clipping(max_grad_norm)
        trainable = [p for p in model.parameters() if p.requires_grad]
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params if params is not None else trainable, defaults)
        self.max_grad_norm, self._overlap, self._micro_batches = max_grad_norm, overlap, micro_batches
        self._parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._frozen = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]
        self._group_of = [i for i, g in enumerate(self.param_groups) for p in g["params"] if p.requires_grad]
        self._device = self._parameters[0].device
        check_parameters(self._parameters, self._device)
        rounded_off = round_off(self._parameters, working_dtype, remainders or {})
        self._norm = Norm([local(p).numel() for p in self._parameters], self._device, group_of(self._parameters[0]))
        self._changes = Changes(self._norm)
        self._scalars = Scalars(len(self.param_groups), self._device)
        self.states = format_named(states)
        check_blocks(self._parameters, self.states)
        self._units = find_units(model, self._parameters, units)
        self.tape = Tape(self._device)
        self._near = near_cores(self._device)
        self._cores = self._near[: max(1, int(len(self._near) * cpu_adam_cores))]
        comes_early = bool(taken_after) and self.schedule == "after-norm" and overlap
        # FSDP2's hooks run on a stream of its own, whose memory is not what activations leave.
        comes_early = comes_early and not isinstance(self._parameters[0], DTensor)
        taken = self._taken(taken_after or {})
        if homes == "auto":
            need = need_of(
                [local(p) for p in self._parameters],
                self.states,
                activation_bytes=activation_bytes,
                kept_bytes=kept_bytes,
                accumulates=accumulates or micro_batches > 1,
                in_backward=self.schedule == "in-backward",
                # FSDP2 keeps the gradients of a unit in one piece of memory: none makes room alone.
                leave=overlap and not isinstance(self._parameters[0], DTensor),
                hidden_seconds=forward_seconds if self.schedule == "after-norm" else backward_seconds,
                end_bytes=min(taken) if comes_early else None,
            )
            placement, suitable = choose_homes(
                need, self._device, self.states, cores=self._cores, ranks_here=ranks_here
            )
            homes, chunk_size = cast(dict[HomeName, float], placement.fractions()), chunk_size or suitable
        self._housing = Housing(
            self._parameters,
            [index for unit in self._units for index in unit.parameters],
            self.states,
            homes if isinstance(homes, Mapping) else {homes: 1.0},
            self.states.whole_blocks(chunk_size or DEFAULT_CHUNK),
            self.tape,
            in_backward=self.schedule == "in-backward",
            near=self._near,
            cores=self._cores,
        )
        self._housing.start_from(rounded_off)
        self._ahead: Ahead | None = None
        if comes_early and self._housing.stream:
            left = sum(local(p).nbytes for i, p in enumerate(self._parameters) if self._leaves_to(i) is not None)
            room = 0 if accumulates or micro_batches > 1 else left  # that they leave before the peak
            peak_bytes = max(activation_bytes or 0, (kept_bytes or 0) - room)
            self._ahead = Ahead(self._housing.stream, EARLY_SHARE * peak_bytes, taken, left)
        self._fresh = not rounded_off  # state is zero, masters are the weights
        self._hold_updates = False  # inside accumulate()
        self._passes = [0] * len(self._parameters)  # gradients that came in this step, by parameter
        self._open = False  # a step has begun: its first gradient is final
        self._final: dict[int, Tensor] = {}  # final gradients on the device, by parameter
        self._sent: set[int] = set()  # parameters whose gradients have all gone down
        self._seen: set[int] = set()  # parameters whose gradients of this step were final
        self._coefficients: Tensor | None = None
        self.report: StepReport | None = None
        self._hooks = attach(self._units, self._parameters, self._device, self.tape, self._gradient_came)
        self._hooks += attach_to_files(model, self._parameters, self.synchronize, self.weights_were_set)

    # ------------------------------------------------------------------ one step

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around the backward of every micro-batch but the last: gradients add up, and none of them is final."""
        self._hold_updates = True
        try:
            yield
        finally:
            self._hold_updates = False

    def _begin(self) -> None:
        self._open = True
        self._norm.clear()
        if self.schedule == "in-backward":  # the learning rate must be set by now; after-norm reads it in `step`
            self._coefficients = self._scalars.coefficients(self.param_groups)

    def _gradient_came(self, index: int, unit: Unit) -> None:
        self._passes[index] += 1
        if not self._hold_updates and self._passes[index] >= self._micro_batches:
            self._gradient_final(index, unit)

    @torch.no_grad()
    def _gradient_final(self, index: int, unit: Unit) -> None:
        if not self._open:
            self._begin()
        refuse_misuse(unit, seen=index in self._seen)
        self._seen.add(index)
        gradient = self._parameters[index].grad
        assert gradient is not None
        refuse_other_type(self._parameters[index], gradient)
        flat = local(gradient).contiguous().view(-1)
        self._norm.add(index, flat)
        self._final[index] = flat
        self._changes.watch(index, gradient)
        if self.schedule == "in-backward":
            unit.waiting -= 1
            if unit.waiting == 0:
                self._update_unit(unit, self._on_host(self._go_if_finite()))
        elif self._overlap:
            self._send_down(index, flat)
            if self._ahead is not None:
                self._ahead.final(index)

    def _go_if_finite(self) -> Tensor:
        """Coefficients that stop the update once a gradient of this step was not finite.

        A copy, because units that are updating now still read the one before. Units before the first bad gradient have
        been updated by then; a loss that is not finite makes all gradients so, and then none has.
        """
        assert self._coefficients is not None
        coefficients = self._coefficients.clone()
        coefficients[:, GO] = self._norm.finite_so_far().float()
        return coefficients

    def _send_down(self, index: int, flat: Tensor) -> None:
        """Start gradients of host chunks on their way; free the whole gradient if all of it goes."""
        for chunk in self._housing.chunks[index]:
            self._housing.home_of[chunk].gradient_final(chunk, chunk.of(flat))
        home = self._leaves_to(index)
        if home is not None:
            self._sent.add(index)
            del self._final[index]
            self._parameters[index].grad = None
            if self._ahead is not None:
                self._ahead.leaves(home.sent(), flat.nbytes)

    def _leaves_to(self, index: int) -> HostHome | None:
        """The home to which the whole gradient of a parameter goes, so that the device need not keep it."""
        homes = [self._housing.home_of[chunk] for chunk in self._housing.chunks[index]]  # none of an empty shard
        leaves = bool(homes) and self._device.type == "cuda" and all(isinstance(home, HostHome) for home in homes)
        return cast(HostHome, homes[0]) if leaves else None

    def _taken(self, after: Mapping[nn.Parameter, int]) -> list[float]:
        """What is taken after the gradient of each parameter.

        Of the first units as after that of the next: what they leave is free when backward is over, and then the link
        has other things to bring.
        """
        taken = [after.get(p, math.inf) for p in self._parameters]
        first = [index for unit in self._units[:2] for index in unit.parameters]
        rest = min((taken[index] for index in set(range(len(taken))) - set(first)), default=math.inf)
        return [max(value, rest) if index in first else value for index, value in enumerate(taken)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update from the gradients of the backward that just ran. Enqueues only; nothing here waits for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for unit in self._units:  # gradients that came in accumulate() only, as those of an expert may
            for index in unit.parameters:
                if index not in self._seen and self._parameters[index].grad is not None:
                    self._gradient_final(index, unit)
        refuse_late_ones(self._frozen)
        if not self._open:  # no gradient arrived: nothing to do, as in torch
            return loss
        self._changes.refuse()
        self._changes.look(self._final, self._parameters)
        self._fresh = False
        if self.schedule == "after-norm":
            coefficients = self._scalars.coefficients(self.param_groups)
            norm, taken = clip(coefficients, self._norm.total(), self.max_grad_norm)
        else:
            coefficients = self._go_if_finite()
            norm, taken = self._norm.total().sqrt(), coefficients[0, GO] != 0
        rows = self._on_host(coefficients)
        for unit in self._units:
            if any(i in self._final or i in self._sent for i in unit.parameters):
                self._update_unit(unit, rows)
        self._scalars.advance(self.param_groups, taken)
        self.report = StepReport(norm, taken, main_mark(self._device))
        self._forget_step()
        if not self._overlap:
            self.synchronize()
        return loss

    def _forget_step(self) -> None:
        for unit in self._units:
            unit.waiting = len(unit.parameters)
        self._open, self._coefficients = False, None
        self._passes = [0] * len(self._parameters)
        self._changes.forget()
        for collected in (self._final, self._sent, self._seen):
            collected.clear()
        if self._ahead is not None:
            self._ahead.new_step()

    def _update_unit(self, unit: Unit, rows: list[Coefficients]) -> None:
        ready, home_of = main_mark(self._device), self._housing.home_of
        for index in unit.parameters:
            flat = self._final.pop(index, None)
            if flat is None and index not in self._sent:
                continue  # no gradient in this step: the parameter stays, as in torch
            if flat is not None and not (self._overlap and self.schedule == "after-norm"):
                for chunk in self._housing.chunks[index]:
                    home_of[chunk].gradient_final(chunk, chunk.of(flat))
            weight = local(self._parameters[index]).view(-1)
            for chunk in self._housing.chunks[index]:
                part = None if flat is None else chunk.of(flat)
                update = Update(chunk, chunk.of(weight), part, rows[self._group_of[index]], ready)
                unit.updates.append(home_of[chunk].update(update))
            # Dropped in every home: in `host` it has gone, and which home a parameter has must not show.
            self._parameters[index].grad = None

    def _on_host(self, coefficients: Tensor) -> list[Coefficients]:
        """A row a group, on the device and, for the C kernel, on the host."""
        host = ToHost.of(coefficients)
        return [Coefficients(row, host, group) for group, row in enumerate(coefficients)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a backward that no `step` follows; `step` itself drops those that it takes.

        They are dropped with `set_to_none=False` too: updates may still read them, and some are not there any more.
        """
        if self._open or any(self._passes):
            self._forget_step()
        super().zero_grad(set_to_none=True)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of state by home."""
        return self._housing.num_bytes(range(len(self._parameters)))

    def unit_bytes(self) -> list[tuple[nn.Module, dict[str, int]]]:
        """Bytes of state by home, for every unit."""
        return [(unit.module, self._housing.num_bytes(unit.parameters)) for unit in self._units]

    def describe(self) -> str:
        """Where state lives, in words."""
        words = {} if self._device.type == "cuda" else {"gpu": "beside the weights"}
        parts = {home: f"{size / 1e9:,.2f} GB {words.get(home, home)}" for home, size in self.state_bytes().items()}
        if "host" in parts:
            parts["host"] += f" (cores: {len(self._cores)})"
        overlap = "" if self._overlap else ", without overlap"
        return f"optimizer state in {self.states.name}: {', '.join(parts.values())}; schedule {self.schedule}{overlap}"

    def describe_host_memory(self) -> str:
        """How much of it the homes took, and how fast it was ready; nothing if all state is on the device."""
        arenas = self._housing.arenas()
        if not arenas:
            return ""
        gigabytes, seconds = sum(a.num_bytes for a in arenas) / 1e9, sum(a.seconds for a in arenas)
        did = "pinned" if arenas[0].pinned else "taken"
        return f"{gigabytes:,.2f} GB of host memory {did} in {seconds:.1f} s, {gigabytes / seconds:.1f} GB/s"

    def synchronize(self) -> None:
        """Wait until every update has been made; weights and state may then be read anywhere."""
        for unit in self._units:
            unit.wait(self._device, self.tape)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._changes.refuse()

    # ------------------------------------------------------------------ state, independent of homes and chunking

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Everything, per parameter, on the CPU: step count, powers, fp32 master and moments, parameter groups.

        Before the first step there is no state to tell, as in torch: wrappers read and write it at once to move it.
        Of parameters that are sharded it holds this rank's part; `state.py` has the whole for any number of ranks.
        """
        self.synchronize()
        states = self._housing.states
        entries = [] if self._fresh else [read_state(p, list(states(i))) for i, p in enumerate(self._parameters)]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        scalars = {"steps": self._scalars.steps.cpu(), "powers": self._scalars.powers.cpu()}
        return {"state": entries, "param_groups": groups, **scalars}

    @torch.no_grad()
    def weights_were_set(self, indices: Sequence[int] | None = None) -> None:
        """Call this after weights were written in place: they are the masters now, all of them or those of `indices`.

        Loading weights into the model or into a part of it does so by itself. `synchronize` before you write.
        """
        self.synchronize()
        chosen = range(len(self._parameters)) if indices is None else indices
        self._housing.forget_remainders(chosen)
        self._housing.start_from(indices=chosen)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take everything back, weights included: the working weight is the rounded master."""
        check_saved(state_dict["state"], self._parameters, self.states)
        self.synchronize()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        self._scalars.steps = state_dict["steps"].to(self._device)
        self._scalars.powers = state_dict["powers"].to(self._device)
        if self.schedule == "in-backward":  # gradients have been used; else they wait for `step`, as in torch
            self._forget_step()
        if state_dict["state"]:
            for (index, p), entry in zip(enumerate(self._parameters), state_dict["state"], strict=True):
                write_state(p, list(self._housing.states(index)), entry)
        elif not self._fresh:
            self._housing.clear()
        self._fresh = not state_dict["state"]
        self._housing.start_from()

    def chunk_states(self) -> Iterator[tuple[nn.Parameter, list[StateView]]]:
        """Every parameter and the states of its chunks in order, where they lie (see `state.py`)."""
        self.synchronize()
        for index, p in enumerate(self._parameters):
            yield p, [chunk.view(state) for chunk, state in self._housing.states(index)]

    def scalar_state(self) -> dict[str, Tensor]:
        """Count of steps taken and powers of the betas, on the device."""
        return {"steps": self._scalars.steps, "powers": self._scalars.powers}

    @torch.no_grad()
    def restored(self) -> None:
        """Weights and state were written where they lie: let every home see the weights, and begin a new step."""
        self._forget_step()
        self._fresh = False
        self._housing.start_from()

    def close(self) -> None:
        """Give back state, arenas and threads, and let go of the model; its weights stay."""
        try:
            self.synchronize()
        finally:  # an error there is the caller's, but nothing is held back because of it
            self._ahead = None
            for unit in self._units:
                unit.updates.clear()
            for hook in self._hooks:
                hook.remove()
            self._housing.close()
