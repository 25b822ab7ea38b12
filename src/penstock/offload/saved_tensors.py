"""Optimizer state as named tensors, for whoever saves or restores it.

A tensor here is one parameter's, whole, whatever its homes and however it is cut. It is reached through pieces: views
of where the elements lie, one a chunk. So nothing is copied to look at it, saving needs no memory that grows with the
model, and what was saved under one placement is restored under any other. `state_dict` was rejected for this: it
gathers everything on the host, which for a model worth offloading does not fit there.

Which tensors there are is the state format's business: its parts, laid one after another over a parameter's chunks, are
the same for every chunk size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.offload.dtensors import extents, local
from penstock.update.formats import torch_dtype

if TYPE_CHECKING:
    from penstock.offload.optimizer import OffloadOptimizer


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """A tensor and where its elements lie."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Tensor, ...]
    """Flat views whose elements, one piece after another, are those of the tensor. Writing to them sets it."""
    bytes_by_rank: tuple[int, ...] = ()
    """Of a tensor that is sharded: what each rank holds of it, in the order of the elements; `pieces` is this rank's
    part. Empty for one that every rank holds whole."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces, on all ranks."""
        return sum(self.bytes_by_rank) or sum(piece.nbytes for piece in self.pieces)


def whole(name: str, tensor: Tensor) -> SavedTensor:
    """A contiguous tensor that lies in one piece, or in one piece a rank."""
    own = local(tensor)
    assert own.is_contiguous(), f"{name} is written where it lies"
    by_rank = tuple(size * tensor.itemsize for _, size in extents(tensor)) if own is not tensor else ()
    return SavedTensor(name, tuple(tensor.shape), tensor.dtype, (own.view(-1),), by_rank if len(by_rank) > 1 else ())


def weight_tensors(model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> list[SavedTensor]:
    """Every weight under its name, tied ones once, frozen ones too, and the buffers that a model itself would save.

    `weights`: the same under the same names, where the model's own parameters are only what stands for them.
    """
    lasting = model.state_dict(keep_vars=True).keys()  # without: a DTensor whose rows lie elsewhere cannot be detached
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in lasting}
    found = dict(model.named_parameters()) if weights is None else weights
    return [whole(name, tensor) for name, tensor in {**found, **buffers}.items()]


def state_tensors(optimizer: OffloadOptimizer, names: Mapping[nn.Parameter, str]) -> list[SavedTensor]:
    """Every tensor of the state, named after its parameter. To be read or written before the next backward."""
    found = [whole(name, tensor) for name, tensor in optimizer.scalar_state().items()]
    for parameter, views in optimizer.chunk_states():
        sizes = [size for _, size in extents(parameter)]
        for part in optimizer.format.parts(parameter.itemsize):
            pieces = tuple(view[part.name] for view in views)
            shape = tuple(parameter.shape) if part.elements == 1 else (part.count(parameter.numel()),)
            name = f"{names[parameter]}.{optimizer.saved_names.get(part.name, part.name)}"
            by_rank = tuple(part.num_bytes(size) for size in sizes) if len(sizes) > 1 else ()
            found.append(SavedTensor(name, shape, torch_dtype(part), pieces, by_rank))
    return found
