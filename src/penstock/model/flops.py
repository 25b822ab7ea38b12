"""FLOPs of a step, counted in two ways: what a model has to compute at least, and what the reference counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from penstock.data.cost import TokenFlops


@dataclass(frozen=True)
class Flops:
    """Of one token, on one GPU. Not a number where nobody counts."""

    products: float = math.nan
    """Forward and backward; recompute is not counted."""
    reference: float = math.nan
    """By the formula of DeepSpeedExamples' DeepSpeed-SuperOffload, which counts recompute."""
    pair: float = 0.0
    """Of the token and another of its example, in all layers; forward and backward."""

    def model(self, example: float) -> float:
        """Of a token in an example of so many."""
        return self.products + self.pair * example


def count_flops(model: PreTrainedModel, *, row: float, recompute: str, gpus: int = 1) -> Flops:
    """For rows of so many tokens on average, over which the reference counts attention."""
    own, reference = token_flops(model), reference_flops_per_token(model, row, recompute)
    return Flops(own.products / gpus, reference / gpus, own.pair * own.layers / gpus)


def flops_per_token(model: PreTrainedModel, length: float) -> float:
    """Of forward and backward, recompute not counted: six a weight, and attention's two products over `length` tokens.

    Attention counts the full square, as the field does, although a causal kernel computes half of it and a sliding
    window less.
    """
    flops = token_flops(model)
    return flops.products + flops.pair * flops.layers * length


def token_flops(model: PreTrainedModel) -> TokenFlops:
    """What rows of this model cost. A lookup is no product: embeddings count only where they are the head as well."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    weights = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if isinstance(module, nn.Embedding) and (head is None or module.weight is not head.weight):
            weights -= module.weight.numel()
    if experts := num_experts(config):
        in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        weights -= int(in_experts * (1 - config.num_experts_per_tok / experts))
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windowed = kinds.count("sliding_attention") if window else 0
    return TokenFlops(6.0 * weights, 12.0 * heads * head_dim, layers, windowed, window)


def reference_flops_per_token(model: PreTrainedModel, row: float, recompute: str) -> float:
    """K (2 N + 4 L h s) for N weights, L layers of width h and rows of s tokens; k is 4 with full recompute, else 3.

    All weights count, lookups too, and attention over the whole row, whatever is packed or padded in it. Models with
    experts are not counted there, and so not here.
    """
    config = model.config.get_text_config()
    if num_experts(config):
        return math.nan
    weights = sum(p.numel() for p in model.parameters())
    attention = 4.0 * config.num_hidden_layers * config.hidden_size * row
    return float((4 if recompute == "full" else 3) * (2.0 * weights + attention))


def num_experts(config: Any) -> int:
    """Experts of a layer, 0 for a dense model."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)
