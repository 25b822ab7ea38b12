"""What a training loop may get wrong with the optimizer: each mistake is refused, since it would train on quietly.

The optimizer calls these where it meets the mistake. Documenting them alone was rejected: a loop that clips by itself,
or forgets `accumulate()`, still lowers the loss, and nobody would look for the reason why it is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from penstock.errors import RecipeError
from penstock.flow.lanes import Streams, ToHost
from penstock.offload.dtensors import is_streamed, local
from penstock.offload.trained import Trained, TrainedUnit, refuse_owned
from penstock.plan.layout import HomeName, StateFormat
from penstock.plan.placement import Placement
from penstock.update.norm import Norm


def format_named(name: str, formats: Mapping[str, StateFormat]) -> StateFormat:
    """The format of that name."""
    if name not in formats:
        raise RecipeError("no such format", where=f"states = {name!r}", remedy=f"There are {', '.join(formats)}.")
    return formats[name]


def check_model(model: object) -> None:
    """Refuse what is no module: torch's optimizers are given parameters, this one their model."""
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"the first argument is {type(model).__name__}, not a model",
            where="OffloadAdamW",
            remedy="Pass the model itself: its forward waits for its updates. Parameter groups go into params=.",
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise RecipeError(
            "the model is sharded by FullyShardedDataParallel",
            where="OffloadAdamW",
            remedy="Shard it with torch's fully_shard (FSDP2), whose parameters keep their shapes.",
        )


def _from_zero(value: object) -> bool:
    """Of a number in a tensor it is not asked: that would wait for it."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, float | int) and math.isfinite(value) and value >= 0


def _two_shares(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(_from_zero(beta) and beta < 1 for beta in value)


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), (_from_zero, "A number from 0 on.")),
    "betas": (_two_shares, "Two numbers, each from 0 on and below 1."),
    "max_grad_norm": (lambda value: value == math.inf or _from_zero(value), "A number from 0 on; 0: never clip."),
    "micro_batches": (lambda value: isinstance(value, int) and value > 0, "A whole number from 1 on."),
    "update": (lambda value: value in ("auto", "after-norm", "in-backward"), "auto, after-norm or in-backward."),
    "accumulate_dtype": (lambda value: value in ("fp32", "bf16"), "'fp32' or 'bf16'."),
}


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse settings that would train in a wrong way, or not at all."""
    for name, (good, remedy) in _RANGES.items():
        if name in values and not good(values[name]):
            raise RecipeError("out of range", where=f"{name} = {values[name]!r}", remedy=remedy)


def check_homes(homes: object) -> None:
    """Refuse homes that do not exist, and shares that do not add up."""
    known = get_args(HomeName)
    remedy = f"There are auto, {', '.join(known)}, or shares of them, such as gpu=0.5, stream=0.3, host=0.2."
    shares = homes if isinstance(homes, Mapping) else {homes: 1.0}
    if homes != "auto" and not set(shares) <= set(known):
        wrong = ", ".join(repr(name) for name in shares if name not in known)
        raise RecipeError(f"there is no home {wrong}", where=f"homes = {homes!r}", remedy=remedy)
    if not math.isclose(sum(shares.values()), 1, abs_tol=0.005) or min(shares.values()) < 0:
        raise RecipeError("shares must add up to 1", where=f"homes = {homes!r}", remedy=remedy)


def check_placement(placement: Placement, trained: Trained, format: StateFormat) -> None:
    """Refuse a placement that was made for other parameters, groups in another order, or another format."""
    given = [chunk for chunks in placement.chunks.values() for chunk in chunks]
    sizes = dict.fromkeys(range(len(trained.parameters)), 0)
    for chunk in given:
        sizes[chunk.parameter] = sizes.get(chunk.parameter, 0) + chunk.size
    same = list(sizes.values()) == [local(p).numel() for p in trained.parameters]
    if not same or any(chunk.format != format for chunk in given):
        raise RecipeError(
            "the placement was made for other parameters or another format",
            where="homes",
            remedy="Make it with the same params=, units= and states= as the optimizer.",
        )


