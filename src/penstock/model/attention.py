"""Attention that never crosses an example boundary, on every backend.

A packed row holds several examples. Where each begins and ends is known exactly to the data loader, so it is handed
down as it is (`Segments`) and never guessed again from position ids.

`varlen`, the default, is our own function behind transformers' attention interface: flash attention over the segments
on a GPU, segment by segment elsewhere. No mask is built. `sdpa` and `eager` are transformers' own code with a mask made
here, since not every model makes one from position ids: gpt-oss and OPT attend across boundaries in silence.

Segments travel as a keyword argument of the backbone, which transformers passes on through the layers to the attention
function as it does for its own flash-attention arguments. So they are part of what activation checkpointing saves and
replays, and plain inputs to a compiled layer. Rejected: a global or context variable (backward recomputes layers in
autograd's own threads, where it is not set), and attributes on modules (two micro-batches in flight would share them).

What this module cannot keep apart is refused: layers with a state or a convolution carry one example into the next.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from penstock.errors import ModelError
from penstock.model.long_segments import attend_segments, has_long
from penstock.model.row_attention import attend_rows, is_fast
from penstock.model.segment_attention import attend_segment
from penstock.model.sinks import flash_with_sinks

VARLEN = "penstock_varlen"
"""Our function's name in transformers' registry."""

_MASKED_ONLY = ("stablelm", "gptj")
"""Models with attention code of their own that were tested to honour a mask of four dimensions."""

_FLASH_HEAD_DIM = 256
"""The largest head that the flash kernels take."""
_FLASH_MULTIPLE = 8
"""What size of a head they take over segments; over rows torch fills them up."""


_MOST_ELEMENTS = 2**31
"""Of queries in one call of a kernel, which may count in 32 bits: 524,288 tokens of llama-8b are as many."""

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Fewer key than query heads must be allowed by name since torch 2.13; before, the kernel simply took them."""


@dataclass
class Segments:
    """Where examples begin and end in a batch of rows laid end to end.

    Not frozen: torch 2.11 holds every value in a frozen one for a constant, and compiles each packing anew.
    """

    boundaries: tuple[int, ...]
    """From 0 to the number of tokens, on the host: loops over segments need no copy from the GPU."""
    offsets: Tensor
    """The same as int32 on the device, as the kernels want it."""
    max_length: int
    """Tokens in the longest segment."""
    alike: bool
    """All segments have one length. Every row begins one, so that without windows they are a plain batch of rows."""
    on_host: Tensor
    """The boundaries as a tensor, for an operation into which the compiler does not look."""
    has_long: bool
    """Whether any segment is long enough to be attended to alone."""

    @classmethod
    def of(cls, boundaries: Sequence[int], device: torch.device) -> Segments:
        """Segments from cumulative boundaries: 0 first, the number of tokens last, every start of a row among them.

        Their number is no constant to the compiler, or every packing would be compiled anew until the second.
        """
        lengths = [end - start for start, end in itertools.pairwise(boundaries)]
        assert boundaries[0] == 0, f"boundaries begin at 0, not {boundaries[0]}"
        assert min(lengths) > 0, f"boundaries must rise: {boundaries}"
        offsets = on_host = torch.tensor(boundaries, dtype=torch.int32)
        if device.type == "cuda":  # from pageable memory the copy would wait for all work queued on the GPU
            offsets = on_host.pin_memory().to(device, non_blocking=True)
        for tensor in (offsets, on_host):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return cls(tuple(boundaries), offsets, max(lengths), len(set(lengths)) == 1, on_host, has_long(lengths))


_AUTO = "Try --attention auto."


def check_package(choice: str) -> None:
    """Refuse an attention whose package is not there; a run asks before anything is loaded."""
    if choice == "flash_attention_2" and not importlib.util.find_spec("flash_attn"):
        remedy = "Install it (pip install flash-attn), or use --attention varlen, which needs no package."
        raise ModelError("needs the package flash-attn", where="--attention flash_attention_2", remedy=remedy)


def use_attention(model: PreTrainedModel, choice: str) -> str:
    """Set the model's attention for training on packed rows; returns what `auto` became."""
    refuse_mixing(model)
    obstacle = _varlen_obstacle(model)
    if choice == "auto":
        choice = "varlen" if not obstacle else _stock(model)
    if choice == "varlen" and obstacle:
        raise ModelError(f"cannot use varlen attention: {obstacle}", where=_kind(model), remedy=_AUTO)
    if choice == "sdpa" and not _can_sdpa(model):
        raise ModelError("cannot use sdpa attention", where=_kind(model), remedy=_AUTO)
    check_package(choice)
    _set(model, VARLEN if choice == "varlen" else choice)
    return choice


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """Transformers' own attention for a while: generation with a cache, saving, anything that is not a packed row."""
    before = model.config._attn_implementation
    _set(model, _stock(model) if before == VARLEN else before)
    try:
        yield
    finally:
        _set(model, before)


