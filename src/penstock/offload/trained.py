"""The parameters that are trained: numbered, with the units that wait for them, and the hooks by which the model tells.

A unit's forward must wait for the updates of its parameters, and so must whoever saves, loads or copies weights.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import RecipeError
from penstock.flow.lanes import Mark, Streams
from penstock.model.units import find_units
from penstock.offload.dtensors import BeforeGather, gather_waits, gathered_groups, is_streamed, local, local_start
from penstock.offload.giving import Given
from penstock.plan.layout import Chunk, StateFormat


@dataclass
class Updates:
    """The updates of a unit in one step."""

    given: Given | None = None
    """None: there were none."""
    waited: set[int] = field(default_factory=set)
    """Streams, or threads where there are none, that have waited for them."""

    @property
    def made(self) -> list[Future[Mark]]:
        """One a chunk, once all of them are with their homes."""
        return [] if self.given is None else self.given.result()


@dataclass
class TrainedUnit:
    """A unit as the optimizer sees it: the numbers of its parameters, and what its next forward must wait for."""

    module: nn.Module
    parameters: tuple[int, ...]
    updates: Updates = field(default_factory=Updates)

    def wait(self, streams: Streams) -> None:
        """What calls goes on only after this unit's update: each thread and each stream for itself."""
        updates, caller = self.updates, streams.caller()
        if updates.given is None or caller in updates.waited:
            return
        failed = updates.given.exception()
        with streams.timeline.on_device("wait"):
            for update in [] if failed else updates.made:
                failed = failed or update.exception()  # which waits too: the others still write weights
                if update.exception() is None:
                    streams.main_waits(update.result())
                    gather_waits(self.module, update.result())
        updates.waited.add(caller)
        if failed is not None:
            updates.given = None  # it is told of once
            raise failed

    def settle(self) -> None:
        """Return once this unit's weights are those of the last step, where they live."""
        for update in self.updates.made:
            update.result().wait_on_host()

    @property
    def was_called(self) -> bool:
        """Whether somebody has waited for the last updates."""
        return bool(self.updates.waited) or self.updates.given is None


@dataclass(frozen=True)
class Trained:
    """All of them."""

    parameters: tuple[nn.Parameter, ...]
    units: tuple[TrainedUnit, ...]
    """In the order of forward."""
    device: torch.device
    """Where they compute."""
    types: tuple[torch.dtype, ...]
    """Of the parameters, as they were when this was found out."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has sharded them."""
        return isinstance(self.parameters[0], DTensor)

    @property
    def replicated(self) -> bool:
        """Whether other ranks may hold them too, as under DistributedDataParallel."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not self.sharded

    @property
    def streamed(self) -> frozenset[int]:
        """Those whose weights lie in host memory."""
        return frozenset(index for index, p in enumerate(self.parameters) if is_streamed(p))

    def deadlines(self) -> list[int]:
        """By parameter, the number of its unit."""
        found = [0] * len(self.parameters)
        for number, unit in enumerate(self.units):
            for index in unit.parameters:
                found[index] = number
        return found

    def unit_of_streamed(self) -> dict[int, int]:
        """The same of those whose weights lie in host memory alone."""
        deadlines = self.deadlines()
        return {index: deadlines[index] for index in self.streamed}

    def whole_chunks(self, format: StateFormat) -> list[Chunk]:
        """Every parameter, or this rank's shard of it, as one chunk, in the order of forward."""
        found = []
        for index in (index for unit in self.units for index in unit.parameters):
            p = self.parameters[index]
            found.append(Chunk(index, 0, local(p).numel(), format, p.itemsize, local_start(p)))
        return found


def find_trained(
    model: nn.Module, groups: Iterable[Mapping[str, Any]] | None, chosen: Iterable[nn.Module] | None
) -> Trained:
    """Parameters of the groups in their order, or all that are trainable, with the units that hold them.

    `chosen`: modules that are called as a whole, if those are not the elements of each ModuleList.
    """
    if groups is None:
        groups = [{"params": list(model.parameters())}]
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    if not parameters:
        remedy = "Call requires_grad_(True) on what is to be trained, then make the optimizer."
        raise RecipeError("no parameter is trainable: all are frozen", where="OffloadAdamW", remedy=remedy)
    index_of = {id(p): i for i, p in enumerate(parameters)}
    chosen = None if chosen is None else list(chosen)
    if chosen and not set(chosen) <= set(model.modules()):
        remedy = "Give modules themselves, not their names: units=model.layers."
        raise RecipeError("not all of them are modules of the model", where="units", remedy=remedy)
    units = []
    for unit in find_units(model, chosen):
        indices = tuple(index_of.pop(id(p)) for p in unit.parameters if id(p) in index_of)
        if indices:
            units.append(TrainedUnit(unit.module, indices))
    if index_of:
        what = f"{len(index_of)} of the parameters to train are not in the model"
        raise RecipeError(what, where="params", remedy="Give the model that they belong to, or leave params out.")
    # Frozen ones may be elsewhere; they are asked where all that is trained streams.
    resident = (p.device for p in (*parameters, *model.parameters()) if not is_streamed(p))
    types = tuple(p.dtype for p in parameters)
    return Trained(tuple(parameters), tuple(units), next(resident, parameters[0].device), types)


