"""What forward and backward take on the GPU beside weights and state, and what loading and saving take.

Pure arithmetic over an architecture. Activations are counted tensor by tensor, as autograd keeps them for transformers'
own layers (not compiled) under our loss; a test counts the tensors that autograd really saves, and compares. Measured
on the H200 (benchmarks/results/2026-11-15-h200/rows.jsonl): qwen3-14b, 4 x 4096, full recompute, 13.59 GB (here 13.5)
and 33.6 GB with every gradient kept (33.6); llama-8b, 1 x 4096, no recompute, 31.33 GB (31.3). Compiled, qwen3-14b, 4 x
4096: 1.88 GB a layer (1.89); 36.4 GB with `selected` (36.4), 66.1 GB with `selected:14` (66.1). The logits of a chunk
were twice as large in these. Of long rows backward of a compiled layer is the most: llama-8b, 131,072 tokens,
`full:16`, 119.5 GB (119.5; 2026-11-18-h200/long).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan.job import Job, Settings
from penstock.plan.layout import layer_parameters
from penstock.recipe.presets import Architecture
from penstock.recipe.recipe import Recompute, recompute_by_layer

CONTEXT_BYTES = 1.3e9
"""What the driver, cuBLAS and loaded kernels take outside of torch's allocator: 150.75 GB of the H200 less what
`mem_get_info` left for state in the runs of 2026-11-15-h200."""
PROCESS_BYTES, COMPILER_BYTES, CPU_PROCESS_BYTES = 1.8e9, 0.2e9, 0.5e9
"""Host memory of a process before any state: 1.80 GB with CUDA, 2.0 with compiled layers (rows.jsonl, floors), 0.5
without a GPU (the demo)."""
LOGITS_BYTES = 2**29
"""fp32 logits of one chunk of the loss (`model/loss.py`)."""


@dataclass(frozen=True)
class Work:
    """One micro-batch on one GPU."""

    rows: int
    length: int
    recompute: str
    """As in a recipe, but for `auto`."""
    attention: str = "varlen"
    dtype_bytes: int = 2
    compiled: bool = False
    """Layers are compiled, and then keep no more than products and attention; those with experts are not."""
    tile: int = 0
    """Tokens of which a layer computes everything but attention at once; 0: of all."""
    every: int = 1
    """Layers from one saved input to the next, if they are computed one by one."""
    matmul: str = "bf16"
    passes: int = 1
    """Micro-batches that these rows are. Their gradients add up, and each, and each tile, casts the weights to fp8."""
    sum_bytes: int = 4
    """Of a gradient's element while those of micro-batches add up."""
    streams: bool = False
    """Weights come from host memory."""
    attended: float = 0.0
    """As in a job."""

    @property
    def tokens(self) -> int:
        """In full rows."""
        return self.rows * self.length

    def recompute_by_layer(self, a: Architecture) -> list[Recompute]:
        """What is computed again of every layer, from the first on."""
        chosen = recompute_by_layer(self.recompute, a.layers)
        if self.compiled and a.experts:  # the compiler does not see such a layer whole
            return ["none" if dial == "none" else "full" for dial in chosen]
        return chosen


