"""Every long-lived buffer of a run: what it is, where it lies, how many bytes it takes.

Pure arithmetic, without torch. The plan sums this list; a test compares it, byte for byte, with what the engine really
allocates, so that prediction and reality cannot drift apart. The few numbers that both need (slots, chunk, reserves,
alignment) live here, and `offload/` takes them from here.

What comes and goes within a step (activations, the loss's chunks of logits) is no buffer; see `plan/memory.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, TypeVar

from penstock.recipe.presets import Architecture

T = TypeVar("T")
Place = Literal["gpu", "host"]
HomeName = Literal["gpu", "stream", "host"]

NUM_SLOTS = 4
"""Staging slots of `stream`: one arriving, one updating, one leaving, one to absorb jitter."""
DEFAULT_CHUNK = 1 << 24
"""Elements in a chunk where the link is not known, and the most: 160 MiB of fp32 state."""
STAGING = NUM_SLOTS * DEFAULT_CHUNK
"""Elements for which room is left in the slots, whatever the link: a faster one must not leave less for state."""
UNIT_SLOTS = 3
"""Units whose weights are on the GPU while they stream: one computes, one arrives, one to absorb jitter."""
PREFETCHED_INPUTS = 2
"""Parked inputs that are on the GPU, or on their way, before backward wants them."""
TOKENS_IN_FP32 = 32768
"""Of a long row, those whose attention is multiplied with gates in fp32 at once (gpt-oss)."""
LONG_SEGMENT = 16_384
"""Tokens of an example that is attended to as a row of its own, whatever it shares its row with."""
CHUNK_SECONDS = 4.2e-3
"""What a chunk should take on the link: long against the start of a copy, short against a layer's forward."""
STREAM_QUEUE = 16
"""Chunks that may wait for a slot during backward: their gradients take memory beside the activations, of which the
reserve has room for so many."""
LANDING_BYTES = 2**31
"""Host memory for gradients that updates in backward use at once: a few layers' worth, so that backward and the cores
need not keep step."""
GPU_RESERVE = 5 * 2**30
"""Left free on the GPU: fragments, workspaces, and gradients that the host, running ahead, has let go and the device
has not. With less, the allocator waits for the device to get its memory back, and the host is ahead no longer. Measured
on an H200 with models of 8 to 36 B."""
GPU_RESERVE_SHARE = 16
"""A smaller GPU, whose models, rows and workspaces are smaller, keeps this part of its memory free: 1.6 of 25.8 GB on a
24 GB card. Not measured there."""
HOST_RESERVE = 6 * 2**30
"""Left free on the host: the data, the page cache of a checkpoint being written, everything else that runs."""
ALIGNMENT = 256
"""Of every piece that is cut from an arena."""
BLOCK = 256
"""Elements that share a scale in `int8`."""
SPAN_ROWS, SPAN_LANES = 64, 1024
SPAN = SPAN_ROWS * SPAN_LANES
"""Elements of a gradient whose squares are summed into one number of the norm (`update/spans.py`)."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}


def gpu_reserve(gpu_bytes: int) -> int:
    """What is left free of a GPU's memory. The plan counts with it and the engine keeps it."""
    return min(GPU_RESERVE, gpu_bytes // GPU_RESERVE_SHARE)


@dataclass(frozen=True)
class Part:
    """One tensor of a state."""

    name: str
    dtype: str
    """As torch calls it; there is no torch here."""
    elements: int = 1
    """Elements that share one value."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return _ITEM_BYTES[self.dtype]

    def count(self, num_elements: int) -> int:
        """Values for so many elements."""
        return -(-num_elements // self.elements)

    def num_bytes(self, num_elements: int) -> int:
        """Bytes for so many elements."""
        return self.count(num_elements) * self.item_bytes


REMAINDER = Part("remainder", "int16")
"""The low half of the fp32 master, whose high half is a bf16 weight. Every format has it: masters are exact."""


@dataclass(frozen=True)
class StateFormat:
    """One way to store state."""

    name: str
    moments: tuple[Part, ...] = field(hash=False)
    """Everything but the remainder."""

    @cached_property
    def block(self) -> int:
        """Elements that share a scale, and between which a parameter cannot be cut; 1 where there are no scales."""
        return max(part.elements for part in self.moments)

    def parts(self, weight_bytes: int) -> tuple[Part, ...]:
        """The tensors in the order in which they lie in memory: only a bf16 weight has a remainder."""
        parts = (*self.moments, REMAINDER) if weight_bytes == 2 else self.moments
        return tuple(sorted(parts, key=lambda part: -part.item_bytes))  # so that each is aligned, whatever the size

    @lru_cache(4096)  # noqa: B019  # three formats, which live for ever
    def num_bytes(self, num_elements: int, weight_bytes: int) -> int:
        """Bytes of the state of so many elements."""
        return sum(part.num_bytes(num_elements) for part in self.parts(weight_bytes))

    def bytes_per_element(self, weight_bytes: int) -> float:
        """The same of one element among many."""
        return self.num_bytes(BLOCK, weight_bytes) / BLOCK

    def whole_blocks(self, num_elements: int) -> int:
        """The next size at which a parameter can be cut."""
        return -(-num_elements // self.block) * self.block


def _moments(first: str, second: str, block: int = 1) -> tuple[Part, ...]:
    own = (Part("first", first), Part("second", second))
    scales = tuple(Part(f"{part.name}_scale", "float32", block) for part in own)
    return own if block == 1 else (*own, *scales)


FORMATS = {
    "fp32": StateFormat("fp32", _moments("float32", "float32")),
    "bf16": StateFormat("bf16", _moments("bfloat16", "bfloat16")),
    "int8": StateFormat("int8", _moments("int8", "uint8", BLOCK)),
}
"""AdamW's, from exact to small."""


def chunk_for(link_bytes_per_s: float, state_bytes: float) -> int:
    """Elements in a chunk for this link, a power of two, at `state_bytes` an element; of no link to cross, the most."""
    wanted = min(link_bytes_per_s * CHUNK_SECONDS / state_bytes, DEFAULT_CHUNK)
    return 1 << max(20, round(math.log2(max(1.0, wanted))))


@dataclass(frozen=True)
class Buffer:
    """One long-lived allocation, or several of a kind."""

    name: str
    place: Place
    num_bytes: int


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model."""

    name: str
    size: int


@dataclass(frozen=True)
class Chunk:
    """A slice of one parameter, or of this rank's shard of it: what has a home and moves."""

    parameter: int
    start: int
    size: int
    format: StateFormat = field(compare=False)
    weight_bytes: int = field(compare=False)
    """Of one element: 2 for bf16, 4 for fp32."""
    offset: int = field(default=0, compare=False)
    """Elements of the parameter before this rank's shard, from which `start` counts. Stochastic rounding goes by the
    place in the whole parameter, so that the number of ranks does not show in it."""

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of its state."""
        return self.format.num_bytes(self.size, self.weight_bytes)

    @property
    def copy_bytes(self) -> int:
        """Bytes of its weight, and of its gradient."""
        return self.size * self.weight_bytes

    def of(self, flat: T) -> T:
        """This chunk's part of its parameter's flat tensor."""
        return flat[self.start : self.start + self.size]  # type: ignore[index, no-any-return]


def padded(num_bytes: int) -> int:
    """Bytes that a piece takes in an arena."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def landing_bytes(chunks: Sequence[Chunk], *, ring: bool = False) -> int:
    """Host memory for gradients of these chunks that leave the device: a place each, or a `ring` that they share."""
    sizes = [padded(chunk.copy_bytes) for chunk in chunks]
    if not ring or not sizes:
        return sum(sizes)
    return min(len(sizes), max(NUM_SLOTS, LANDING_BYTES // max(sizes))) * max(sizes)


def largest_gradients(chunks: Iterable[Chunk], unit_of: Mapping[int, int]) -> int:
    """Bytes of gradients of the largest unit that streams: of updates in backward they wait while the next computes.

    `unit_of`: units of parameters that stream.
    """
    in_unit: Counter[int] = Counter()
    for chunk in chunks:
        if chunk.parameter in unit_of:
            in_unit[unit_of[chunk.parameter]] += chunk.copy_bytes
    return max(in_unit.values(), default=0)


def cut(whole: Chunk, chunk_size: int) -> list[Chunk]:
    """A parameter, given as one chunk, in chunks of at most so many elements, rounded up to whole blocks."""
    step = whole.format.whole_blocks(chunk_size)
    if 0 < whole.size <= step:
        return [whole]
    return list(_pieces(whole.parameter, whole.size, step, whole.format, whole.weight_bytes, whole.offset))


@lru_cache(4096)
def _pieces(
    parameter: int, size: int, step: int, format: StateFormat, weight_bytes: int, offset: int
) -> tuple[Chunk, ...]:
    """A plan tries many times to deal the same ones."""
    starts = range(0, size, step)
    return tuple(Chunk(parameter, at, min(step, size - at), format, weight_bytes, offset) for at in starts)


def model_buffers(
    sizes: Sequence[int], weight_bytes: int, *, place: Place = "gpu", streamed: Collection[int] = ()
) -> list[Buffer]:
    """Resident weights, all but those with the numbers `streamed`, and the sums from which the global norm is made."""
    resident = sum(size for index, size in enumerate(sizes) if index not in streamed)
    return [Buffer("weights", place, weight_bytes * resident), Buffer("norm", place, 8 * num_sums(sizes))]


def unit_bytes(sizes: Sequence[int], weight_bytes: int) -> int:
    """Bytes that a unit takes in an arena and in a slot: its parameters, given by their elements, one after another."""
    return sum(padded(size * weight_bytes) for size in sizes)


def unit_buffers(
    units: Sequence[Sequence[int]], weight_bytes: int, *, place: Place = "gpu", slots: int = UNIT_SLOTS
) -> list[Buffer]:
    """Of units that stream, each given by the elements of its parameters: where they lie, and where they compute."""
    if not units:
        return []
    sizes = [unit_bytes(unit, weight_bytes) for unit in units]
    found = [Buffer("unit slots", place, min(slots, len(units)) * max(sizes))] if slots else []
    return [*found, Buffer("streamed weights", "host", sum(sizes))]


def parked_bytes(layers: int, rows: int, row_elements: int, item_bytes: int) -> int:
    """The arena of parked inputs: one of every layer and row."""
    return layers * rows * padded(row_elements * item_bytes)


def num_spans(size: int) -> int:
    """Spans of a tensor."""
    return -(-size // SPAN)


def num_sums(sizes: Sequence[int]) -> int:
    """Sums from which the norm is made: a power of two, as the fixed tree of additions wants it."""
    return 1 << max(0, sum(map(num_spans, sizes)) - 1).bit_length()


def state_buffers(
    dealt: Mapping[HomeName, Sequence[Chunk]],
    *,
    on_gpu: bool = True,
    streamed: Collection[int] = (),
    in_backward: bool = False,
) -> list[Buffer]:
    """State by home, staging slots and arenas. `streamed`: parameters whose weights lie in host memory.

    Those need no copy of the weight. In `stream` weight and gradient travel with the state, and the gradient lands in
    host memory as it does in `host`, unless it is updated `in_backward`, where it was made; in `host` those that land
    `in_backward` share a few places. Without a GPU everything is
    in host memory, and `host` updates weights and gradients where they are, so that it keeps no copies of them.
    """
    device: Place = "gpu" if on_gpu else "host"
    found: list[Buffer] = []
    resident, travelling, on_host = (dealt.get(name, ()) for name in ("gpu", "stream", "host"))

    if resident:
        found.append(Buffer("resident state", device, sum(chunk.state_bytes for chunk in resident)))
    if travelling:
        arena = _arena_bytes(travelling)
        kinds = {(chunk.size, chunk.parameter in streamed): chunk for chunk in travelling}  # thousands, of few sizes
        slot = max(_slot_bytes(chunk, beside=beside) for (_, beside), chunk in kinds.items())
        found.append(Buffer("streamed state", "host", max(ALIGNMENT, arena)))
        found.append(Buffer("staging", device, NUM_SLOTS * slot))
    if on_host:
        copies = sum(padded(chunk.copy_bytes) for chunk in on_host if chunk.parameter not in streamed)
        arena = _arena_bytes(on_host)
        found.append(Buffer("host state", "host", max(ALIGNMENT, arena)))
        if copies and on_gpu:
            found.append(Buffer("pinned copies", "host", copies if in_backward else 2 * copies))
    if in_backward:
        landings = landing_bytes(on_host, ring=True)
    else:
        landings = landing_bytes([chunk for chunk in (*travelling, *on_host) if chunk.parameter in streamed])
    if landings and on_gpu:
        found.append(Buffer("gradient landings", "host", landings))
    return found


def _arena_bytes(chunks: Sequence[Chunk]) -> int:
    """State of chunks, which are thousands of few sizes."""
    kinds = Counter((chunk.size, chunk.weight_bytes) for chunk in chunks)
    return sum(count * padded(chunks[0].format.num_bytes(*kind)) for kind, count in kinds.items())


def _slot_bytes(chunk: Chunk, *, beside: bool) -> int:
    """State, and with `beside` room for the weight and its gradient."""
    return padded(chunk.state_bytes) + (2 * padded(chunk.copy_bytes) if beside else 0)


def total(buffers: Sequence[Buffer], place: Place) -> int:
    """Bytes in one place."""
    return sum(buffer.num_bytes for buffer in buffers if buffer.place == place)


def parameters(a: Architecture) -> list[Parameter]:
    """Every tensor of the model in the order in which forward needs them: embedding, layers, final norm, head."""
    embedding = Parameter("embed_tokens", a.vocab * a.hidden)
    layer = layer_parameters(a)
    layers = [Parameter(f"layers.{i}.{p.name}", p.size) for i in range(a.layers) for p in layer]
    head = [] if a.tied else [Parameter("lm_head", a.vocab * a.hidden)]
    return [embedding, *layers, Parameter("norm", a.hidden), *head]


@lru_cache(256)
def layer_parameters(a: Architecture) -> tuple[Parameter, ...]:
    """The tensors of one layer, in the order in which transformers registers them."""
    norms = Parameter("input_layernorm", a.hidden), Parameter("post_attention_layernorm", a.hidden)
    return (*_attention(a), *(_experts(a) if a.experts else _mlp(a)), *norms)


def _attention(a: Architecture) -> list[Parameter]:
    q, kv, h = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden
    if a.model_type == "phi3":  # fused, and the output projection comes first
        return [Parameter("o_proj", q * h), Parameter("qkv_proj", (q + 2 * kv) * h)]
    found = [Parameter("sinks", a.heads)] if a.sinks else []
    for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        found.append(Parameter(name, out * h))
        if a.qkv_bias:
            found.append(Parameter(f"{name}.bias", out))
    found.append(Parameter("o_proj", q * h))
    if a.output_bias:
        found.append(Parameter("o_proj.bias", h))
    if a.qk_norm:
        found += [Parameter("q_norm", a.head_dim), Parameter("k_norm", a.head_dim)]
    return found


def _mlp(a: Architecture) -> list[Parameter]:
    matrix = a.hidden * a.intermediate
    if a.model_type == "phi3":
        return [Parameter("gate_up_proj", 2 * matrix), Parameter("down_proj", matrix)]
    return [Parameter(name, matrix) for name in ("gate_proj", "up_proj", "down_proj")]


def _experts(a: Architecture) -> list[Parameter]:
    """All experts of a layer are two tensors, whatever the checkpoint's files say."""
    matrix = a.experts * a.hidden * a.moe_intermediate
    router = Parameter("router", a.experts * a.hidden)
    if not a.expert_bias:
        return [Parameter("experts.gate_up_proj", 2 * matrix), Parameter("experts.down_proj", matrix), router]
    return [
        router,
        Parameter("router.bias", a.experts),
        Parameter("experts.gate_up_proj", 2 * matrix),
        Parameter("experts.gate_up_proj_bias", a.experts * 2 * a.moe_intermediate),
        Parameter("experts.down_proj", matrix),
        Parameter("experts.down_proj_bias", a.experts * a.hidden),
    ]