class Hook:
    """What the model calls, for one module only: a shallow copy of a module has its hooks too.

    Saved with its model, or copied, it is nothing: an optimizer belongs to the model that it was made for.
    """

    def __init__(self, module: nn.Module | None, act: Callable[..., None], *, is_told: bool = False) -> None:
        """`is_told`: `act` gets what torch tells of the call."""
        self._module, self._act = weakref.ref(module) if module is not None else None, act
        self._is_told = is_told

    def __call__(self, called: object, *told: object) -> None:
        """Act, if it is that module that is called."""
        if self._module is None or called is self._module():
            self._act(*(told if self._is_told else ()))

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: object) -> None:
    pass


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A method of an object that may be dropped: then it does nothing, and it does not keep the object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


def attach(
    model: nn.Module, trained: Trained, streams: Streams, gradient_came: Callable[[int], None]
) -> list[RemovableHandle | BeforeGather]:
    """Hooks: a unit's forward waits for its update, and `gradient_came` is told of every gradient, by its number.

    A module of another unit that has one of its weights too waits as well: it may be called first. No hook of a
    parameter may lead to the model: torch holds it where Python does not look for cycles.
    """
    hooks: list[RemovableHandle | BeforeGather] = []
    came = weakly(gradient_came)
    for unit in trained.units:
        hooks += [BeforeGather(group, functools.partial(unit.wait, streams)) for group in gathered_groups(unit.module)]
        wait = Hook(unit.module, functools.partial(unit.wait, streams))
        # First of the module's hooks: FSDP2 gathers the weights in one of its own, and would gather the old ones.
        hooks.append(unit.module.register_forward_pre_hook(wait, prepend=True))
        for module in _others_with(model, unit, [trained.parameters[index] for index in unit.parameters]):
            wait = Hook(module, functools.partial(unit.wait, streams))
            hooks.append(module.register_forward_pre_hook(wait, prepend=True))
        for index in unit.parameters:
            told = Hook(None, functools.partial(came, index))
            hooks.append(trained.parameters[index].register_post_accumulate_grad_hook(told))
    return hooks


def _others_with(model: nn.Module, unit: TrainedUnit, parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Modules outside of a unit that have a weight of it by another name."""
    tied, within = {id(p) for p in parameters}, set(unit.module.modules())
    return [
        module
        for module in model.modules()
        if module not in within and any(id(p) in tied for p in module._parameters.values())
    ]


class Loading:
    """Loading weights into a module. torch calls its hooks for keys of other modules too, and for some of its own.

    Whatever is not known to be missing counts as loaded. Looking the names up in the state dict beforehand was
    rejected: other hooks may still rename its keys.
    """

    def __init__(
        self, own: Mapping[str, int], synchronize: Callable[..., None], were_set: Callable[[Sequence[int]], None]
    ) -> None:
        """`own`: the numbers of the module's parameters by their names in it."""
        self._own, self._synchronize, self._were_set = own, synchronize, were_set
        self._prefix = ""

    def begins(self, _: object, prefix: str, *__: object) -> None:
        """Updates come to their end first."""
        self._prefix = prefix
        self._synchronize()

    def ended(self, keys: Any) -> None:
        """`keys`: those that the state dict lacks or has beyond the model, in torch's form."""
        missing = set(keys.missing_keys)
        if loaded := [index for name, index in self._own.items() if self._prefix + name not in missing]:
            self._were_set(loaded)


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
    synchronize, were_set = weakly(synchronize), weakly(were_set)
    for module in model.modules():
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        own = {name: index_of[id(p)] for name, p in named if id(p) in index_of}
        if own:
            loading = Loading(own, synchronize, were_set)
            hooks.append(module.register_state_dict_pre_hook(Hook(module, synchronize)))
            hooks.append(module.register_load_state_dict_pre_hook(Hook(module, loading.begins, is_told=True)))
            hooks.append(module.register_load_state_dict_post_hook(Hook(module, loading.ended, is_told=True)))
    return hooks


_OWNERS = WeakIdKeyDictionary()
"""Of parameters, the optimizer that updates them, weakly."""


def refuse_owned(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters that another optimizer still updates."""
    owners = [owner for p in parameters if (owner := _OWNERS.get(p)) is not None]
    if any(owner() is not None for owner in owners):
        gc.collect()  # one that was dropped with something that refers to itself, as a trainer does, is still there
    if any(owner() is not None for owner in owners):
        raise RecipeError(
            "another OffloadAdamW updates these parameters",
            where="OffloadAdamW",
            remedy="close() that one first: both would write the weights.",
        )


def claim(parameters: Iterable[nn.Parameter], optimizer: object) -> None:
    """From here on they are this optimizer's: last in its making, so that one that was refused holds none of them."""
    for p in parameters:
        _OWNERS[p] = weakref.ref(optimizer)


def let_go(parameters: Iterable[nn.Parameter]) -> None:
    """Nobody updates them any more."""
    for p in parameters:
        _OWNERS.pop(p, None)
