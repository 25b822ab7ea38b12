"""An optimizer whose state lives where there is room, for any update rule, in anyone's training loop.

Update `after-norm`: gradients stay until the global norm is known on the device. `step` then enqueues the updates in
forward order, and the next forward of each unit waits only for its own. Update `in-backward`: a unit is updated as soon
as its gradients are final, which leaves no global norm to clip by. Speculating on the norm was rejected: a rollback
cannot restore the bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from penstock.flow.timeline import Timeline
from penstock.flow.transfers import link_of
from penstock.offload.behaviour import Behaviour, UpdateTime, update_time
from penstock.offload.dropped import wait_for_dropped, when_dropped
from penstock.offload.dtensors import check_blocks, gather_again, group_of, is_streamed, local
from penstock.offload.homes import Coefficients, Update, rows_of
from penstock.offload.housing import Housing
from penstock.offload.misuse import (
    Changes,
    Closed,
    Copied,
    asks_for_state,
    check_model,
    check_parameters,
    check_placement,
    format_named,
    refuse_distributed_checkpoint,
    refuse_late_ones,
    refuse_misuse,
    refuse_new_group,
    refuse_other_type,
    refuse_pickling,
    refuse_scaler,
    refuse_skipping,
)
from penstock.offload.placing import Homes, place
from penstock.offload.prefetch import Prefetcher
from penstock.offload.state_dict import read_saved, state_dict_of, write_state
from penstock.offload.step import Step
from penstock.offload.trained import TrainedUnit, Updates, attach, attach_to_files, claim, find_trained, let_go
from penstock.plan.placement import Placement
from penstock.plan.split import Manner, Profile
from penstock.update.formats import StateView, view_state
from penstock.update.norm import Norm, clip
from penstock.update.rule import GO, Rule
from penstock.update.spans import root


@dataclass(frozen=True)
class StepReport:
    """A step, on the device: reading a value makes the host wait."""

    grad_norm: Tensor
    """The global norm, before clipping."""
    applied: Tensor
    """False if a gradient was not finite: weights and state are then as before."""


class OffloadOptimizer(torch.optim.Optimizer):
    """Any update rule with state in three homes; `OffloadAdamW` is the one to use, and says what each value means."""

    _step_supports_amp_scaling = True
    """So that a GradScaler comes to `step` with its scale, and can be refused."""

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        defaults: dict[str, Any],
        behaviour: Behaviour,
        *,
        params: Iterable[dict[str, Any]] | None = None,
        homes: Homes | Placement = "auto",
        units: Iterable[nn.Module] | None = None,
    ) -> None:
        check_model(model)
        wait_for_dropped()
        self.max_grad_norm, self._micro_batches = behaviour.max_grad_norm, behaviour.micro_batches
        self._sums_in_fp32 = behaviour.accumulate_dtype == "fp32"
        self._overlap, self._rule = behaviour.overlap, rule
        self.update: UpdateTime = update_time(behaviour)
        everything = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        super().__init__(params if params is not None else everything, defaults)
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._group_of = [i for i, g in enumerate(self.param_groups) for p in g["params"] if p.requires_grad]
        self._trained = find_trained(model, self.param_groups, units)
        self._parameters, self._units = self._trained.parameters, self._trained.units
        self._unit_of = self._trained.deadlines()
        check_parameters(self._parameters, self._trained.device)
        self.format = format_named(behaviour.states, rule.formats)
        check_blocks(self._parameters, self.format)
        self._link = link_of(self._trained.device)
        self._streams = self._link.streams
        sizes, device = [local(p).numel() for p in self._parameters], self._trained.device
        self._norm = Norm(sizes, device, group_of(self._parameters[0]))
        self._changes, self._scalars = Changes(self._norm, self._streams), rule.scalars(device)
        manner = Manner(self.update == "in-backward", self._overlap, self._trained.sharded, behaviour.accumulate_dtype)
        if not isinstance(homes, Placement):
            profile = Profile(micro_batches=behaviour.micro_batches)
            homes = place(self._trained, self.format, homes, profile, manner)
        check_placement(homes, self._trained, self.format)
        self._cores = homes.cores
        self._housing = Housing(self._trained, homes, rule, self._link, manner)
        self._housing.start_from()
        stream, room = self._housing.stream, homes.prefetch
        self._prefetcher = Prefetcher(stream, self._streams, room) if stream and room is not None else None
        self._fresh = True  # state is zero, masters are the weights
        self._hold_updates = False  # inside accumulate()
        self._asked_for_state = False  # by a step that was none
        self._step: Step | None = None
        self.report: StepReport | None = None
        self._hooks = attach(model, self._trained, self._streams, self._gradient_came)
        self._hooks += attach_to_files(model, self._parameters, self.synchronize, self.weights_were_set)
        self._is_closed = when_dropped(self, self._housing.to_close, self._hooks)
        claim(self._parameters, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For torch's own constructor only."""
        if hasattr(self, "_trained"):
            refuse_new_group()
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_pickling()

    def __deepcopy__(self, memo: object) -> Copied:
        return Copied()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around the backward of every micro-batch but the last: gradients add up, and none of them is final."""
        self._hold_updates = True
        try:
            yield
        finally:
            self._hold_updates = False

    def _begin(self) -> Step:
        self._norm.clear()
        self._asked_for_state = False
        if self._trained.replicated and self._fresh:  # DistributedDataParallel has sent out the weights of one rank
            self._housing.start_from()
        return Step(late=self._trained.replicated, streamed=self._trained.streamed)

    @torch.no_grad()
    def _gradient_came(self, index: int) -> None:
        self._step = step = self._step or self._begin()
        unit = self._units[self._unit_of[index]]
        final = step.came(index) >= self._micro_batches and not self._hold_updates
        if step.late:
            return
        if final:
            step.release(index, self._parameters[index], unit)
            self._gradient_final(step, index, unit)
        elif self._sums_in_fp32:
            step.hold(index, self._parameters[index])

    @torch.no_grad()
    def _gradient_final(self, step: Step, index: int, unit: TrainedUnit) -> None:
        refuse_misuse(unit, seen=index in step.seen)
        gradient = self._parameters[index].grad
        assert gradient is not None
        refuse_other_type(gradient, self._trained, index)
        flat = step.flat(gradient)
        self._norm.add(index, flat)
        step.is_final(index, gradient, flat)
        if self.update == "in-backward":
            if step.coefficients is None:
                step.coefficients = self._scalars.coefficients(self.param_groups)
            if step.is_complete(unit):
                self._update_unit(step, unit, rows_of(self._go_if_finite(step), self._streams))
        elif self._overlap:
            self._send_down(step, index, flat)
            if self._prefetcher is not None:
                self._prefetcher.gradient_final(index)

    def _go_if_finite(self, step: Step) -> Tensor:
        """Coefficients that stop the update once a gradient of this step was not finite.

        A copy, because units that are updating now still read the one before. Units before the first bad gradient have
        been updated by then; a loss that is not finite makes all gradients so, and then none has.
        """
        assert step.coefficients is not None
        coefficients = step.coefficients.clone()
        coefficients[:, GO] = self._norm.finite_so_far().float()
        return coefficients

    def _send_down(self, step: Step, index: int, flat: Tensor) -> None:
        """Start gradients of host chunks on their way; free the whole gradient if all of it goes."""
        written = self._streams.main_mark()
        for chunk in self._housing.chunks[index]:
            self._housing.home_of[chunk].gradient_final(chunk, chunk.of(flat), written)
        if self._housing.leaves(index):
            step.was_sent(index)
            self._parameters[index].grad = None
            if self._prefetcher is not None:
                self._prefetcher.gradient_sent(self._link.to_host.mark(), flat.nbytes)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update from the gradients of the backward that just ran. Enqueues only; nothing here waits for the device."""
        refuse_scaler(vars(self))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._step is None and asks_for_state(self.param_groups):
            self._asked_for_state = True
            return loss
        step = self._finish_gradients()
        refuse_late_ones(self._frozen)
        if step is None:  # no gradient arrived: nothing to do, as in torch
            return loss
        self._changes.refuse()
        self._changes.look(step.watched, self._parameters)
        self._fresh = False
        if self.update == "after-norm":
            coefficients = self._scalars.coefficients(self.param_groups)
            norm, applied = clip(coefficients, self._norm.total(), self.max_grad_norm)
        else:
            coefficients = self._go_if_finite(step)
            norm, applied = root(self._norm.total()), coefficients[0, GO] != 0
        rows = rows_of(coefficients, self._streams)
        with self._housing.ending_step():
            for unit in self._units:
                if step.has_update(unit.parameters):
                    self._update_unit(step, unit, rows)
        self._scalars.advance(self.param_groups, applied)
        self.report = StepReport(norm, applied)
        self._forget_step()
        if not self._overlap:
            self.synchronize()
        return loss

    def _finish_gradients(self) -> Step | None:
        """The step, with gradients that came in accumulate() only, as those of an expert may; None if none came."""
        for unit in self._units:
            self.finish_gradients(unit)
        return self._step if self._step is not None and self._step.seen else None

    @torch.no_grad()
    def finish_gradients(self, unit: TrainedUnit) -> None:
        """No backward of this step comes to the unit any more: what came in accumulate() only is final."""
        for index in unit.parameters:
            step, parameter = self._step, self._parameters[index]
            if step is not None:
                step.release(index, parameter, unit)
            if parameter.grad is not None and (step is None or index not in step.seen):
                self._step = step = step or self._begin()
                self._gradient_final(step, index, unit)

    def _forget_step(self) -> None:
        self._step = None
        if self._prefetcher is not None:
            self._prefetcher.step_ended()

    def _update_unit(self, step: Step, unit: TrainedUnit, rows: list[Coefficients]) -> None:
        ready, updates = self._streams.main_mark(), list[Update]()
        for index in unit.parameters:
            flat = step.take(index)
            if flat is None and index not in step.sent:
                continue  # no gradient in this step: the parameter stays, as in torch
            weight = local(self._parameters[index]).view(-1)
            for chunk in self._housing.chunks[index]:
                part = None if flat is None else chunk.of(flat)
                updates.append(Update(chunk, chunk.of(weight), part, rows[self._group_of[index]], ready))
            # Dropped in every home: in `host` it has gone, and which home a parameter has must not show.
            self._parameters[index].grad = None
        sent = self._overlap and self.update == "after-norm"
        ahead = is_streamed(self._parameters[unit.parameters[0]])
        unit.updates = Updates(self._housing.giver.give(updates, sent=sent, ahead=ahead))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a backward that no `step` follows; `step` itself drops those that it takes.

        They are dropped with `set_to_none=False` too: updates may still read them, and some are not there any more.
        """
        if self._step is not None:
            if self.update == "in-backward" and self._step.has_begun:
                refuse_skipping()
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
        words = {} if self._trained.device.type == "cuda" else {"gpu": "beside the weights"}
        parts = {home: f"{size / 1e9:,.2f} GB {words.get(home, home)}" for home, size in self.state_bytes().items()}
        if "host" in parts:
            parts["host"] += f" (cores: {len(self._cores)})"
        overlap = "" if self._overlap else ", without overlap"
        return f"optimizer state in {self.format.name}: {', '.join(parts.values())}; updates {self.update}{overlap}"

    def describe_host_memory(self) -> str:
        """How much of it the homes took, and how fast it was ready; nothing if all state is on the device."""
        return self._housing.describe_host_memory()

    @property
    def timeline(self) -> Timeline:
        """When lanes are busy, if it is recorded."""
        return self._streams.timeline

    def synchronize(self) -> None:
        """Wait until every update has been made; weights and state may then be read anywhere."""
        for unit in self._units:
            unit.wait(self._streams)
        self._housing.settle()
        self._streams.synchronize()
        self._changes.refuse()

    def unit_of(self, module: nn.Module) -> TrainedUnit | None:
        """The unit that a module is, if any of its parameters is trained."""
        return next((unit for unit in self._units if unit.module is module), None)

    def _refuse_if_asked(self) -> None:
        asked, self._asked_for_state = self._asked_for_state, False
        if asked:
            refuse_distributed_checkpoint()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Everything, per parameter, on the CPU: step count, fp32 master and moments, parameter groups.

        It is in torch's form, and `torch.optim.AdamW` can load it, but for the states int8. Before the first step there
        is none to tell, as in torch. Of parameters that are sharded it holds this rank's part; `saved_tensors.py` has
        the whole for any number of ranks.
        """
        self._refuse_if_asked()
        self.synchronize()
        states = {} if self._fresh else {p: list(self._housing.states_of(i)) for i, p in enumerate(self._parameters)}
        return state_dict_of(self.param_groups, states, self._scalars.tensors(), self._rule.saved_names)

    @torch.no_grad()
    def take_remainders(self, remainders: Mapping[nn.Parameter, Tensor]) -> None:
        """What bf16 weights lost when they were rounded (`update.master.round_to_bf16_`): masters get it back."""
        self._housing.start_from({i: remainders[p] for i, p in enumerate(self._parameters) if p in remainders})
        self._fresh = self._fresh and not remainders

    @torch.no_grad()
    def weights_were_set(self, indices: Sequence[int] | None = None) -> None:
        """Call this after weights were written in place: they are the masters now, all of them or those of `indices`.

        Loading weights into the model or into a part of it does so by itself. `synchronize` before you write.
        """
        self.synchronize()
        gather_again(unit.module for unit in self._units)
        chosen = range(len(self._parameters)) if indices is None else indices
        self._housing.forget_remainders(chosen)
        self._housing.start_from(indices=chosen)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take everything back, weights included: the working weight is the rounded master.

        The state of a `torch.optim.AdamW` is taken too; its masters are the weights as they are now.
        """
        self._refuse_if_asked()
        saved = read_saved(state_dict, self.param_groups, self._parameters, self.format, self._rule)
        self.synchronize()
        for group, values in zip(self.param_groups, saved.groups, strict=True):
            group.update(values)
        self._scalars.load(saved.scalars)
        if self.update == "in-backward":  # gradients have been used; else they wait for `step`, as in torch
            self._forget_step()
        if saved.entries:
            for (index, p), entry in zip(enumerate(self._parameters), saved.entries, strict=True):
                write_state(p, list(self._housing.states_of(index)), entry, self._rule.saved_names)
        elif not self._fresh:
            self._housing.clear()
        self._fresh = not saved.entries
        gather_again(unit.module for unit in self._units)
        self._housing.start_from()

    def chunk_states(self) -> Iterator[tuple[nn.Parameter, list[StateView]]]:
        """Every parameter and the states of its chunks in order, where they lie (see `saved_tensors.py`)."""
        self.synchronize()
        for index, p in enumerate(self._parameters):
            yield p, [view_state(chunk, state) for chunk, state in self._housing.states_of(index)]

    def scalar_state(self) -> dict[str, Tensor]:
        """What of the rule advances from step to step, on the device."""
        return self._scalars.tensors()

    @property
    def saved_names(self) -> Mapping[str, str]:
        """Parts of a state by their names in a file."""
        return self._rule.saved_names

    @torch.no_grad()
    def restored(self) -> None:
        """Weights and state were written where they lie: let every home see the weights, and begin a new step."""
        self._forget_step()
        self._fresh = False
        gather_again(unit.module for unit in self._units)
        self._housing.start_from()

    def close(self) -> None:
        """Give back state, arenas and threads, and let go of the model; its weights stay."""
        try:
            self.synchronize()
        finally:  # an error there is the caller's, but nothing is held back because of it
            self._is_closed()
            self._prefetcher = self._step = None
            for unit in self._units:
                unit.updates = Updates()
            for hook in self._hooks:
                hook.remove()
            self._housing.close()
            self._housing = Closed()  # type: ignore[assignment]
            let_go(self._parameters)
