"""Which products of a model run in fp8: of the linear layers of all decoder layers but the first and the last.

The head, the embedding, norms and attention never do. Neither do routers, whose choice of experts one rounding
changes, nor experts: their weights are grouped products, for which the field has no fp8 that is more than a prototype.
A linear layer with a side that is no multiple of sixteen stays as it is, since tensor cores do not take it; what stays
is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from penstock.errors import RecipeError, counted
from penstock.model.decoder import find_decoder
from penstock.model.flops import flops_per_token, num_experts
from penstock.model.fp8 import Fp8Linear
from penstock.model.load_rows import build_on_meta
from penstock.plan.architecture import no_fp8
from penstock.recipe.recipe import FP8_MULTIPLE, Recipe, fp8_layers

FIRST_CAPABILITY = (8, 9)
"""Ada's: the first tensor cores that multiply fp8."""
_ROUTERS = ("gate", "router")


@dataclass(frozen=True)
class Chosen:
    """What of a model runs in fp8."""

    linears: tuple[nn.Linear, ...]
    refused: tuple[str, ...]
    """Linear layers that do not allow it: their names in their layer, with shape or class."""
    experts: int
    """Weights of experts that a token is multiplied with, in all layers."""


def choose(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Chosen:
    """Look at every linear layer of some decoder layers."""
    linears, refused, experts = list[nn.Linear](), list[str](), 0
    config = model.config.get_text_config()
    for layer in layers:
        experts += sum(p.numel() for name, p in layer.named_parameters() if "experts" in name.split("."))
        for name, module in layer.named_modules():
            if not isinstance(module, nn.Linear) or _routes(name, module, config):
                continue
            if not (type(module) is nn.Linear or isinstance(module, Fp8Linear)):
                refused.append(f"{name} ({type(module).__name__})")  # it may compute something of its own
            elif any(side % FP8_MULTIPLE for side in module.weight.shape):
                refused.append(f"{name} ({module.out_features} x {module.in_features})")
            else:
                linears.append(module)
    if experts:
        experts = int(experts * config.num_experts_per_tok / num_experts(config))
    return Chosen(tuple(linears), tuple(refused), experts)


def _routes(name: str, module: nn.Linear, config: PreTrainedConfig) -> bool:
    """Whether a linear layer is of experts, or chooses among them, or how much of one is taken."""
    *path, own = name.split(".")
    chooses = own.removeprefix("shared_expert_") in _ROUTERS or module.out_features in (1, num_experts(config))
    return "experts" in path or bool(num_experts(config) and chooses)


def inner(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of a decoder's layers whose products may run in fp8."""
    return [layers[number] for number in fp8_layers(len(layers))]


def set_matmul(model: PreTrainedModel, layers: Sequence[nn.Module], matmul: str) -> None:
    """Let the products of these layers run in fp8, or as they are written."""
    for module in (module for layer in layers for module in layer.modules()):
        if type(module) is Fp8Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
    if matmul == "fp8":
        for linear in choose(model, layers).linears:
            linear.__class__ = Fp8Linear


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies fp8 numbers itself. AMD's have another type, which is not there yet."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def check_matmul(recipe: Recipe, config: PreTrainedConfig, device: torch.device) -> None:
    """Refuse fp8 where the GPU or the model has no such products, before a weight is loaded."""
    if recipe.matmul != "fp8":
        return
    use_bf16 = "Use --matmul bf16."
    if device.type == "cuda" and not has_fp8(device):
        name, capability = (
            torch.cuda.get_device_name(device),
            ".".join(map(str, torch.cuda.get_device_capability(device))),
        )
        what = f"Penstock has no fp8 products for {name} (compute capability {capability})"
        remedy = f"{use_bf16} It has them for NVIDIA's GPUs from Ada (8.9) on."
        raise RecipeError(what, where="matmul = 'fp8'", remedy=remedy)
    model = build_on_meta(recipe, config, torch.bfloat16, lambda model: model.tie_weights())
    layers = inner(find_decoder(model).layers)
    chosen = choose(model, layers)
    if not chosen.linears:
        others = ", ".join(sorted(set(chosen.refused)))
        found = (
            f"both sides must be multiples of {FP8_MULTIPLE}: {others}" if others else "its layers have no nn.Linear"
        )
        raise no_fp8(recipe.model, found if layers else "")


def describe(model: PreTrainedModel, layers: Sequence[nn.Module], recipe: Recipe, device: torch.device) -> str:
    """What runs in fp8 now and what does not. From the modules as they are, not from what was asked for."""
    running = [m for layer in layers for m in layer.modules() if isinstance(m, Fp8Linear)]
    chosen, plain = choose(model, inner(layers)), "fp32" if recipe.dtype == "fp32" else "bf16"
    experts = choose(model, layers).experts
    each = 6 / flops_per_token(model, recipe.max_length)
    share = each * sum(linear.weight.numel() for linear in running)
    found = (
        f"fp8: {counted(len(running), 'linear layer')}, {counted(3 * len(running), 'product')} a micro-batch, "
        f"{share:.0%} of the step's FLOPs with rows of {recipe.max_length:,} tokens; "
        f"the first and the last layer, head, embedding, norms and attention stay {plain}"
    )
    if experts:
        found += f"; experts stay {plain} ({each * experts:.0%} of the FLOPs), and so do routers"
    if chosen.refused:
        kinds, count = ", ".join(sorted(set(chosen.refused))), counted(len(chosen.refused), "linear layer")
        found += f"; {count} too, since both sides must be multiples of {FP8_MULTIPLE}: {kinds}"
    if device.type == "cpu":
        found += "; emulated on this CPU: the same casts, products in fp32, slower than without"
    return found
