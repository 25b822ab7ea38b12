"""Units that stream, on several ranks: each rank's rows lie in its host memory, and a gather brings them in.

FSDP2 gathers a unit from the rows that every rank has on its device. Of a unit that streams that memory is given back,
all but while a gather reads it: before, it is asked for again and the rows come from host memory, on the stream that
the gather reads them on, which waits for their update (`gather_waits`). So what is on the device is one gathered unit,
the next one, and its rows. FSDP2's own offload to the CPU was rejected: it takes gradients down too, each one whole and
waited for, where `OffloadAdamW` sends them chunk by chunk to where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from penstock.flow.arena import WEIGHTS, Arena
from penstock.flow.transfers import Link
from penstock.machine.hardware import near_cores
from penstock.offload.dtensors import lies_at, lies_here, local
from penstock.plan.layout import padded


class _Shard:
    """This rank's rows of one layer."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.parameters, self._gathered = tuple(layer.parameters()), list[tuple[Tensor, int]]()
        rows = [local(p) for p in self.parameters]
        self.num_bytes = sum(padded(x.nbytes) for x in rows)
        # One arena a unit: while they are filled, no more than one unit is in host memory twice.
        pinned, cores = device.type == "cuda", near_cores(device)
        self._arena = Arena(self.num_bytes, pinned=pinned, cores=cores, what=WEIGHTS)
        self._at_home = [self._arena.cut(x.nbytes).view(x.dtype).view(x.shape) for x in rows]
        for home, x in zip(self._at_home, rows, strict=True):
            home.copy_(x)
        del rows
        # Parameters stay themselves, on the device; buffers are small, and not trained.
        layer._apply(lambda t: torch.empty_like(t, device=device) if isinstance(t, DTensor) else t.to(device))

    def leave(self, group: Any) -> None:
        """The rows lie in host memory from here on, and that is where whoever reads a parameter finds them."""
        memory = {param.sharded_param: param._sharded_param_data for param in group.fsdp_params}
        for p, home in zip(self.parameters, self._at_home, strict=True):
            flat = memory[p]  # what FSDP2 gathers; where rows are missing on the last rank, it is longer than they are
            self._gathered.append((flat[: home.numel()], flat.untyped_storage().size()))
            lies_at(p, home)
            p._local_tensor = home  # type: ignore[attr-defined]
        self.give_back()

    def bring(self) -> None:
        """Ask for memory on the device, and let the rows come, on the current stream."""
        assert self._gathered, "the weights were given back: nobody calls the model any more"
        for (flat, size), home in zip(self._gathered, self._at_home, strict=True):
            flat.untyped_storage().resize_(size)
            flat.copy_(home.view(-1), non_blocking=True)

    def give_back(self) -> None:
        """What the current stream was given before was the last to read them there."""
        for flat, _ in self._gathered:
            flat.untyped_storage().resize_(0)

    def close(self) -> None:
        """Give the arena back; the parameters keep the memory alive that they point at."""
        self._gathered.clear()
        for p in self.parameters:
            lies_here(p)
        self._arena.close()


class StreamedShards:
    """The layers that stream, of which every rank brings its rows in where FSDP2 gathers them."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], link: Link) -> None:
        """Whatever of the model does not stream goes to the device."""
        assert isinstance(model, FSDPModule), "ranks have sharded it"
        self._layers, self._timeline, self._device = tuple(layers), link.streams.timeline, link.streams.device
        with torch.no_grad():
            model._get_fsdp_state()._lazy_init()  # or a first forward would, and gather from where the rows lie then
            self._shards = [self._leaving(layer) for layer in layers]
            inside = {part for layer in layers for part in layer.modules()}
            for module in reversed([part for part in model.modules() if part not in inside]):  # parts before wholes
                module._apply(lambda t: t.to(self._device), recurse=False)
        self.num_bytes = sum(shard.num_bytes for shard in self._shards)

    def _leaving(self, layer: nn.Module) -> _Shard:
        """Layer by layer: the device need not hold the rows of more than one."""
        assert isinstance(layer, FSDPModule), "layers are gathered one by one"
        shard, group = _Shard(layer, self._device), cast(Any, layer._get_fsdp_state()._fsdp_param_group)
        shard.leave(group)
        group.unshard = self._bringing(shard, group)
        return shard

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those that stream, trained or frozen."""
        return {p for shard in self._shards for p in shard.parameters}

    def describe(self) -> str:
        """How much of what lies where, in words."""
        return f"{len(self._layers)} layers stream: {self.num_bytes / 1e9:,.2f} GB of weights in host memory"

    def forget(self) -> None:
        """Weights were written in host memory, from where they come for every gather."""

    def close(self) -> None:
        """Give the memory back. Nobody calls the model any more."""
        for shard in self._shards:
            shard.close()

    def _bringing(self, shard: _Shard, group: Any) -> Callable[..., None]:
        gather = group.unshard

        def unshard(async_op: bool = False) -> None:
            if group.is_unsharded or group._all_gather_result is not None:
                gather(async_op)  # which does nothing
                return
            stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]
            with self._on(stream), torch.no_grad(), self._timeline.on_device("weights"):
                shard.bring()
            gather(async_op)
            with self._on(stream):
                shard.give_back()

        return unshard

    def _on(self, stream: Any) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream) if self._device.type == "cuda" else nullcontext()
