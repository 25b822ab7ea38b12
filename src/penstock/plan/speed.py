"""Seconds of a step by phase, from the machine's rates and the model's arithmetic.

Three things take time in a layer that is not compiled: matrix products, attention, and everything between them, which
only moves memory. Each has one constant, fitted to four figures measured on the H200: forward and backward of llama-8b
(1 x 4096, no recompute) and of qwen3-14b (4 x 4096, full recompute), floors 1.71 s and 3.87 s a step at 784 TFLOP/s
(benchmarks/results/2026-11-15-h200/rows.jsonl). The fit is within 5 % of each. One efficiency for everything was
rejected: the two models differ by a fifth in it, and the share of recompute would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.layout import layer_parameters
from penstock.machines import Machine
from penstock.plan.memory import Work, saved_in_layer
from penstock.presets import Architecture

MATRIX_EFFICIENCY = 0.90
"""Of the rate of one large product."""
EXPERT_EFFICIENCY = 0.55
"""Of the same, for grouped products of experts: from 2.18 s of qwen3-30b-a3b on the H200, as Hugging Face runs it."""
ATTENTION_EFFICIENCY = 0.30
"""Of the same, for the causal half of attention; backward has 2.5 times the arithmetic."""
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 6.0, 8.5
"""Memory traffic of everything that is no product, in multiples of what autograd saves of the layer."""
UPDATE_OVERHEAD = 1.67
"""The update's kernel over its bare memory traffic, beside the model's own: 0.090 s for llama-8b (rows.jsonl)."""
HIDING = 0.80
"""Share of a forward, or of a backward, that really hides updates: 0.46 s exposed for qwen3-14b clipped where all of
1.1 s would leave 0.2 (rows.jsonl). The first units wait for updates that have only just begun."""


@dataclass(frozen=True)
class Arithmetic:
    """One micro-batch."""

    forward_s: float
    """With the loss, which makes the head's gradients too."""
    backward_s: float
    """Without recompute."""
    recompute_s: float


def arithmetic(a: Architecture, work: Work, machine: Machine) -> Arithmetic:
    """Seconds of a micro-batch on one GPU."""
    rate = machine.matrix_flops_per_s
    products = 2.0 * work.tokens * _weights_a_token(a) / (rate * MATRIX_EFFICIENCY)
    attention = 4.0 * work.tokens * _attended(a, work) * a.heads * a.head_dim / a.layers
    attention /= rate * (ATTENTION_EFFICIENCY if work.attention != "eager" else ATTENTION_EFFICIENCY / 3)
    traffic = saved_in_layer(a, replace(work, products_only=False)) / machine.device_memory_bytes_per_s
    forward = products + attention + FORWARD_TRAFFIC * traffic
    backward = 2 * products + 2.5 * attention + BACKWARD_TRAFFIC * traffic
    head = 6.0 * work.tokens * a.vocab * a.hidden / (rate * MATRIX_EFFICIENCY)
    return Arithmetic(a.layers * forward + head, a.layers * backward, work.recompute * forward)


def _weights_a_token(a: Architecture) -> float:
    """Weights of one layer that a token is multiplied with; products of experts count for as long as they take."""
    parameters = layer_parameters(a)
    shared = sum(p.size for p in parameters if not p.name.startswith("experts"))
    experts = sum(p.size for p in parameters if p.name.startswith("experts"))
    share = a.experts_per_token / a.experts if a.experts else 0.0
    return shared + experts * share * MATRIX_EFFICIENCY / EXPERT_EFFICIENCY


def _attended(a: Architecture, work: Work) -> float:
    """Tokens that one attends to on average, summed over the layers. Full rows: shorter examples attend to less."""
    every = work.length if work.attention == "eager" else work.length / 2
    if a.sliding_window is None:
        return a.layers * every
    near = min(every, a.sliding_window)
    windows = -(-a.layers // 2)
    return windows * near + (a.layers - windows) * every


def update_seconds(num_params: float, state_bytes: float, weight_bytes: int, machine: Machine) -> float:
    """Updates on the GPU: state read and written, weight read and written, gradient read for the norm and again."""
    traffic = 2 * state_bytes + 4 * weight_bytes
    return UPDATE_OVERHEAD * num_params * traffic / machine.device_memory_bytes_per_s


def exchange_seconds(num_params: int, weight_bytes: int, gpus: int, machine: Machine) -> float:
    """Weights gathered for forward and again for backward, gradients reduced, for one micro-batch."""
    return 3.0 * weight_bytes * num_params * (gpus - 1) / gpus / machine.peer_bytes_per_s


def model_flops(a: Architecture, rows: int, length: int) -> float:
    """Of a step, as `bench` counts them: six a weight and token, lookups not, attention's full square, no recompute."""
    weights = a.num_active_parameters() - (0 if a.tied else a.vocab * a.hidden)
    attention = 12.0 * a.layers * a.heads * a.head_dim * length
    return (6.0 * weights + attention) * rows * length
