"""Named recipes, and the architectures behind them in plain numbers.

A preset is a recipe and nothing more. The architecture is kept beside it, so that `plan` and `bench` need neither
network nor weights, and so that both can be read without importing torch. The numbers are those of each model's
config.json; a test builds every one of them with Hugging Face's own code on the meta device and compares the counts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.recipe.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder: enough for an exact Hugging Face config and for counting its parameters."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope: tuple[tuple[str, object], ...]
    """Hugging Face's `rope_parameters`, as pairs so that the dataclass stays hashable."""
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalized per head (Qwen3)."""
    sinks: bool = False
    """One learned logit a head that only takes part in the softmax's sum (gpt-oss)."""
    sliding_window: int | None = None
    """Tokens that one attends to, itself among them, in some of the layers."""
    windowed: int = 0
    """In how many of them."""
    experts: int = 0
    """0: a dense MLP."""
    experts_per_token: int = 0
    moe_intermediate: int = 0
    expert_bias: bool = False
    """Biases in experts and router (gpt-oss)."""
    extra: tuple[tuple[str, object], ...] = ()
    """Config values that have no bearing on size: token ids, dropout, MoE switches."""

    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return self._count(self.experts)

    def num_active_parameters(self) -> int:
        """Parameters that one token passes through: what its arithmetic is counted by."""
        return self._count(self.experts_per_token)

    def _count(self, experts: int) -> int:
        embedding = self.vocab * self.hidden * (1 if self.tied else 2)
        layer = self._attention() + self._mlp(experts) + 2 * self.hidden  # two norms
        return embedding + self.layers * layer + self.hidden

    def _attention(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * q + 2 * kv)
        biases = (q + 2 * kv) * self.qkv_bias + self.hidden * self.output_bias
        return weights + biases + 2 * self.head_dim * self.qk_norm + self.heads * self.sinks

    def _mlp(self, experts: int) -> int:
        if not self.experts:
            return 3 * self.hidden * self.intermediate
        router = self.experts * (self.hidden + self.expert_bias)
        expert = 3 * self.hidden * self.moe_intermediate
        biases = (2 * self.moe_intermediate + self.hidden) * self.expert_bias
        return router + experts * (expert + biases)

    def config_values(self) -> dict[str, Any]:
        """Keyword arguments of the Hugging Face config class of `model_type`."""
        values: dict[str, Any] = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": dict(self.rope),
            "tie_word_embeddings": self.tied,
            "dtype": "bfloat16",
        }
        if self.model_type != "phi3":  # the one config class here without such a field: phi-4 has no biases at all
            values["attention_bias"] = self.qkv_bias
        if self.sliding_window is not None:
            values["sliding_window"] = self.sliding_window
        if self.experts:
            values["num_local_experts" if self.model_type == "gpt_oss" else "num_experts"] = self.experts
            values["num_experts_per_tok"] = self.experts_per_token
            if self.model_type != "gpt_oss":  # there `intermediate_size` is the experts' own
                values["moe_intermediate_size"] = self.moe_intermediate
        return values | {name: list(value) if isinstance(value, tuple) else value for name, value in self.extra}


def _rope(theta: float, **more: object) -> tuple[tuple[str, object], ...]:
    return tuple({"rope_type": "default", "rope_theta": theta, **more}.items())


_LLAMA3_ROPE = _rope(
    500000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)

_LLAMA_8B = Architecture(
    model_type="llama", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128,
    vocab=128256, max_positions=131072, norm_eps=1e-5, rope=_LLAMA3_ROPE,
    extra=(("bos_token_id", 128000), ("eos_token_id", 128001)),
)  # fmt: skip

_QWEN3_14B = Architecture(
    model_type="qwen3", layers=40, hidden=5120, intermediate=17408, heads=40, kv_heads=8, head_dim=128,
    vocab=151936, max_positions=40960, norm_eps=1e-6, rope=_rope(1e6), qk_norm=True,
    extra=(("bos_token_id", 151643), ("eos_token_id", 151645)),
)  # fmt: skip

_PHI_4 = Architecture(
    model_type="phi3", layers=40, hidden=5120, intermediate=17920, heads=40, kv_heads=10, head_dim=128,
    vocab=100352, max_positions=16384, norm_eps=1e-5, rope=_rope(250000.0, partial_rotary_factor=1.0),
    extra=(("original_max_position_embeddings", 16384), ("bos_token_id", 100257), ("eos_token_id", 100265),
           ("pad_token_id", 100349)),
)  # fmt: skip

