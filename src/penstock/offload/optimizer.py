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

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from penstock.errors import RecipeError
from penstock.hardware import usable_cores
from penstock.offload.auto import choose_homes
from penstock.offload.homes import NUM_SLOTS, Chunk, Coefficients, Home, HostHome, ResidentHome, StreamHome
from penstock.offload.kernels import GO, StateView, join, split
from penstock.offload.lanes import Lane, Mark, main_mark, main_waits
from penstock.offload.norm import Norm, Scalars, clip

HomeName = Literal["gpu", "stream", "host"]
Schedule = Literal["after-norm", "in-backward"]
DEFAULT_CHUNK = 1 << 24
"""Elements in a chunk: 160 MiB of state, long enough a copy to run at the link's full rate."""


@dataclass
class _Unit:
    """Weights needed together in forward, the chunks of their state, and what the next forward must wait for."""

    module: nn.Module
    parameters: list[int] = field(default_factory=list)
    waiting: int = 0
    updates: list[Future[Mark]] = field(default_factory=list)


@dataclass(frozen=True)
class StepReport:
    """A step, on the device: reading a value makes the host wait."""

    grad_norm: Tensor
    taken: Tensor
    done: Mark


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW with an exact fp32 master for bf16 weights and state in three homes. See the module's docstring."""

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
        homes: Literal["auto"] | HomeName | Mapping[HomeName, float] = "auto",
        schedule: Schedule | Literal["auto"] = "auto",
        overlap: bool = True,
        chunk_size: int = DEFAULT_CHUNK,
        cpu_adam_cores: float = 0.9,
        working_dtype: torch.dtype | None = None,
        activation_bytes: int = 0,
        hidden_seconds: float = 0.0,
        units: Iterable[nn.Module] | None = None,
    ) -> None:
        self.schedule: Schedule = ("after-norm" if max_grad_norm else "in-backward") if schedule == "auto" else schedule
        if self.schedule == "in-backward" and max_grad_norm:
            raise RecipeError(
                f"max_grad_norm = {max_grad_norm}: with in-backward the norm is not known when weights are updated",
                remedy="Set max_grad_norm to 0, or use the schedule after-norm.",
            )
        trainable = [p for p in model.parameters() if p.requires_grad]
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params if params is not None else trainable, defaults)
        self.max_grad_norm, self._overlap = max_grad_norm, overlap
        self._parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._group_of = [i for i, g in enumerate(self.param_groups) for p in g["params"] if p.requires_grad]
        self._device = self._parameters[0].device
        self._check_parameters()
        remainders = self._round_to(working_dtype)
        self._norm = Norm([p.numel() for p in self._parameters], self._device)
        self._scalars = Scalars(len(self.param_groups), self._device)
        self._chunks = [self._cut(i, chunk_size) for i in range(len(self._parameters))]
        self._update_lane = Lane(self._device)
        cores = usable_cores()
        self._cores = cores[: max(1, int(len(cores) * cpu_adam_cores))]
        if homes == "auto":
            homes = self._choose(activation_bytes, hidden_seconds, chunk_size)
        self._home_of = self._assign(homes if isinstance(homes, Mapping) else {homes: 1.0})
        self._start_from(remainders)
        self._units = self._find_units(model, units)
        self._hold_updates = False  # inside accumulate()
        self._open = False  # a step has begun: its first gradient is final
        self._final: dict[int, Tensor] = {}  # final gradients on the device, by parameter
        self._sent: set[int] = set()  # parameters whose gradients have all gone down
        self._seen: set[int] = set()  # parameters whose gradients of this step were final
        self._coefficients: Tensor | None = None
        self._keep: list[Tensor] = []  # coefficients that lanes still read
        self.report: StepReport | None = None
        self._attach(model)

    # ------------------------------------------------------------------ setting up

    def _check_parameters(self) -> None:
        for p in self._parameters:
            if p.dtype not in (torch.bfloat16, torch.float32) or p.device != self._device or not p.is_contiguous():
                raise RecipeError(
                    f"a parameter of shape {tuple(p.shape)} is {p.dtype} on {p.device}",
                    remedy="OffloadAdamW takes contiguous bf16 and fp32 parameters that are all on one device.",
                )

    def _cut(self, index: int, chunk_size: int) -> list[Chunk]:
        p = self._parameters[index]
        starts = range(0, p.numel(), chunk_size)
        return [Chunk(index, start, min(chunk_size, p.numel() - start), p.dtype) for start in starts]

    def _choose(self, activation_bytes: int, hidden_seconds: float, chunk_size: int) -> dict[HomeName, float]:
        placement = choose_homes(
            self._parameters,
            self._device,
            gradients_kept=self.schedule == "after-norm",
            activation_bytes=activation_bytes,
            staging_bytes=NUM_SLOTS * 10 * chunk_size,
            hidden_seconds=hidden_seconds,
            cores=self._cores,
        )
        return cast(dict[HomeName, float], placement.fractions())

    def _assign(self, fractions: Mapping[HomeName, float]) -> dict[Chunk, Home]:
        """Deal the chunks out so that every stretch of the model has the same mix: the pipe is then always busy.

        `host` gets whole parameters, since a gradient leaves the GPU only if all of it goes down.
        """
        total = sum(fractions.values())
        dealt: dict[HomeName, list[Chunk]] = {"gpu": [], "stream": [], "host": []}
        owed = dict.fromkeys(fractions, 0.0)
        for chunks in self._chunks:
            size = sum(chunk.size for chunk in chunks)
            for name, fraction in fractions.items():
                owed[name] += size * fraction / total
            whole = len(fractions) == 1 or owed.get("host", 0.0) > size / 2
            for chunk in chunks:
                choices = [name for name in owed if name != "host" or len(fractions) == 1]
                home = "host" if "host" in owed and whole else max(choices, key=lambda name: owed[name])
                owed[home] -= chunk.size
                dealt[home].append(chunk)
        homes: dict[HomeName, Callable[[list[Chunk]], Home]] = {
            "gpu": lambda c: ResidentHome(c, self._device, self._update_lane),
            "stream": lambda c: StreamHome(c, self._device, self._update_lane),
            "host": lambda c: HostHome(c, self._device, cores=self._cores),
        }
        self._homes = [(homes[name](chunks), chunks) for name, chunks in dealt.items() if chunks]
        return {chunk: home for home, chunks in self._homes for chunk in chunks}

    @torch.no_grad()
    def _round_to(self, dtype: torch.dtype | None) -> list[Tensor | None]:
        """Round fp32 weights to bf16 if asked; the remainders keep the precision that the weights lose."""
        remainders: list[Tensor | None] = [None] * len(self._parameters)
        for index, p in enumerate(self._parameters):
            if dtype is torch.bfloat16 and p.dtype is torch.float32:
                weight, remainders[index] = split(p.detach().view(-1))
                p.data = weight.view(p.shape)
        return remainders

    @torch.no_grad()
    def _start_from(self, remainders: list[Tensor | None]) -> None:
        """Every home learns the weights it starts from."""
        for chunks, p, remainder in zip(self._chunks, self._parameters, remainders, strict=True):
            for chunk in chunks:
                home = self._home_of[chunk]
                home.weight_was_set(chunk, chunk.of(p.detach().view(-1)))
                if remainder is not None:
                    chunk.view(home.state(chunk)).remainder.copy_(chunk.of(remainder))

    def _find_units(self, model: nn.Module, units: Iterable[nn.Module] | None) -> list[_Unit]:
        """The given modules, or the elements of every list of modules, then each module with weights of its own."""
        index_of = {id(p): i for i, p in enumerate(self._parameters)}
        containers = (nn.ModuleList, nn.ModuleDict)  # never called themselves, so no unit either
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
        elements = (e for modules in lists for e in modules if not isinstance(e, containers))
        chosen = set(units) if units is not None else set(elements)
        found: list[_Unit] = []
        for module in model.modules():
            own = module.parameters(recurse=module in chosen)
            indices = [index_of.pop(id(p)) for p in own if id(p) in index_of]
            if indices:
                found.append(_Unit(module, indices, waiting=len(indices)))
        if index_of:
            raise RecipeError(
                f"{len(index_of)} of the parameters to train are not in the model", remedy="Check params."
            )
        return found

    def _attach(self, model: nn.Module) -> None:
        """Hooks: a unit's forward waits for its update; a final gradient is taken; state_dict waits for everything."""
        self._hooks = [
            model.register_state_dict_pre_hook(lambda *_: self.synchronize()),
            model.register_load_state_dict_post_hook(lambda *_: self._weights_were_set()),
        ]
        for unit in self._units:
            self._hooks.append(unit.module.register_forward_pre_hook(lambda *_, unit=unit: self._wait(unit)))
            for index in unit.parameters:
                hook = cast(Callable[[Tensor], None], lambda p, i=index, u=unit: self._gradient_final(i, u))
                self._hooks.append(self._parameters[index].register_post_accumulate_grad_hook(hook))

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
        self._keep.clear()  # every unit's forward has waited for its update, so no lane reads these any more
        self._norm.clear()
        if self.schedule == "in-backward":  # the learning rate must be set by now; after-norm reads it in `step`
            self._coefficients = self._scalars.coefficients(self.param_groups)

    @torch.no_grad()
    def _gradient_final(self, index: int, unit: _Unit) -> None:
        if self._hold_updates:
            return
        if not self._open:
            self._begin()
        self._refuse_misuse(index, unit)
        self._seen.add(index)
        gradient = self._parameters[index].grad
        assert gradient is not None
        flat = gradient.contiguous().view(-1)
        self._norm.add(index, flat)
        self._final[index] = flat
        if self.schedule == "in-backward":
            unit.waiting -= 1
            if unit.waiting == 0:
                self._update_unit(unit, self._go_if_finite())
        elif self._overlap:
            self._send_down(index, flat)

    def _refuse_misuse(self, index: int, unit: _Unit) -> None:
        """Two mistakes that would train quietly in a wrong way."""
        if index in self._seen:
            raise RecipeError(
                "a second backward before step()",
                remedy="Put `with optimizer.accumulate():` around the backward of every micro-batch but the last.",
            )
        if unit.updates:
            raise RecipeError(
                f"the weights of {type(unit.module).__name__} are used without calling that module",
                remedy="Name the module that is called instead, with units=[...].",
            )

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
        homes = [self._home_of[chunk] for chunk in self._chunks[index]]
        for chunk, home in zip(self._chunks[index], homes, strict=True):
            home.gradient_final(chunk, chunk.of(flat))
        if self._device.type == "cuda" and all(isinstance(home, HostHome) for home in homes):
            self._sent.add(index)
            del self._final[index]
            self._parameters[index].grad = None

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
        if not self._open:  # no gradient arrived: nothing to do, as in torch
            return loss
        if self.schedule == "after-norm":
            coefficients = self._scalars.coefficients(self.param_groups)
            norm, taken = clip(coefficients, self._norm.total(), self.max_grad_norm)
        else:
            coefficients = self._go_if_finite()
            norm, taken = self._norm.total().sqrt(), coefficients[0, GO] != 0
        for unit in self._units:
            if any(i in self._final or i in self._sent for i in unit.parameters):
                self._update_unit(unit, coefficients)
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
        for collected in (self._final, self._sent, self._seen):
            collected.clear()

    def _update_unit(self, unit: _Unit, coefficients: Tensor) -> None:
        rows = self._on_host(coefficients)
        self._update_lane.wait(main_mark(self._device))  # backward is still writing gradients and reading weights
        for index in unit.parameters:
            flat = self._final.pop(index, None)
            if flat is None and index not in self._sent:
                continue  # no gradient in this step: the parameter stays, as in torch
            if flat is not None and not (self._overlap and self.schedule == "after-norm"):
                for chunk in self._chunks[index]:
                    self._home_of[chunk].gradient_final(chunk, chunk.of(flat))
            weight = self._parameters[index].detach().view(-1)
            for chunk in self._chunks[index]:
                part = None if flat is None else chunk.of(flat)
                row = rows[self._group_of[index]]
                unit.updates.append(self._home_of[chunk].update(chunk, chunk.of(weight), part, row))
            if flat is not None:
                self._update_lane.uses(flat)  # zero_grad frees it on the host while the lane still reads it
            if self.schedule == "in-backward":
                self._parameters[index].grad = None

    def _on_host(self, coefficients: Tensor) -> list[Coefficients]:
        """A row a group, on the device and, for the C kernel, on the host."""
        if any(isinstance(home, HostHome) for home, _ in self._homes) and coefficients.is_cuda:
            host = torch.empty(coefficients.shape, dtype=torch.float32, pin_memory=True)
            host.copy_(coefficients, non_blocking=True)
        else:
            host = coefficients
        mark = main_mark(self._device)
        self._keep.append(coefficients)
        return [Coefficients(device, own, mark) for device, own in zip(coefficients, host, strict=True)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Zeroing them in place must first wait for the updates that still read them."""
        if self._open:  # a backward without step(): its gradients are not wanted
            self._forget_step()
        if not set_to_none:
            self.synchronize()
        super().zero_grad(set_to_none)

    def _wait(self, unit: _Unit) -> None:
        """The calling thread's stream goes on only after this unit's update."""
        for update in unit.updates:
            main_waits(self._device, update.result())
        unit.updates.clear()

    def describe(self) -> str:
        """Where state lives, in words."""
        parts = [
            f"{sum(c.state_bytes for c in chunks) / 1e9:,.2f} GB {home.name}" for home, chunks in self._homes if chunks
        ]
        return f"optimizer state: {', '.join(parts)}; schedule {self.schedule}"

    def synchronize(self) -> None:
        """Wait until every update has been made; weights and state may then be read anywhere."""
        for unit in self._units:
            self._wait(unit)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ------------------------------------------------------------------ state, independent of homes and chunking

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Everything, per parameter, on the CPU: step count, powers, fp32 master and moments, parameter groups."""
        self.synchronize()
        entries = [self._state_of(index) for index in range(len(self._parameters))]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        scalars = {"steps": self._scalars.steps.cpu(), "powers": self._scalars.powers.cpu()}
        return {"state": entries, "param_groups": groups, **scalars}

    def _state_of(self, index: int) -> dict[str, Tensor]:
        p = self._parameters[index]
        weight = p.detach().view(-1)
        parts = []
        for chunk in self._chunks[index]:
            view = chunk.view(self._home_of[chunk].state(chunk))
            own = chunk.of(weight)
            remainder = view.remainder.to(own.device)
            master = join(own, remainder) if p.dtype is torch.bfloat16 else own
            parts.append([t.cpu() for t in (master, view.first, view.second)])
        names = ("master", "exp_avg", "exp_avg_sq")
        columns = zip(*parts, strict=True)
        return {name: torch.cat(column).view(p.shape) for name, column in zip(names, columns, strict=True)}

    @torch.no_grad()
    def _weights_were_set(self) -> None:
        """Someone loaded weights into the model: they are the masters now, and what was rounded off before is void."""
        self.synchronize()
        for chunks, p in zip(self._chunks, self._parameters, strict=True):
            if p.dtype is torch.bfloat16:
                for chunk in chunks:
                    chunk.view(self._home_of[chunk].state(chunk)).remainder.zero_()
        self._start_from([None] * len(self._parameters))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take everything back, weights included: the working weight is the rounded master."""
        self.synchronize()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        self._scalars.steps = state_dict["steps"].to(self._device)
        self._scalars.powers = state_dict["powers"].to(self._device)
        self._forget_step()
        for p, chunks, entry in zip(self._parameters, self._chunks, state_dict["state"], strict=True):
            assert all(tensor.shape == p.shape for tensor in entry.values()), "the state is of another model"
            flat = {name: tensor.reshape(-1) for name, tensor in entry.items()}
            for chunk in chunks:
                view = chunk.view(self._home_of[chunk].state(chunk))
                master = chunk.of(flat["master"])
                weight, remainder = split(master) if p.dtype is torch.bfloat16 else (master, view.remainder)
                chunk.of(p.detach().view(-1)).copy_(weight)
                view.remainder.copy_(remainder)
                view.first.copy_(chunk.of(flat["exp_avg"]))
                view.second.copy_(chunk.of(flat["exp_avg_sq"]))
        self._start_from([None] * len(self._parameters))

    def chunk_states(self) -> Iterator[tuple[nn.Parameter, list[StateView]]]:
        """Every parameter and the states of its chunks in order, where they lie (see `state.py`)."""
        self.synchronize()
        for p, chunks in zip(self._parameters, self._chunks, strict=True):
            yield p, [chunk.view(self._home_of[chunk].state(chunk)) for chunk in chunks]

    def scalar_state(self) -> dict[str, Tensor]:
        """Count of steps taken and powers of the betas, on the device."""
        return {"steps": self._scalars.steps, "powers": self._scalars.powers}

    @torch.no_grad()
    def restored(self) -> None:
        """Weights and state were written where they lie: let every home see the weights, and begin a new step."""
        self._forget_step()
        self._start_from([None] * len(self._parameters))

    def close(self) -> None:
        """Give back state, arenas and threads, and let go of the model; its weights stay."""
        self.synchronize()
        for hook in self._hooks:
            hook.remove()
        for home, _ in self._homes:
            home.close()