def refuse_new_group() -> None:
    """State is placed once: parameters that came later would have none, and never be trained."""
    raise RecipeError(
        "parameters cannot be added to an optimizer that is made",
        where="add_param_group",
        remedy="Make it with all of them: close() this one, and give the groups to a new one with params=.",
    )


def refuse_clipping(max_grad_norm: float) -> None:
    """Of the update in-backward, which has nothing to clip by."""
    if max_grad_norm:
        raise RecipeError(
            "with in-backward the norm is not known when weights are updated",
            where=f"max_grad_norm = {max_grad_norm}",
            remedy="Set max_grad_norm to 0, or use the update after-norm.",
        )


def check_parameters(parameters: Iterable[Tensor], device: torch.device) -> None:
    """Refuse parameters that the kernels cannot take, that are elsewhere than the first one, or another optimizer's."""
    parameters = list(parameters)
    refuse_owned(parameters)
    for p in parameters:
        elsewhere = p.device != device and not is_streamed(p)
        if p.dtype not in (torch.bfloat16, torch.float32) or elsewhere or not p.is_contiguous():
            raise RecipeError(
                f"a parameter of shape {tuple(p.shape)} is {p.dtype} on {p.device}",
                where="OffloadAdamW",
                remedy="It takes contiguous bf16 and fp32 parameters that are all on one device.",
            )


def refuse_misuse(unit: TrainedUnit, *, seen: bool) -> None:
    """Two mistakes that would train quietly in a wrong way. `seen`: the gradient was final in this step already."""
    if seen:
        raise RecipeError(
            "a second backward before step()",
            where="OffloadAdamW",
            remedy="Put `with optimizer.accumulate():` around the backward of every micro-batch but the last, "
            "or set micro_batches to their number. With one backward: a weight that two checkpointed modules share "
            "needs checkpointing with use_reentrant=False.",
        )
    if not unit.was_called:
        raise RecipeError(
            f"the weights of {type(unit.module).__name__} are used without calling that module",
            where="OffloadAdamW",
            remedy="Name the module that is called instead, with units=[...].",
        )


def refuse_skipping() -> None:
    """Of a step in-backward that no `step()` follows."""
    raise RecipeError(
        "with in-backward the weights of this step are updated already, so that it cannot be skipped",
        where="zero_grad",
        remedy="Call step(). Loops that skip steps need the update after-norm: max_grad_norm, or update='after-norm'.",
    )


def refuse_scaler(given: dict[str, Any]) -> None:
    """Of `torch.amp.GradScaler`, which leaves its scale there: gradients are summed up before it would divide them."""
    given.pop("found_inf", None)
    if given.pop("grad_scale", given) is not given:
        raise RecipeError(
            "a GradScaler has scaled the loss",
            where="OffloadAdamW",
            remedy="Train without one: autocast to torch.bfloat16 needs none, and so do weights in bf16.",
        )