def work_of(job: Job, settings: Settings, gpus: int = 1) -> Work:
    """A micro-batch on one of so many GPUs."""
    s, rows = settings, -(-job.batch_size // gpus)
    return Work(
        min(s.micro_batch, rows), job.length, s.recompute, job.attention, job.dtype_bytes, job.compiled,
        s.tile, s.every, job.matmul, sum_bytes=4 if job.accumulate_dtype == "fp32" else job.dtype_bytes,
        streams=s.streamed > 0, attended=job.attended,
    )  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """The most that forward and backward take, if gradients are dropped as they appear, and if all are kept."""

    activation_bytes: float
    kept_bytes: float
    end_bytes: float
    """While the first layer, the last of backward, is computed; without gradients of weights."""


def saved_in_layer(a: Architecture, work: Work, dial: Recompute = "none") -> float:
    """Bytes that autograd keeps of one layer from forward to backward."""
    b, h = work.dtype_bytes, a.hidden
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    compiled = work.compiled and not a.experts
    if dial == "full":
        return float(work.tokens * b * h)
    if dial == "selected":  # what went in, products that do not widen, attention; compiled, not the last product
        rest = a.experts if a.experts else 0 if compiled else h
        return float(work.tokens * (b * (2 * h + 2 * q + 2 * kv + rest) + 4 * a.heads))
    if compiled:
        return float(work.tokens * (b * (2 * h + 2 * q + 2 * kv + 2 * a.intermediate) + 4 * a.heads))
    normalized = 4 if a.model_type == "gpt_oss" else b  # which scales it before it rounds
    norms = 2 * (4 + normalized + b) * h  # the fp32 copy of the input, the normalized one, and the output
    heads = (4 + b) * (q + kv) if a.qk_norm else 0
    attention = b * (2 * q + 2 * kv) + 4 * a.heads  # queries, keys, values, output, logarithms of the sums
    if work.attention == "eager":
        attention += (4 + b) * a.heads * work.length + 2 * b * q  # probabilities twice; keys and values repeated
    if not a.experts:
        return float(work.tokens * (norms + heads + attention + 4 * b * a.intermediate))
    pairs, i = a.experts_per_token, a.moe_intermediate
    inside = 7 if a.expert_bias else 4  # gpt-oss clamps both halves and writes its own gate
    moe = b * pairs * (2 * h + inside * i) + 12 * a.experts
    return float(work.tokens * (norms + heads + attention + moe))


def peaks(a: Architecture, work: Work, gpus: int = 1) -> Peaks:
    """Walk through forward, the loss and backward, and take the highest point. Of a gradient each GPU keeps a share.

    Of several GPUs each holds whole units for a moment, beside its shares, as FSDP2 does: the head and the buffer that
    it was gathered in while the loss is computed; a layer, the next one that is being gathered, where weights stream
    its own rows of that, and gradients of the one before that are being reduced; the embedding's gradient and the
    buffer that it is reduced in at the end, or, if it is the head too, also its weight and both gradients of it.
    """
    b, h = work.dtype_bytes, a.hidden
    whole, chosen = saved_in_layer(a, work), work.recompute_by_layer(a)
    again = recomputed_inputs(a, work)
    by_dial = {dial: saved_in_layer(a, work, dial) for dial in set(chosen)}
    saved = [by_dial[dial] for dial in chosen]
    layer_gradients = float(b * sum(p.size for p in layer_parameters(a)))
    in_flight = in_flight_bytes(a, work)
    table = float(b * a.vocab * h)
    head = table if not a.tied else 0.0
    at_head, around, at_end = (2 * table, 3 * layer_gradients, (4 if a.tied else 2) * table) if gpus > 1 else (0.0,) * 3
    around += layer_gradients / gpus if gpus > 1 and work.streams else 0.0

    at_loss = sum(saved) + loss_bytes(a, work) + at_head
    dropped = kept = at_loss
    gradients = table / gpus  # of the head; a tied one is the embedding's
    below = sum(saved)
    for number in reversed(range(a.layers)):
        below -= saved[number]
        own = whole + again[chosen[number]]
        now = below + own + max(in_flight, layer_gradients - whole) + around
        dropped = max(dropped, now)
        kept = max(kept, now + gradients)
        gradients += layer_gradients / gpus
    kept = max(kept, gradients + head / gpus + at_end)
    return Peaks(max(dropped, at_end), kept, now)


def recomputed_inputs(a: Architecture, work: Work) -> dict[Recompute, float]:
    """What stands at the widest point of the MLP because a layer is computed again: compiled, norms' results too."""
    entry = float(work.tokens * work.dtype_bytes * a.hidden)
    compiled = work.compiled and not a.experts
    return {"none": 0.0, "selected": entry if compiled else 0.0, "full": 2 * entry if compiled else entry}


def in_flight_bytes(a: Architecture, work: Work) -> float:
    """Gradients of activations at the widest point of the MLP.

    The compiler's kernel there writes its result and the gradients of all that it reads, nothing in place. Not counted
    of tiles, which take what is planned: of a long row attention takes more than one of them.
    """
    b, h = work.dtype_bytes, a.hidden
    inner = a.experts_per_token * a.moe_intermediate if a.experts else a.intermediate
    found = float(work.tokens * 2 * b * (inner + h))
    if work.compiled and not a.experts and not work.tile:
        found = float(work.tokens * b * (4 * inner + h))
    if work.matmul == "fp8":  # of the widest product: its gradient both ways round, its input, its weight; not measured
        wide = a.heads * a.head_dim if a.experts else inner
        found += work.tokens * (2 * wide + h) + wide * h
        if not work.compiled:  # its gradient in fp32, before it is multiplied and after
            found += work.tokens * wide * 8
    return found + work.tokens * b * a.experts_per_token * h if a.experts else found


def loss_bytes(a: Architecture, work: Work) -> float:
    """The final norm, the hidden states, their gradient and the head's in fp32, and chunks of logits.

    Of long rows it is the norm's backward: six tensors in fp32 of a micro-batch or a tile, of which the others of the
    pass have kept two, beside four as they are.
    """
    b, h, one = work.dtype_bytes, a.hidden, -(-work.tokens // work.passes)
    one = min(work.tile or one, one)
    kept = 8.0 * (one if work.tile else work.tokens)
    norm = h * (kept + 16 * one + 4 * b * work.tokens) + b * a.vocab * h
    logits = 4.0 * a.vocab * work.tokens
    # Logits and the exponentials of logsumexp, beside the 16-bit gradient of the chunk before where there is one.
    chunks = 2.5 * LOGITS_BYTES if logits > LOGITS_BYTES else 2 * logits
    return max(norm, h * (kept + 3 * b * work.tokens) + 4.0 * a.vocab * h + chunks)


def loading_bytes(sizes: list[int], weight_bytes: int, gpus: int) -> float:
    """The most at any time while weights stream from disk to the GPU: all of them, and the largest once more."""
    return float(weight_bytes * (sum(sizes) / gpus + max(sizes)))


@dataclass(frozen=True)
class Disk:
    """What a run writes."""

    checkpoint_bytes: float
    peak_bytes: float
    """Checkpoints that are there at once, and the exported model."""


def disk(num_params: int, state_bytes: float, weight_bytes: int, checkpoints: int) -> Disk:
    """Weights and state of every parameter, in so many checkpoints at once."""
    weights = float(weight_bytes * num_params)
    checkpoint = weights + state_bytes * num_params
    return Disk(checkpoint, checkpoints * checkpoint + weights)
