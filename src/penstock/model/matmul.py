"""Which products of a model run in fp8: of the linear layers of all decoder layers but the first and the last.

The head, the embedding, norms and attention never do. Neither do routers, whose choice of experts one rounding changes,
nor experts, whose products are grouped. torch 2.13 has a grouped product of fp8 numbers (`scaled_grouped_mm`). It was
rejected: both factors must be e4m3, which has less range than gradients get here; every row, or block, has a scale of
its own; the weight's gradient sums over an expert's tokens, so that both factors must be stored along them and the
tokens of each expert filled up to a multiple of sixteen; a CPU has no such product to test with; and torchao's layer
around it is a prototype.

A linear layer with a side that is no multiple of sixteen stays as it is, since tensor cores do not take it, and so does
what is not an `nn.Linear` itself; what stays is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from penstock.errors import RecipeError, counted
from penstock.model.compiled import experts_of
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
    """What of some layers runs in fp8, and what else is multiplied there."""

    linears: tuple[nn.Linear, ...]
    left_out: dict[str, tuple[str, ...]]
    """Other weights by why: their names in their layer, with shape or class."""
    experts: float
    """Weights of experts that a token is multiplied with, in all layers."""


def choose(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Chosen:
    """Look at every weight of some decoder layers with which something may be multiplied."""
    linears, uneven, foreign, experts = list[nn.Linear](), list[str](), list[str](), 0.0
    config = model.config.get_text_config()
    for layer in layers:
        stacked = [part for part in experts_of(layer) if not isinstance(part, nn.Conv1d)]
        for name, module in layer.named_modules():
            if "experts" in name.split(".") or module in stacked:
                experts += sum(p.numel() * _share(p, name, config) for p in module.parameters(recurse=False))
                continue
            for own, weight in module.named_parameters(recurse=False):
                if weight.ndim < 2 or _routes(name, weight, config):
                    continue
                if not (type(module) is nn.Linear or isinstance(module, Fp8Linear)):
                    foreign.append(
                        f"{name}.{own}".removesuffix(".weight").removeprefix(".") + f" ({type(module).__name__})"
                    )
                elif any(side % FP8_MULTIPLE for side in weight.shape):
                    uneven.append(f"{name} ({module.out_features} x {module.in_features})")
                else:
                    linears.append(module)
    reasons = {
        f"both sides must be multiples of {FP8_MULTIPLE}": uneven,
        "only an nn.Linear is known to be nothing but a product": foreign,
    }
    return Chosen(tuple(linears), {why: tuple(names) for why, names in reasons.items() if names}, experts)


def _share(weight: Tensor, name: str, config: PreTrainedConfig) -> float:
    """Of a weight of experts, what a token is multiplied with: all of those that every token has."""
    experts = num_experts(config)
    routed = experts and ("experts" in name.split(".") or (weight.ndim == 3 and len(weight) == experts))
    return float(config.num_experts_per_tok / experts) if routed else 1.0


def _routes(name: str, weight: Tensor, config: PreTrainedConfig) -> bool:
    """Whether a weight chooses among experts, or how much of one is taken."""
    own = name.rpartition(".")[2]
    chooses = own.removeprefix("shared_expert_") in _ROUTERS or len(weight) in (1, num_experts(config))
    return bool(num_experts(config) and chooses)


def _named(names: Sequence[str]) -> str:
    return ", ".join(sorted(set(names)))


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
        found = "; ".join(f"{why}: {_named(names)}" for why, names in chosen.left_out.items())
        raise no_fp8(recipe.model, (found or "its layers have no nn.Linear") if layers else "")


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
    for why, names in chosen.left_out.items():
        found += f"; {counted(len(names), 'weight')} too, since {why}: {_named(names)}"
    if device.type == "cpu":
        found += "; emulated on this CPU: the same casts, products in fp32, slower than without"
    return found
