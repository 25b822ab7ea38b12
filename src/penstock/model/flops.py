"""Model FLOPs: what a step has to compute at least, whatever is computed again."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def flops_per_token(model: PreTrainedModel, length: float) -> float:
    """Of forward and backward, recompute not counted: six a weight, and attention's two products over `length` tokens.

    A lookup is no product: embeddings count only where they are the head as well. Attention counts the full square, as
    the field does, although a causal kernel computes half of it and a sliding window less.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    weights = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if isinstance(module, nn.Embedding) and (head is None or module.weight is not head.weight):
            weights -= module.weight.numel()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        weights -= int(in_experts * (1 - config.num_experts_per_tok / experts))
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 12.0 * config.num_hidden_layers * heads * head_dim * length
    return float(6.0 * weights + attention)
