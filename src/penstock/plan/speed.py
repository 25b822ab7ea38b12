"""Seconds of a step by phase, from the machine's rates and the model's arithmetic.

Three things take time in a layer: matrix products, attention, and everything between them, which only moves memory.
Each has one constant, fitted to figures measured on the H200 at 784 TFLOP/s (benchmarks/results/2026-11-15-h200).
Layers as transformers writes them, with flash attention: forward and backward of llama-8b (1 x 4096, no recompute) and
of qwen3-14b (4 x 4096, full recompute), floors 1.71 s and 3.87 s a step. Compiled, with attention by rows: llama-8b
1.39 s; qwen3-14b 2.56 s (`selected:14`) and 2.79 s (`selected`); phi-4 2.60 s and 2.83 s. The fit is within 5 %.
With fp8 products, whose casts are memory traffic, the floor of llama-8b is 0.986 s with four rows at once, where these
constants say 0.950; a step with one row at a time and all layers in fp8 took 1.238 s, where they said 1.109
(results/2026-11-17-h200/fp8).
One efficiency for everything was rejected: models differ by a fifth in it, and the share of recompute would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.machine.known import Machine
from penstock.plan.layout import LONG_SEGMENT, layer_parameters
from penstock.plan.memory import Work, saved_in_layer
from penstock.plan.tiles import projection_weights, sum_traffic
from penstock.recipe.presets import Architecture
from penstock.recipe.recipe import fp8_layers

MATRIX_EFFICIENCY = 0.84
"""Of the rate of one large product."""
EXPERT_EFFICIENCY = 0.42
"""Of the same, for grouped products of experts: from the floor of 1.60 s of qwen3-30b-a3b (`selected:36`)."""
FLASH_EFFICIENCY, ROWS_EFFICIENCY = 0.30, 0.65
"""Of the same, for the causal half of attention, over segments of any length and over rows, whole ones or long segments
(attention.jsonl); backward has 2.5 times the arithmetic."""
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 4.0, 6.0
"""Memory traffic of everything that is no product, in multiples of what autograd saves of the layer."""
COMPILED_FORWARD, COMPILED_BACKWARD = 3.5, 7.0
"""The same of compiled layers, in multiples of what they save."""
UPDATE_OVERHEAD = 1.67
"""The update's kernel over its bare memory traffic, beside the model's own: 0.090 s for llama-8b (rows.jsonl)."""

WEIGHT_CASTS, INPUT_CASTS, GRADIENT_CASTS = (5, 3), (3, 5), (0, 5)
"""Bytes read and written for fp8 products, by element, in forward and in backward: of weights the largest number, read
and written; backward has it already, and casts again the other way round. Of inputs and gradients the kernel that makes
them finds the largest; in backward both are cast by rows, and those turned."""


@dataclass(frozen=True)
class Arithmetic:
    """One micro-batch."""

    forward_s: float
    """With the loss, which makes the head's gradients too."""
    backward_s: float
    """Without recompute."""
    recompute_s: float
    head_s: float
    """Of forward, the head and the loss. They come last, so that nothing that they wait for is hidden by them."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward_s + self.backward_s + self.recompute_s


def arithmetic(a: Architecture, work: Work, machine: Machine, ranks: int = 1) -> Arithmetic:
    """Seconds of a micro-batch on one GPU. With several `ranks` each adds up its part of every gradient."""
    rate, compiled = machine.matrix_flops_per_s, work.compiled and not a.experts
    second = 2.0 * work.tokens / (rate * MATRIX_EFFICIENCY)  # of one weight
    products = second * _weights_a_token(a)
    attention = 4.0 * work.tokens * _attended(a, work) * a.heads * a.head_dim / a.layers
    attention /= rate * _attention_efficiency(a, work)
    traffic = saved_in_layer(a, work) / machine.device_memory_bytes_per_s
    there, back = (COMPILED_FORWARD, COMPILED_BACKWARD) if compiled else (FORWARD_TRAFFIC, BACKWARD_TRAFFIC)
    share = len(fp8_layers(a.layers)) / a.layers
    saved, casts = share * _saved_by_fp8(a, work, machine, second), [share * s for s in _cast_seconds(a, work, machine)]
    forward = products - saved + attention + there * traffic + casts[0]
    backward = 2 * (products - saved) + 2.5 * attention + back * traffic + casts[1]
    head = 3 * second * a.vocab * a.hidden
    faster = 1 - saved / (second * _linear_weights(a))
    down = second * faster * a.hidden * a.intermediate if compiled else 0.0  # compiled, the last is not repeated
    again = {
        "none": 0.0,
        "selected": second * (1 if a.experts else faster) * _widening(a) + (0.0 if compiled else there * traffic),
        "full": forward - down,
    }
    recompute = sum(again[dial] for dial in work.recompute_by_layer(a))
    recompute += (a.layers - -(-a.layers // work.every)) * forward  # of layers whose inputs are not saved
    backward += sum_traffic(a, work) / ranks / machine.device_memory_bytes_per_s
    if work.tile:  # what is before attention is computed once more
        recompute += a.layers * second * projection_weights(a)
    return Arithmetic(a.layers * forward + head, a.layers * backward, recompute, head)


def _linear_weights(a: Architecture) -> float:
    """Weights of one layer's linear layers, which may run in fp8: no norms, no router, no experts."""
    linear = (p for p in layer_parameters(a) if p.name.endswith("_proj") and not p.name.startswith("experts"))
    return float(sum(p.size for p in linear))