def asks_for_state(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Of a step that no backward came before: whether it is of gradients of zero at a rate of zero.

    torch.distributed.checkpoint makes such a step, for the state to be there, whenever it saves or loads an optimizer.
    """
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    no_rate = all(group["lr"] == 0 for group in groups)
    return no_rate and bool(trained) and all(p.grad is not None and not local(p.grad).any() for p in trained)


def refuse_distributed_checkpoint() -> None:
    """It keeps what is said of each parameter, and only that; of shards, as if every rank had the same."""
    raise RecipeError(
        "its state dicts of optimizers do not hold all of this state",
        where="torch.distributed.checkpoint",
        remedy="Save the optimizer's own state_dict() beside the model, of a sharded one a file a rank, "
        "and load it with load_state_dict().",
    )


def refuse_late_ones(frozen: Iterable[Tensor]) -> None:
    """Parameters that were frozen when the optimizer was made, and have a gradient now."""
    if any(p.grad is not None for p in frozen):
        raise RecipeError(
            "a parameter that was frozen has a gradient",
            where="OffloadAdamW",
            remedy="Make the optimizer after requires_grad_(True): state is placed once, for what is trained then.",
        )


def refuse_other_type(gradient: Tensor, trained: Trained, index: int) -> None:
    """Kernels read both as one type, and state was placed for the parameter as it was."""
    parameter, then = trained.parameters[index], trained.types[index]
    if parameter.dtype is not then or gradient.device != trained.device:
        raise RecipeError(
            f"a parameter that was {then} on {trained.device} is {parameter.dtype} on {gradient.device} now",
            where="OffloadAdamW",
            remedy="Convert and move the model first, then make the optimizer.",
        )
    if gradient.dtype is not parameter.dtype:
        raise RecipeError(
            f"a gradient is {gradient.dtype}, its parameter {parameter.dtype}",
            where="OffloadAdamW",
            remedy="Leave the parameter's grad_dtype as it is.",
        )


class Closed:
    """In the place of what an optimizer had before it was closed."""

    def settle(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """It is."""

    def __getattr__(self, name: str) -> Any:
        raise RecipeError(
            "the optimizer is closed: its state is gone",
            where="OffloadAdamW",
            remedy="Call close() last, after state_dict(); to go on training, make a new one.",
        )


def refuse_pickling() -> NoReturn:
    """What torch's optimizers would write is their `state`, and here there is none in it."""
    raise RecipeError(
        "pickled, it would lose its state",
        where="OffloadAdamW",
        remedy="Save its state_dict(); of a model that holds its optimizer, the model's state_dict() too.",
    )


class Copied:
    """In the place of an optimizer, in a copy of what held it: it belongs to the model that it was made for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RecipeError(
            "a copy of an optimizer is none",
            where="OffloadAdamW",
            remedy="Make one for the copied model; state goes over by state_dict() and load_state_dict().",
        )


class Changes:
    """Whether someone changed a gradient between backward and step, as a loop that clips does.

    Writing alone is no change: some loops scale by one to learn the norm. So values are compared, by their sums of
    squares; versions were rejected, since `grad.data` and GradScaler raise none. The device finds it out in `look`. The
    host reads it at once in the first step, before anything is updated, and later a step after. Gradients that are no
    longer there, used or sent to the host, cannot be watched.
    """

    def __init__(self, norm: Norm, streams: Streams) -> None:
        self._norm, self._streams = norm, streams
        self._changed: ToHost | None = None
        self._first = True

    def look(self, watched: Mapping[int, int], parameters: Sequence[Tensor]) -> None:
        """Compare the gradients that are there with what the norm has taken of them. `watched`: where each was."""
        now = {i: parameters[i].grad for i in watched}
        there = {i: local(gradient) for i, gradient in now.items() if gradient is not None}
        if len(there) < len(now) or any(g.data_ptr() != watched[i] for i, g in there.items()):
            raise RecipeError(
                "a gradient was replaced or dropped between backward and step()",
                where="OffloadAdamW",
                remedy="Let the optimizer clip (its max_grad_norm); leave parameters out with requires_grad_(False), "
                "and a whole step with the optimizer's own zero_grad() and the update after-norm.",
            )
        if there:
            differ = self._norm.differ({i: gradient.reshape(-1) for i, gradient in there.items()})
            self._changed = self._streams.to_host(differ)
            if self._first:
                self.refuse()
            self._first = False

    def refuse(self) -> None:
        """A gradient that was changed may have been used already, and the norm is that of before."""
        changed, self._changed = self._changed, None
        if changed is not None and changed.read():
            raise RecipeError(
                "gradients were changed between backward and step()",
                where="OffloadAdamW",
                remedy="Let the optimizer clip (its max_grad_norm) and nobody else: Trainer takes max_grad_norm=0.",
            )
