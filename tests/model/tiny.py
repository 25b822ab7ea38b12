"""Tiny random models of every architecture, and packed rows to run through them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.model.attention import Segments

VOCAB = 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 24}
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0, "hidden_dropout": 0.0}

# The windows are shorter than the longest segment below, so that they matter.
SEVEN: dict[str, dict[str, object]] = {
    "llama": COMMON,
    "qwen3": COMMON | {"head_dim": 8},
    "phi3": COMMON | {"original_max_position_embeddings": 128},
    "gpt_oss": COMMON | EXPERTS | {"head_dim": 8, "sliding_window": 4, "attention_bias": True},
    "seed_oss": COMMON | NO_DROPOUT | {"head_dim": 8},
    "qwen3_moe": COMMON | EXPERTS | {"head_dim": 8},
    "llama-tied": COMMON | {"tie_word_embeddings": True},
}
OTHERS: dict[str, dict[str, object]] = {
    "mistral": COMMON | {"sliding_window": 4, "head_dim": 8},
    "qwen2": COMMON | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gemma2": COMMON | {"sliding_window": 4, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": COMMON | {"sliding_window": 4, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": GPT2,
    "gpt_neox": COMMON | NO_DROPOUT,
    "olmo2": COMMON,
    "stablelm": COMMON | NO_DROPOUT,
    "granite": COMMON | {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "cohere": COMMON | {"logit_scale": 0.25},
    "mixtral": COMMON | EXPERTS | {"sliding_window": 4},
    "opt": COMMON | NO_DROPOUT | {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32},
    "phi": COMMON,
    "starcoder2": COMMON | {"sliding_window": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "smollm3": COMMON,
    "gptj": GPT2 | {"rotary_dim": 4},
}
GEMMA3N = {
    "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "laurel_rank": 4,
    "activation_sparsity_pattern": [0.9, 0.0],
}  # fmt: skip
IN_PLACE: dict[str, dict[str, object]] = {"gemma3n_text": COMMON | GEMMA3N}
"""Its layers change products in place."""


def tiny_config(name: str, **changes: object):
    values = {**SEVEN, **OTHERS, **IN_PLACE}[name] | changes
    return AutoConfig.for_model(name.removesuffix("-tied"), **values)


def tiny_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """In fp32, with weights large enough that every part of the model shows in the result."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


@dataclass(frozen=True)
class Packed:
    """Two rows of several examples each, every token but an example's first trained on."""

    examples: list[Tensor]
    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    target_index: Tensor
    targets: Tensor


def packed(
    seed: int = 1, rows: tuple[tuple[int, ...], ...] = ((9, 1, 6), (3, 13)), device: torch.device | str = "cpu"
) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    lengths = [n for row in rows for n in row]
    examples = [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]
    boundaries = [0]
    index: list[int] = []
    for n in lengths:
        index += range(boundaries[-1], boundaries[-1] + n - 1)
        boundaries.append(boundaries[-1] + n)
    shape = (len(rows), sum(rows[0]))
    flat = torch.cat(examples)
    target_index = torch.tensor(index)
    return Packed(
        examples,
        flat.view(shape).to(device),
        torch.cat([torch.arange(n) for n in lengths]).view(shape).to(device),
        Segments.of(boundaries, torch.device(device)),
        target_index.to(device),
        flat[target_index + 1].to(device),
    )


class Largest(TorchDispatchMode):
    """Elements of the largest memory that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.itemsize)
        return result
