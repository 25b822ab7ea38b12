"""Parameters that FSDP2 has sharded, as the optimizer sees them: the local part, and where in the whole it lies.

FSDP2 gives every rank some rows of each parameter, in a DTensor; a small parameter may leave a rank with none. All of
the optimizer works on local tensors, which for a parameter that is not sharded is the parameter itself, so one path
serves one GPU and many. Of a parameter whose weights stream, it is those in host memory, where they are updated.
Letting DTensor do the arithmetic was rejected: every operation would ask it how to run.
"""

from __future__ import annotations

import itertools
import socket
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import RecipeError
from penstock.flow.lanes import Mark
from penstock.plan.layout import StateFormat

_AT_HOME = WeakIdKeyDictionary()
"""Of parameters that stream, their bytes in host memory."""


def lies_at(parameter: nn.Parameter, home: Tensor) -> None:
    """The parameter streams: whatever it points at while it computes, its weights are updated at `home`."""
    _AT_HOME[parameter] = home


def lies_here(parameter: nn.Parameter) -> None:
    """It does not stream any more."""
    _AT_HOME.pop(parameter, None)


def is_streamed(parameter: Tensor) -> bool:
    """Whether its weights lie in host memory, and on the device only while they compute."""
    return parameter in _AT_HOME


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, where it lives, without autograd; writing to it writes to the tensor."""
    if (home := _AT_HOME.get(tensor)) is not None:
        at_home: Tensor = home
        return at_home
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # detaching a DTensor is an operation that it thinks about
            return tensor.to_local()
    return tensor.detach()


def local_start(tensor: Tensor) -> int:
    """Index of the first local element in the whole tensor."""
    return extents(tensor)[dist.get_rank(tensor.device_mesh.get_group())][0] if isinstance(tensor, DTensor) else 0


def extents(tensor: Tensor) -> list[tuple[int, int]]:
    """Of every rank, where its elements begin in the whole tensor and how many there are."""
    if not isinstance(tensor, DTensor):
        return [(0, tensor.numel())]
    if tensor.device_mesh.ndim != 1 or tensor.placements != (Shard(0),):
        raise RecipeError(
            f"a parameter of shape {tuple(tensor.shape)} is placed as {tensor.placements}",
            where="OffloadAdamW",
            remedy="It takes parameters that FSDP2 has sharded by rows over one mesh, fully_shard's default.",
        )
    rows, ranks = tensor.shape[0], tensor.device_mesh.size()
    each, row = -(-rows // ranks), tensor.numel() // max(1, rows)
    starts = [min(rank * each, rows) * row for rank in range(ranks + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(starts)]


def group_of(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks among which a tensor is sharded."""
    return tensor.device_mesh.get_group() if isinstance(tensor, DTensor) else None


def all_say(yes: bool, sharded: Tensor) -> bool:
    """Whether all ranks among which a tensor is sharded say yes."""
    votes = torch.tensor(float(yes), device=sharded.device)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group_of(sharded))
    return bool(votes)


def share_of_host(available: int, tensor: Tensor) -> int:
    """Of bytes that this machine has available, those that this rank may take.

    Ranks ask each other before any of them takes some: what the others have taken already is not there to be shared.
    """
    group, host = group_of(tensor), socket.gethostname()
    if group is None:
        return available
    found: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(found, (host, available), group)
    here = [of_rank for name, of_rank in found if name == host]
    return min(here) // len(here)


def check_blocks(parameters: Iterable[Tensor], states: StateFormat) -> None:
    """Refuse a format whose blocks the ranks would cut.

    A block has one scale. Counting blocks from the start of each shard was rejected: what is saved on two ranks would
    then have other scales than on one, and could not be read there to the same bits.
    """
    for p in parameters:
        if any(start % states.block for start, size in extents(p) if size):
            raise RecipeError(
                f"{len(extents(p))} ranks would cut a parameter of shape {tuple(p.shape)} "
                f"within a block of {states.block} elements, which share a scale",
                where=f"states = {states.name!r}",
                remedy="Use --states bf16 or fp32, or another number of ranks.",
            )


class BeforeGather:
    """Acts before FSDP2 gathers any weights of a group, which may be long before the modules that it wraps are called.

    Weights of several modules that were sharded together come with the first of them, and those that are prefetched
    come in the forward of another one.
    """

    def __init__(self, group: Any, act: Callable[[], None]) -> None:
        self._group = weakref.ref(group)  # which leads to the model; what it had instead is kept there
        gather, before = group.unshard, vars(group).get("unshard")

        def unshard(async_op: bool = False) -> None:
            act()
            gather(async_op)

        group.unshard, unshard.before = unshard, before  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Act no more. Of those of one group, all are removed."""
        if (group := self._group()) is not None:
            before = group.unshard.before
            del group.unshard
            if before is not None:
                group.unshard = before


def gathered_groups(module: nn.Module) -> list[Any]:
    """FSDP2's groups of weights that are gathered for a module's forward."""
    if not isinstance(module, FSDPModule):
        return []
    state = cast(Any, module._get_fsdp_state())
    several = getattr(state, "_fsdp_param_groups", None)  # of newer torch
    return list(several) if several is not None else [group for group in [state._fsdp_param_group] if group]


def gather_again(modules: Iterable[nn.Module]) -> None:
    """Weights were written where they are sharded: what FSDP2 still holds gathered is old."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_waits(module: nn.Module, mark: Mark) -> None:
    """FSDP2's next all-gather of the module reads its shards after `mark`.

    FSDP2 copies shards for the all-gather on a stream of its own, which waits for the main stream when the whole model
    is called and not again for each module: without this a gather would read weights that an update is still writing.
    Its public `set_post_optim_event` was rejected: that has the first gather wait for the last update.
    """
    if isinstance(module, FSDPModule):
        context = module._get_fsdp_state()._comm_ctx
        mark.hold(getattr(context, "all_gather_copy_in_stream", None))
