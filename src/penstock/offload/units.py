"""Units as the optimizer sees them: which module's forward must wait for which parameters' updates, and how it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from penstock.errors import RecipeError
from penstock.flow.lanes import Mark, Tape, main_waits
from penstock.offload.dtensors import gather_waits


@dataclass
class Unit:
    """Weights needed together in forward, and what the next forward must wait for."""

    module: nn.Module
    parameters: list[int] = field(default_factory=list)
    waiting: int = 0
    """Parameters whose gradients are not final yet."""
    updates: list[Future[Mark]] = field(default_factory=list)

    def wait(self, device: torch.device, tape: Tape) -> None:
        """The calling thread's stream goes on only after this unit's update."""
        updates, self.updates = self.updates, []  # at once: one that failed is told of once
        failed: BaseException | None = None
        if updates:
            with tape.on_device("wait"):
                for update in updates:
                    failed = failed or update.exception()  # which waits too: the others still write weights
                    if update.exception() is None:
                        main_waits(device, update.result())
                        gather_waits(self.module, update.result())
        if failed is not None:
            raise failed


def find_units(model: nn.Module, parameters: Sequence[Tensor], units: Iterable[nn.Module] | None) -> list[Unit]:
    """The given modules, or the elements of every list of modules, then each module with weights of its own.

    If FSDP2 has sharded the model, units are what it gathers at once, since a gather must find every weight updated.
    """
    index_of = {id(p): i for i, p in enumerate(parameters)}
    containers = (nn.ModuleList, nn.ModuleDict)  # never called themselves, so no unit either
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    elements = (e for modules in lists for e in modules if not isinstance(e, containers))
    chosen = set(units) if units is not None else set(elements)
    found: list[Unit] = []
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for module in model.modules():
        if sharded and not isinstance(module, FSDPModule):
            continue
        own = gathered_with(module) if sharded else module.parameters(recurse=module in chosen)
        indices = [index_of.pop(id(p)) for p in own if id(p) in index_of]
        if indices:
            found.append(Unit(module, indices, waiting=len(indices)))
    if index_of:
        what = f"{len(index_of)} of the parameters to train are not in the model"
        raise RecipeError(what, where="params", remedy="Give the model that they belong to, or leave params out.")
    return found


def gathered_with(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of an FSDP2 module that no FSDP2 module within it has."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from gathered_with(child)


def attach(
    units: Iterable[Unit],
    parameters: Sequence[Tensor],
    device: torch.device,
    tape: Tape,
    came: Callable[[int, Unit], None],
) -> list[RemovableHandle]:
    """Hooks: a unit's forward waits for its update, and `came` is told of every gradient, by its parameter's number."""
    hooks: list[RemovableHandle] = []
    for unit in units:
        wait = _only(unit.module, lambda unit=unit: unit.wait(device, tape))  # type: ignore[misc]
        # First of the module's hooks: FSDP2 gathers the weights in one of its own, and would gather the old ones.
        hooks.append(unit.module.register_forward_pre_hook(wait, prepend=True))
        for index in unit.parameters:
            hook = cast(Callable[[Tensor], None], lambda p, i=index, u=unit: came(i, u))
            hooks.append(parameters[index].register_post_accumulate_grad_hook(hook))
    return hooks


def attach_to_files(
    model: nn.Module,
    parameters: Sequence[Tensor],
    synchronize: Callable[[], None],
    were_set: Callable[[Sequence[int]], None],
) -> list[RemovableHandle]:
    """Hooks: whoever saves or loads weights waits for all updates, and `were_set` is told which ones were loaded.

    They are on every module that has weights of its own: a part of the model may be saved or loaded alone.
    """
    index_of = {id(p): i for i, p in enumerate(parameters)}
    hooks: list[RemovableHandle] = []
    for module in model.modules():
        own = [index_of[id(p)] for p in module.parameters(recurse=False) if id(p) in index_of]
        if own:
            loaded = _only(module, lambda own=own: were_set(own))  # type: ignore[misc]
            hooks.append(module.register_state_dict_pre_hook(_only(module, synchronize)))
            hooks.append(module.register_load_state_dict_pre_hook(_only(module, synchronize)))
            hooks.append(module.register_load_state_dict_post_hook(loaded))
    return hooks


def _only(module: nn.Module, act: Callable[[], None]) -> Callable[..., None]:
    """A hook of `module` that does nothing for a copy of it: copies of a module have its hooks."""

    def hook(called: nn.Module, *_: object) -> None:
        if called is module:
            act()

    return hook