_GPT_OSS_20B = Architecture(
    model_type="gpt_oss", layers=24, hidden=2880, intermediate=2880, heads=64, kv_heads=8, head_dim=64,
    vocab=201088, max_positions=131072, norm_eps=1e-5,
    rope=_rope(150000.0, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
               original_max_position_embeddings=4096),
    qkv_bias=True, output_bias=True, sinks=True, sliding_window=128, windowed=12,
    experts=32, experts_per_token=4, moe_intermediate=2880, expert_bias=True,
    extra=(("router_aux_loss_coef", 0.9), ("eos_token_id", 200002), ("pad_token_id", 199999)),
)  # fmt: skip

_SEED_OSS_36B = Architecture(
    model_type="seed_oss", layers=64, hidden=5120, intermediate=27648, heads=80, kv_heads=8, head_dim=128,
    vocab=155136, max_positions=524288, norm_eps=1e-6, rope=_rope(1e7), qkv_bias=True,
    extra=(("attention_dropout", 0.1), ("residual_dropout", 0.1), ("bos_token_id", 0), ("eos_token_id", 2),
           ("pad_token_id", 1)),
)  # fmt: skip

_QWEN3_30B_A3B = Architecture(
    model_type="qwen3_moe", layers=48, hidden=2048, intermediate=6144, heads=32, kv_heads=4, head_dim=128,
    vocab=151936, max_positions=40960, norm_eps=1e-6, rope=_rope(1e6), qk_norm=True,
    experts=128, experts_per_token=8, moe_intermediate=768,
    extra=(("norm_topk_prob", True), ("bos_token_id", 151643), ("eos_token_id", 151645)),
)  # fmt: skip

_LLAMA_70B = Architecture(
    model_type="llama", layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128,
    vocab=128256, max_positions=131072, norm_eps=1e-5, rope=_LLAMA3_ROPE,
    extra=(("bos_token_id", 128000), ("eos_token_id", (128001, 128008, 128009))),
)  # fmt: skip

_SMOLLM2_135M = Architecture(
    model_type="llama", layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64,
    vocab=49152, max_positions=8192, norm_eps=1e-5, rope=_rope(100000.0), tied=True,
    extra=(("bos_token_id", 1), ("eos_token_id", 2), ("pad_token_id", 2)),
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "Qwen/Qwen3-14B": _QWEN3_14B,
    "microsoft/phi-4": _PHI_4,
    "openai/gpt-oss-20b": _GPT_OSS_20B,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": _SEED_OSS_36B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
}
"""Keyed by the name that a recipe's `model` has."""


def _large(name: str, model: str, max_length: int = 4096, **deepspeed: Any) -> Recipe:
    """What the seven launch scripts of DeepSpeedExamples' DeepSpeed-SuperOffload share, and what they do not."""
    return Recipe(
        name=name,
        model=model,
        data="tatsu-lab/alpaca",
        data_percent=10.0,
        max_length=max_length,
        batch_size=4,
        epochs=1.0,
        lr=1e-5,
        warmup=0.05,
        weight_decay=0.01,
        seed=42,
        **deepspeed,
    )


_PRESETS = (
    Recipe(
        name="demo",
        model="demo",
        data="demo",
        max_length=256,
        batch_size=4,
        epochs=8.0,
        lr=2e-3,
        log_every=4,
        prompt="What is the capital of Italy?",
    ),
    Recipe(
        name="smollm2-135m",
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        data="tatsu-lab/alpaca",
        data_percent=10.0,
        max_length=1024,
        batch_size=8,
        micro_batch_size=2,
        lr=2e-5,
    ),
    _large("llama-8b", "meta-llama/Llama-3.1-8B", offload_ratio=0.8),
    _large("qwen3-14b", "Qwen/Qwen3-14B", offload_ratio=0.9),
    _large("phi-4", "microsoft/phi-4", offload_ratio=0.9),
    _large("gpt-oss-20b", "openai/gpt-oss-20b", max_length=8192, offload_ratio=0.9, bucket_size=800_000_000),
    _large("seed-oss-36b", "ByteDance-Seed/Seed-OSS-36B-Instruct", offload_ratio=0.9),
    _large("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", offload_ratio=0.9),
    _large("llama-70b", "meta-llama/Llama-3.3-70B-Instruct", offload_ratio=0.9),
)
PRESETS: dict[str, Recipe] = {recipe.name: recipe for recipe in _PRESETS}