def attention_inputs(
    config: PreTrainedConfig, shape: tuple[int, int], dtype: torch.dtype, segments: Segments
) -> dict[str, Any]:
    """Keyword arguments that make a backbone keep to the segments, for whichever attention it is set to."""
    rows, length = shape
    starts = set(segments.boundaries)
    assert segments.boundaries[-1] == rows * length, f"segments end at {segments.boundaries[-1]}, not {rows * length}"
    assert all(row * length in starts for row in range(rows)), "every row must begin a segment"
    name = config._attn_implementation
    if name == VARLEN:
        return {"segments": segments}
    if name.startswith("flash_attention"):
        offsets, longest = segments.offsets, segments.max_length
        return {
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    return {"attention_mask": _masks(config, shape, dtype, segments)}


def refuse_mixing(model: PreTrainedModel) -> None:
    """Refuse a model in which tokens reach one another by other ways than causal attention."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    reason = ""
    if kinds:
        reason = f"it has layers of another kind than full or sliding attention ({', '.join(sorted(kinds))})"
    elif model.config.is_encoder_decoder or not getattr(config, "is_causal", True):
        reason = "it is not a causal decoder"
    elif getattr(model, "_is_stateful", False) or any(isinstance(m, nn.Conv1d) for m in model.modules()):
        reason = "it has layers with a state or a convolution"
    elif not model._supports_attention_backend and config.model_type not in _MASKED_ONLY:
        reason = "its attention does not go through transformers' attention interface"
    if reason:
        raise ModelError(
            f"cannot be trained on packed rows: {reason}, so examples in a row would see one another",
            where=_kind(model),
            remedy="Use a decoder with attention layers only, such as Llama, Qwen3, Mistral or Gemma.",
        )


def _varlen_obstacle(model: PreTrainedModel) -> str:
    """Why our function would compute something else than the model means, or nothing."""
    if not model._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    if _softcap(model):
        return "it caps its attention logits"
    if not model._supports_flash_attn:
        return "its sliding windows may live in the mask alone"
    return ""


def _softcap(model: PreTrainedModel) -> bool:
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def _can_sdpa(model: PreTrainedModel) -> bool:
    return bool(model._supports_sdpa) and not _softcap(model)


def _stock(model: PreTrainedModel) -> str:
    return "sdpa" if _can_sdpa(model) else "eager"


def _kind(model: PreTrainedModel) -> str:
    return type(model).__name__


def _set(model: PreTrainedModel, name: str) -> None:
    """Transformers warns and carries on where it cannot do as it is told; that would be silent here."""
    if model.config._attn_implementation == name:
        return
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise ModelError(f"cannot use attention {name}: {error}", where=_kind(model), remedy=_AUTO) from None
    if model.config._attn_implementation != name:
        raise ModelError(f"does not let its attention be set to {name}", where=_kind(model), remedy=_AUTO)


def _masks(
    config: PreTrainedConfig, shape: tuple[int, int], dtype: torch.dtype, segments: Segments
) -> Tensor | dict[str, Tensor]:
    """The masks of four dimensions that the model's layers expect: one a kind of layer, or one for all."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return _mask(config, shape, dtype, segments, window)
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: _mask(config, shape, dtype, segments, windows[kind]) for kind in sorted(set(kinds))}


def _mask(
    config: PreTrainedConfig, shape: tuple[int, int], dtype: torch.dtype, segments: Segments, window: int | None
) -> Tensor:
    """True where a query (row) may look at a key (column); as numbers to add where attention is eager."""
    rows, length = shape
    position = torch.arange(rows * length, device=segments.offsets.device, dtype=torch.int32)
    segment = torch.bucketize(position, segments.offsets, right=True).view(rows, 1, length)
    position = position.view(rows, 1, length)
    query, key = position.transpose(1, 2), position
    allowed = (segment.transpose(1, 2) == segment) & (key <= query)
    if window is not None:
        allowed &= key > query - window
    allowed = allowed.unsqueeze(1)
    if config._attn_implementation != "eager":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


@dataclass
class Before:
    """In the place of segments: what attention is called with is noted, and nothing is attended to."""

    stop: bool
    """Leave the layer there. Compiled code cannot, and need not: what is not used of it is not computed."""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    """The arguments of `attend`, the last of them a dictionary of those by name."""


@dataclass
class After:
    """In the place of segments: what attention gave, for these tokens of a longer row."""

    result: Tensor


class Reached(Exception):
    """A layer has called its attention, and nothing after that is wanted."""


