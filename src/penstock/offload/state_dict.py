"""State of a parameter in a state dict: whole tensors on the CPU that know nothing of chunks and homes.

Moments are saved as they are stored, rounded or not, with their scales, so that a resumed run continues to the same
bits. Converting another format on loading was rejected: it would change a run without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.errors import RecipeError
from penstock.offload.dtensors import local
from penstock.offload.homes import Chunk
from penstock.update.formats import FORMATS, StateFormat
from penstock.update.kernels import join, split

NAMES = {
    "first": "exp_avg",
    "second": "exp_avg_sq",
    "first_scale": "exp_avg_scale",
    "second_scale": "exp_avg_sq_scale",
}
"""Parts of a state by their names in a state dict: torch's own, where it has one."""


def read_state(parameter: Tensor, where: Sequence[tuple[Chunk, Tensor]]) -> dict[str, Tensor]:
    """The fp32 master and the moments of a parameter, from its chunks and the bytes of each. Of a shard: its part."""
    parameter = local(parameter)
    weight = parameter.view(-1)
    pieces: dict[str, list[Tensor]] = {}
    for chunk, buffer in where:
        view, own = chunk.view(buffer), chunk.of(weight)
        master = join(own, view.remainder.to(own.device)) if chunk.dtype is torch.bfloat16 else own
        for name, tensor in (("master", master), *((NAMES[part.name], tensor) for part, tensor in view.moments())):
            pieces.setdefault(name, []).append(tensor.cpu())
    if not where:  # a rank that holds nothing of it
        return {"master": weight.cpu().float().view(parameter.shape)}
    whole = {name: torch.cat(tensors) for name, tensors in pieces.items()}
    return {name: t if name.endswith("scale") else t.view(parameter.shape) for name, t in whole.items()}


def write_state(parameter: Tensor, where: Sequence[tuple[Chunk, Tensor]], entry: Mapping[str, Tensor]) -> None:
    """Take it back, and the working weight with it."""
    parameter = local(parameter)
    for chunk, buffer in where:
        view = chunk.view(buffer)
        master = chunk.of(entry["master"].reshape(-1))
        weight, remainder = split(master) if chunk.dtype is torch.bfloat16 else (master, view.remainder)
        chunk.of(parameter.view(-1)).copy_(weight)
        view.remainder.copy_(remainder)
        for part, tensor in view.moments():
            tensor.copy_(part.of(entry[NAMES[part.name]].reshape(-1), chunk.start, chunk.size))


def check_saved(entries: Sequence[Mapping[str, Tensor]], parameters: Sequence[Tensor], states: StateFormat) -> None:
    """Refuse state of other parameters or of another format, before anything is changed."""
    shapes = [entry["master"].shape for entry in entries]
    if entries and shapes != [local(p).shape for p in parameters]:
        raise RecipeError(
            "the saved state is of other parameters",
            where="OffloadAdamW",
            remedy="Load it for the model that it was saved of, with as many ranks and the same ones frozen.",
        )
    for entry in entries:
        if "exp_avg" not in entry:  # this rank holds nothing of the parameter
            continue
        found = next((f.name for f in FORMATS.values() if f.first == entry["exp_avg"].dtype), entry["exp_avg"].dtype)
        if found != states.name:
            raise RecipeError(
                f"the saved state is {found}",
                where=f"states = {states.name!r}",
                remedy=f"Go on with states = {found}: what was rounded off cannot be brought back.",
            )
