"""State of all parameters in a state dict: whole tensors on the CPU that know nothing of chunks and homes.

The form is torch's, so that a run may change to `torch.optim.AdamW` and back. Moments are saved as they are stored,
rounded or not, with their scales, so that a resumed run continues to the same bits. Converting another format on
loading was rejected: it would change a run without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RecipeError
from penstock.offload.dtensors import local
from penstock.plan.layout import Chunk, StateFormat
from penstock.update.formats import part_of, torch_dtype, view_state
from penstock.update.master import join, split
from penstock.update.rule import Rule

Names = Mapping[str, str]
Groups = Sequence[Mapping[str, Any]]
Entry = Mapping[str, Tensor]
CODES = "_codes"
"""After the name of moments that are whole numbers: torch would take them for the moments themselves."""
_OF_TORCH = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Settings of torch's optimizers that have no meaning here."""


@dataclass(frozen=True)
class Saved:
    """A state dict, checked: what each group has, what every trained parameter has, and the scalars of the rule."""

    groups: list[dict[str, Any]]
    entries: list[Entry]
    scalars: dict[str, Tensor]


def state_dict_of(
    groups: Groups,
    states: Mapping[nn.Parameter, Sequence[tuple[Chunk, Tensor]]],
    scalars: Mapping[str, Tensor],
    names: Names,
) -> dict[str, Any]:
    """The state dict of these groups. `states`: the chunks of every trained parameter, and the bytes of each."""
    on_cpu = {name: tensor.cpu() for name, tensor in scalars.items()}
    numbers = _numbers(groups)
    entries = {}
    for p, where in states.items():
        entries[numbers[p]] = {"step": on_cpu["steps"].float(), **read_state(p, where, names)}
    saved, start = [], 0
    for group in groups:
        end = start + len(group["params"])
        saved.append({**group, "params": list(range(start, end))})
        start = end
    return {"state": entries, "param_groups": saved, **on_cpu}


def _numbers(groups: Groups) -> dict[nn.Parameter, int]:
    """Parameters as torch numbers them, frozen ones too."""
    return {p: number for number, p in enumerate(p for group in groups for p in group["params"])}


def read_state(parameter: Tensor, where: Sequence[tuple[Chunk, Tensor]], names: Names) -> dict[str, Tensor]:
    """The fp32 master and the moments of a parameter, from its chunks and the bytes of each. Of a shard: its part."""
    parameter = local(parameter)
    weight = parameter.view(-1)
    pieces: dict[str, list[Tensor]] = {}
    for chunk, buffer in where:
        view, own = view_state(chunk, buffer), chunk.of(weight)
        master = join(own, view["remainder"].to(own.device)) if own.dtype is torch.bfloat16 else own
        pieces.setdefault("master", []).append(master.cpu())
        for part, tensor in view.moments():
            name = names[part.name] + ("" if tensor.is_floating_point() else CODES)
            pieces.setdefault(name, []).append(tensor.cpu())
    if not where:  # a rank that holds nothing of it
        return {"master": weight.cpu().float().view(parameter.shape)}
    whole = {name: torch.cat(tensors) for name, tensors in pieces.items()}
    return {name: t if name.endswith("scale") else t.view(parameter.shape) for name, t in whole.items()}


def write_state(parameter: Tensor, where: Sequence[tuple[Chunk, Tensor]], entry: Entry, names: Names) -> None:
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
            saved = _moment(entry, names[part.name])
            assert saved is not None, "the format was checked"
            tensor.copy_(part_of(part, saved.reshape(-1), chunk))


def _moment(entry: Entry, name: str) -> Tensor | None:
    return entry.get(name, entry.get(name + CODES))