class _Asked(TypedDict, total=False):
    """What else models hand to their attention, as far as it is read here."""

    segments: Segments | Before | After
    sliding_window: int | None
    s_aux: Tensor | None
    """A sink a head (gpt-oss)."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **asked: Unpack[_Asked],
) -> tuple[Tensor, None]:
    """Transformers' attention interface: (rows, heads, tokens, head size) in, (rows, tokens, heads, head size) out."""
    _refuse_call(module, attention_mask, dropout, asked)
    segments, sliding_window, sinks = asked["segments"], asked.get("sliding_window"), asked.get("s_aux")
    rows, heads, length, head_dim = query.shape
    if isinstance(segments, After):
        return segments.result, None
    if isinstance(segments, Before):
        # Without itself: a circle would keep queries, keys and values until Python looks for garbage.
        others = {name: value for name, value in asked.items() if name != "segments"}
        segments.calls.append((module, query, key, value, attention_mask, scaling, dropout, others))
        if segments.stop:
            raise Reached
        return query.new_zeros(rows, length, heads, value.shape[-1]), None
    q, k, v = (x.transpose(1, 2).reshape(rows * length, -1, x.shape[-1]) for x in (query, key, value))
    scale = head_dim**-0.5 if scaling is None else scaling
    half = query.dtype in (torch.bfloat16, torch.float16)
    # A bound that is the same for every packing, or each longest segment would be compiled for.
    longest = length if torch.compiler.is_compiling() else segments.max_length
    windowed = sliding_window is not None and sliding_window < longest

    def some_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if segments.alike and not windowed and sinks is None:
            return attend_rows(q, k, v, segments.max_length, scale)
        fits = value.shape[-1] == head_dim <= _FLASH_HEAD_DIM and head_dim % _FLASH_MULTIPLE == 0
        if fits and segments.has_long and not windowed and sinks is None and is_fast(q, v):
            return attend_segments(q, k, v, segments.on_host, scale)
        if fits and query.is_cuda and half:
            return _flash(q, k, v, segments.offsets, longest, scale, sliding_window if windowed else None, sinks)
        out: Tensor = _one_by_one(q, k, v, segments, scale, sliding_window, sinks)
        return out

    if q.numel() < _MOST_ELEMENTS:
        out = some_heads(q, k, v, sinks)
    else:
        groups = [some_heads(*group) for group in _groups(q, k, v, sinks)]
        out = torch.cat([_Apart.apply(group) for group in groups], dim=1)  # type: ignore[no-untyped-call]
    return out.view(rows, length, heads, -1), None


def _groups(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """As few groups of heads as have no more elements each than a kernel takes.

    Heads do not meet, so that no bit changes; but for the sum of gradients of a key that several groups share, where
    the heads of a single one are too many.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    whole = (n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))
    count = next((n for n in whole if q.numel() // n < _MOST_ELEMENTS), heads)
    shared = max(1, count // kv_heads)
    keys, values = ([group for group in _chunks(x, count // shared) for _ in range(shared)] for x in (k, v))
    of_sinks = sinks.chunk(count) if sinks is not None else [None] * count
    return list(zip(_chunks(q, count), keys, values, of_sinks, strict=True))


def _chunks(x: Tensor, count: int) -> list[Tensor]:
    """Groups of heads, in memory of their own where a view's last element is too far from its first."""
    return [part.contiguous() if x.numel() >= _MOST_ELEMENTS else part for part in x.chunk(count, dim=1)]


class _Apart(torch.autograd.Function):
    """What a group of heads gives. Its gradient gets memory of its own, for the same reason."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _refuse_call(module: nn.Module, mask: Tensor | None, dropout: float, kwargs: Mapping[str, object]) -> None:
    """Never ignore what a model asks of its attention."""
    asked = [name for name in ("softcap", "position_bias", "indices", "block_indices") if kwargs.get(name) is not None]
    if dropout:
        asked.append("dropout")
    if mask is not None:
        asked.append("a mask")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        asked.append("attention to later tokens")
    if kwargs.get("segments") is None:
        asked.append("a call without segments (generation belongs inside stock_attention)")
    if asked:
        what = f"asks for what varlen attention does not do: {', '.join(asked)}"
        raise ModelError(what, where=type(module).__name__, remedy="Try --attention eager.")


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Flash attention over all segments in one kernel; none is longer than `longest`. A window reaches W - 1 back."""
    left = -1 if window is None else window - 1
    if sinks is not None:
        return flash_with_sinks(q, k, v, sinks, offsets, longest, scale, left)
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale, window_size=(left, 0), **_GROUPED)
    assert isinstance(out, Tensor)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would be compiled anew for every packing
def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Segment by segment."""
    spans = itertools.pairwise(segments.boundaries)
    return torch.cat([attend_segment(q[a:b], k[a:b], v[a:b], scale, window, sinks) for a, b in spans])


# Only the attention function is registered. Without a mask function of this name transformers builds no mask at all;
# with one it would first look for packed rows in the position ids, and the host would wait for the GPU in each forward.
AttentionInterface.register(VARLEN, attend)