def _saved_by_fp8(a: Architecture, work: Work, machine: Machine, second: float) -> float:
    """Seconds by which the products of one layer are shorter, casts aside."""
    if work.matmul != "fp8" or not machine.fp8_flops_per_s:
        return 0.0
    return second * _linear_weights(a) * (1 - machine.matrix_flops_per_s / machine.fp8_flops_per_s)


def _cast_seconds(a: Architecture, work: Work, machine: Machine) -> tuple[float, float]:
    """Of one layer, in forward and in backward."""
    if work.matmul != "fp8":
        return 0.0, 0.0
    h, q, kv = a.hidden, a.heads * a.head_dim, a.kv_heads * a.head_dim
    inner = 0 if a.experts else a.intermediate
    dense = 0 if a.experts else h
    inputs, gradients = h + q + dense + inner, q + 2 * kv + h + 2 * inner + dense
    pieces = max(work.passes, -(-work.tokens // work.tile) if work.tile else 1)
    elements = pieces * _linear_weights(a), work.tokens * inputs, work.tokens * gradients
    by_kind = (WEIGHT_CASTS, INPUT_CASTS, GRADIENT_CASTS)
    there, back = (
        sum(count * kind[way] for count, kind in zip(elements, by_kind, strict=True))
        / machine.device_memory_bytes_per_s
        for way in (0, 1)
    )
    return there, back


def _attention_efficiency(a: Architecture, work: Work) -> float:
    if work.attention == "eager":
        return FLASH_EFFICIENCY / 3
    short = 0 < work.attended < LONG_SEGMENT / 2
    within = a.sliding_window is not None and a.sliding_window < work.length
    return FLASH_EFFICIENCY if a.sinks or within or short else ROWS_EFFICIENCY


def _weights_a_token(a: Architecture) -> float:
    """Weights of one layer that a token is multiplied with; products of experts count for as long as they take."""
    return sum(p.size for p in layer_parameters(a) if not p.name.startswith("experts")) + _experts(a)


def _experts(a: Architecture) -> float:
    experts = sum(p.size for p in layer_parameters(a) if p.name.startswith("experts"))
    return experts * a.experts_per_token / a.experts * MATRIX_EFFICIENCY / EXPERT_EFFICIENCY if a.experts else 0.0


def _widening(a: Architecture) -> float:
    """The same of products that `selected` computes again: the first of an MLP, or all of the experts."""
    return _experts(a) if a.experts else 2.0 * a.hidden * a.intermediate


def _attended(a: Architecture, work: Work) -> float:
    """Tokens that one attends to on average, summed over the layers."""
    every = work.length if work.attention == "eager" else work.attended or work.length / 2
    return attended(every, a.layers, a.windowed, a.sliding_window or 0)


def attended(every: float, layers: int, windowed: int, window: int) -> float:
    """The same of layers that let a token attend to `every` on average, some of them within a window only."""
    return (layers - windowed) * every + windowed * min(every, window)


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
