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
from penstock.plan.layout import Chunk, StateFormat
from penstock.update.formats import part_of, torch_dtype, view_state
from penstock.update.master import join, split
from penstock.update.rule import Rule

Names = Mapping[str, str]


def read_state(parameter: Tensor, where: Sequence[tuple[Chunk, Tensor]], names: Names) -> dict[str, Tensor]:
    """The fp32 master and the moments of a parameter, from its chunks and the bytes of each. Of a shard: its part."""
    parameter = local(parameter)
    weight = parameter.view(-1)
    pieces: dict[str, list[Tensor]] = {}
    for chunk, buffer in where:
        view, own = view_state(chunk, buffer), chunk.of(weight)
        master = join(own, view["remainder"].to(own.device)) if own.dtype is torch.bfloat16 else own
        for name, tensor in (("master", master), *((names[part.name], tensor) for part, tensor in view.moments())):
            pieces.setdefault(name, []).append(tensor.cpu())
    if not where:  # a rank that holds nothing of it
        return {"master": weight.cpu().float().view(parameter.shape)}
    whole = {name: torch.cat(tensors) for name, tensors in pieces.items()}
    return {name: t if name.endswith("scale") else t.view(parameter.shape) for name, t in whole.items()}


def write_state(
    parameter: Tensor, where: Sequence[tuple[Chunk, Tensor]], entry: Mapping[str, Tensor], names: Names
) -> None:
    """Take it back, and the working weight with it."""
    flat = local(parameter).view(-1)
    for chunk, buffer in where:
        view = view_state(chunk, buffer)
        weight = chunk.of(entry["master"].reshape(-1))
        if flat.dtype is torch.bfloat16:
            weight, remainder = split(weight)
            view["remainder"].copy_(remainder)
        chunk.of(flat).copy_(weight)
        for part, tensor in view.moments():
            tensor.copy_(part_of(part, entry[names[part.name]].reshape(-1), chunk))


def check_saved(
    entries: Sequence[Mapping[str, Tensor]], parameters: Sequence[Tensor], states: StateFormat, rule: Rule
) -> None:
    """Refuse state of other parameters or of another format, before anything is changed."""
    shapes = [entry["master"].shape for entry in entries]
    if entries and shapes != [local(p).shape for p in parameters]:
        raise RecipeError(
            "the saved state is of other parameters",
            where="OffloadAdamW",
            remedy="Load it for the model that it was saved of, with as many ranks and the same ones frozen.",
        )
    first = states.moments[0].name
    dtypes = {torch_dtype(f.moments[0]): f.name for f in rule.formats.values()}
    for entry in entries:
        saved = entry.get(rule.saved_names[first])
        if saved is None:  # this rank holds nothing of the parameter
            continue
        found = dtypes.get(saved.dtype, str(saved.dtype))
        if found != states.name:
            raise RecipeError(
                f"the saved state is {found}",
                where=f"states = {states.name!r}",
                remedy=f"Go on with states = {found}: what was rounded off cannot be brought back.",
            )