def read_saved(
    state_dict: Mapping[str, Any], groups: Groups, parameters: Iterable[nn.Parameter], states: StateFormat, rule: Rule
) -> Saved:
    """A state dict of ours, now or before, or of torch's AdamW. One of others is refused before anything is changed.

    `groups` have the parameters that it is for; `parameters` are those that have state, frozen since then or not.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise _other_optimizer()
    own = [{k: v for k, v in group.items() if k != "params"} for group in state_dict["param_groups"]]
    counts = [len(group["params"]) for group in groups]
    if len(own) != len(groups) or counts != [len(g.get("params", here["params"])) for g, here in
                                             zip(state_dict["param_groups"], groups, strict=True)]:  # fmt: skip
        raise _other_parameters()
    numbers = _numbers(groups)
    trained = {p: numbers[p] for p in parameters}
    state = state_dict["state"]
    if isinstance(state, list):  # as it was once: trained parameters in their order
        state = dict(zip(trained.values(), state, strict=True)) if len(state) in (0, len(trained)) else {-1: {}}
    if not set(state) <= set(trained.values()):
        raise _other_parameters()
    if "steps" in state_dict:
        if state and len(state) < len(trained):
            raise _other_parameters()
        entries = [state[number] for number in trained.values()] if state else []
        scalars = {name: tensor for name, tensor in state_dict.items() if name not in ("state", "param_groups")}
    else:
        entries, scalars = _from_torch(state, trained, own, rule)
        own = [{k: v for k, v in group.items() if k not in _OF_TORCH} for group in own]
    _check_entries(entries, list(trained), states, rule)
    return Saved(own, entries, scalars)


def _other_parameters() -> RecipeError:
    return RecipeError(
        "the saved state is of other parameters",
        where="OffloadAdamW",
        remedy="Load it for the model that it was saved of, with as many ranks, the same groups and the same frozen.",
    )


def _other_optimizer() -> RecipeError:
    return RecipeError(
        "this is not the state of an AdamW",
        where="OffloadAdamW",
        remedy="It takes its own state_dict() and that of torch.optim.AdamW; without one, begin with a new optimizer.",
    )


def _from_torch(
    state: Mapping[int, Entry], trained: Mapping[nn.Parameter, int], groups: Groups, rule: Rule
) -> tuple[list[Entry], dict[str, Tensor]]:
    """Entries and step count from the state of torch's AdamW. Parameters that had no gradient yet have none there."""
    moments_of = [name for name in rule.saved_names.values() if not name.endswith("scale")]
    if not all({"step", *moments_of} <= entry.keys() for entry in state.values()):
        raise _other_optimizer()
    for group in groups:
        odd = [name for name in ("amsgrad", "maximize") if group.get(name)]
        if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
            odd.append("a decay that goes through the moments, as in Adam")
        if odd:
            raise RecipeError(
                f"the saved state is of an optimizer with {' and '.join(odd)}",
                where="OffloadAdamW",
                remedy="AdamW's own state can be loaded; without one, begin with a new optimizer.",
            )
    steps = sorted({int(entry["step"]) for entry in state.values()})
    if len(steps) > 1:
        raise RecipeError(
            f"parameters in the saved state have made {steps[0]} to {steps[-1]} steps",
            where="OffloadAdamW",
            remedy="Steps are counted for the whole model here: begin with a new optimizer.",
        )
    entries: list[Entry] = []
    for p, number in trained.items() if state else ():
        weight, found = local(p).cpu(), state.get(number, {})
        moments = {name: local(found[name]).cpu().float() if name in found else torch.zeros_like(weight).float()
                   for name in moments_of}  # fmt: skip
        entries.append({"master": weight.float(), **moments})
    return entries, {"steps": torch.tensor(steps[0] if steps else 0, device="cpu")}


def _check_entries(entries: Sequence[Entry], parameters: Sequence[Tensor], states: StateFormat, rule: Rule) -> None:
    """Refuse state of other shapes or of another format."""
    for p, entry in zip(parameters, entries, strict=False):
        if {t.shape for name, t in entry.items() if name != "step" and not name.endswith("scale")} != {local(p).shape}:
            raise _other_parameters()
    first = states.moments[0].name
    dtypes = {torch_dtype(f.moments[0]): f.name for f in rule.formats.values()}
    for entry in entries:
        saved = _moment(entry, rule.saved_names[first])
        if saved is None:  # this rank holds nothing of the parameter
            continue
        found = dtypes.get(saved.dtype, str(saved.dtype))
        if found != states.name:
            raise RecipeError(
                f"the saved state is {found}",
                where=f"states = {states.name!r}",
                remedy=f"Go on with states = {found}: what was rounded off cannot be brought back.",
            )
