"""Units: weights that forward needs together, so that they are updated, moved and waited for together.

Found from the structure of any module tree, never from a table of model names: the elements of every list of modules
(or modules that are named), then each module with weights of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class Unit:
    """One module and its trainable weights."""

    name: str
    """The module's path in the model."""
    module: nn.Module
    """Before it runs, the unit's weights must be ready."""
    parameters: tuple[nn.Parameter, ...]
    """Trainable ones. A tied weight is in the first unit that needs it."""


def find_units(model: nn.Module, chosen: Iterable[nn.Module] | None = None) -> list[Unit]:
    """The units in the order of registration, which nearly always is that of forward.

    If FSDP2 has sharded the model, units are what it gathers at once, since a gather must find every weight updated.
    """
    containers = (nn.ModuleList, nn.ModuleDict)  # never called themselves, so no unit either
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    elements = (e for modules in lists for e in modules if not isinstance(e, containers))
    whole = set(elements if chosen is None else chosen)
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    found: list[Unit] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if sharded and not isinstance(module, FSDPModule):
            continue
        own = gathered_with(module) if sharded else module.parameters(recurse=module in whole)
        fresh = tuple({id(p): p for p in own if p.requires_grad and id(p) not in seen}.values())
        seen.update(map(id, fresh))
        if fresh:
            found.append(Unit(name, module, fresh))
    return found


def gathered_with(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of an FSDP2 module that no FSDP2 module within it has."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from gathered_with(child)
