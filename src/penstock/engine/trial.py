"""The trial: one full micro-batch before state is allocated, to see what it takes and how long."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig

from penstock.data.loader import MicroBatch
from penstock.engine.layerwise import LayerByLayer
from penstock.engine.packed import PackedModel
from penstock.engine.parked import KeptInputs, rows_together
from penstock.engine.ranks import World
from penstock.machine.gpu_memory import gpu_left
from penstock.machine.hardware import pick_compile
from penstock.model import tiles
from penstock.offload.dtensors import all_say, is_streamed, local
from penstock.plan.job import LONG_ROW
from penstock.plan.layout import UNIT_SLOTS
from penstock.plan.split import Manner, Profile
from penstock.recipe.recipe import Recipe, fp8_layers, inputs_every, recompute_by_layer, tile_tokens

TRIED_PERIODS = 2
"""Of a model whose rows are long: so many times all kinds of layers that it has."""
SHORT_END = 256
"""Tokens of the example at the end of a long row."""
FLASH_BLOCK = 128
"""Queries that the kernel takes at once."""


class _Watch:
    """How high GPU memory stands in a forward and backward, from gradient to gradient.

    The device is not waited for: these are the allocator's own numbers, in the order in which the host asks for memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, torch.cuda.memory_allocated(device)
        self._peaks: dict[nn.Parameter, int] = {}  # until the gradient of each, in the order of backward
        self._last = 0

    def start(self) -> None:
        """A forward begins."""
        self._peaks.clear()
        torch.cuda.reset_peak_memory_stats(self._device)

    def came(self, parameter: Tensor) -> None:
        """The gradient of a parameter is there; a hook."""
        self._peaks[cast(nn.Parameter, parameter)] = self._since_then()

    def stop(self) -> None:
        """The backward has ended."""
        self._last = self._since_then()

    def _since_then(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def peak(self) -> int:
        """The highest."""
        return max([self._last, *self._peaks.values()])

    def peak_without_gradients(self) -> int:
        """The highest, of a backward whose gradients stayed, as if none had but the one that comes."""
        peak = came = 0
        for parameter, until in self._peaks.items():
            peak, came = max(peak, until - came), came + local(parameter).nbytes
        return max(peak, self._last - came)

    def peak_with_gradients(self) -> int:
        """The highest, of a backward whose gradients were dropped, as if all had stayed but those that leave.

        Of gradients that are in one piece of memory the first frees nothing: then it may be too much by a unit's.
        """
        peak = came = 0
        for parameter, until in self._peaks.items():
            peak, came = max(peak, until + came), came + (0 if is_streamed(parameter) else local(parameter).nbytes)
        return max(peak, self._last + came)

    def after(self, more: int = 0, sum_bytes: int = 0) -> dict[object, float]:
        """The highest from each gradient on, with so much more.

        `sum_bytes`: an element of those whose gradients of other micro-batches still wait for the last one.
        """
        found: dict[object, float] = {}
        highest, waiting = self._last, 0
        for parameter, until in reversed(self._peaks.items()):
            found[parameter] = highest + more
            waiting += max(0, sum_bytes - parameter.itemsize) * local(parameter).numel()
            highest = max(highest, until + waiting)
        return found


def try_once(
    packed: PackedModel, recipe: Recipe, world: World, manner: Manner, layerwise: LayerByLayer | None = None
) -> Profile:
    """Forward and backward of a full micro-batch, to see what they need before state takes the rest.

    With one micro-batch and `after-norm` all its gradients are there at once, and share the peak with its activations.
    Layer by layer, it is all micro-batches that go together.
    """
    rows = -(-recipe.batch_size // world.size)
    micro_batches = -(-rows // recipe.rows_on(world.size))
    unknown = Profile(0, 0, micro_batches=micro_batches)
    if packed.device.type != "cuda":
        return unknown
    if layerwise is not None:
        long = recipe.max_length >= LONG_ROW
        tried = (_try_few_layers if long else _try_layers)(packed, recipe, layerwise)
        trained = [p for p in packed.model.parameters() if p.requires_grad]
        return _with_sums(tried, trained, manner, micro_batches) if recipe.order == "rows" else tried
    vocab_size = packed.model.config.get_text_config().vocab_size
    batch = full_batch(recipe.rows_on(world.size), recipe.max_length, vocab_size)
    parameters = [p for p in packed.model.parameters() if p.requires_grad]
    start_seconds = _warm_up(packed, recipe, batch, parameters)
    if recipe.max_length >= LONG_ROW:
        batch = _as_documents_are(batch)
    watch, sharded = _Watch(packed.device), isinstance(packed.model, FSDPModule)
    streamed = [p for p in parameters if is_streamed(p)]  # on ranks; their gradients leave, or add up
    all_at_once, seconds = micro_batches == 1 and not manner.in_backward, None
    in_one = all_at_once and not sharded and recipe.max_length >= LONG_ROW  # where a pass takes long, one shows all
    with _told(parameters, watch.came):
        if in_one:
            with suppress(torch.OutOfMemoryError):
                seconds = _time_pass(packed, batch, watch)
                activation_bytes, kept_bytes, bytes_after = watch.peak_without_gradients(), watch.peak(), watch.after()
            packed.model.zero_grad()
        if seconds is None:
            with _told(parameters, drop_gradient):
                seconds = _time_pass(packed, batch, watch)
            gradient_bytes = sum(local(p).nbytes for p in parameters if not is_streamed(p))
            waiting = manner.sum_bytes(0, micro_batches)
            activation_bytes, kept_bytes = watch.peak(), watch.peak() + gradient_bytes
            bytes_after = {} if all_at_once else watch.after(gradient_bytes, int(waiting))
            if all_at_once:  # activations go while gradients come
                kept_bytes = watch.peak_with_gradients()
            # Ranks try only what fits: one that ran out of memory would leave the others waiting, as would one that
            # does not go along.
            tries = all_at_once and not in_one
            if tries and (not sharded or all_say(kept_bytes < gpu_left(packed.device), parameters[0])):
                alone = nullcontext() if sharded else suppress(torch.OutOfMemoryError)  # one of several is waited for
                with alone, _told(streamed, drop_gradient):
                    _time_pass(packed, batch, watch)
                    kept_bytes, bytes_after = watch.peak(), watch.after()
                packed.model.zero_grad()
    tried = replace(
        unknown,
        activation_bytes=activation_bytes,
        kept_bytes=kept_bytes,
        bytes_after={} if sharded else bytes_after,
        forward_seconds=seconds[0],
        backward_seconds=seconds[1],
        start_seconds=start_seconds,
    )
    return _with_sums(tried, streamed, manner, micro_batches)


def _try_layers(packed: PackedModel, recipe: Recipe, layerwise: LayerByLayer) -> Profile:
    """The micro-batches that go through the layers together; gradients of layers that stream leave at once."""
    vocab_size = packed.model.config.get_text_config().vocab_size
    batches = _together(recipe, vocab_size)
    parameters = [p for p in packed.model.parameters() if p.requires_grad]
    peaks = _LayerPeaks(packed, several=len(batches) > 1)
    began = time.perf_counter()
    with _told(parameters, drop_gradient):
        for trial in ([_in_thirds(batches[0], recipe)], batches[:1], batches):  # the first two, for what is compiled
            start_seconds = time.perf_counter() - began
            layerwise.timeline.start()
            taken = peaks.of(functools.partial(layerwise.run, trial, 1, nullcontext))
            spans = layerwise.timeline.stop()
    kept = taken + sum(p.nbytes for p in parameters if not is_streamed(p))
    with _told([p for p in parameters if is_streamed(p)], drop_gradient), suppress(torch.OutOfMemoryError):
        kept = peaks.of(functools.partial(layerwise.run, batches, 1, nullcontext))
    packed.model.zero_grad()
    forward, backward = (sum(s.end - s.start for s in spans if s.lane == lane) for lane in ("forward", "backward"))
    return Profile(taken, kept, forward_seconds=forward, backward_seconds=backward, start_seconds=start_seconds)


def _with_sums(tried: Profile, parameters: Iterable[Tensor], manner: Manner, micro_batches: int) -> Profile:
    """Row by row gradients of these wait, from one micro-batch to the next, for the last one."""
    if micro_batches == 1:
        return tried
    waiting = sum(manner.sum_bytes(p.itemsize, micro_batches) * local(p).numel() for p in parameters)
    taken = (tried.activation_bytes or 0.0) + waiting
    return replace(tried, activation_bytes=taken, kept_bytes=max(taken, tried.kept_bytes or 0.0))


def with_examples(tried: Profile, config: PreTrainedConfig, examples: int) -> Profile:
    """The trial of a micro-batch that has so many examples, where the one that was tried had a few long ones.

    In backward flash attention over segments has fp32 gradients of queries, and a block of them more for each segment.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    more = 4.0 * examples * FLASH_BLOCK * heads * size
    return replace(
        tried,
        activation_bytes=None if tried.activation_bytes is None else tried.activation_bytes + more,
        kept_bytes=None if tried.kept_bytes is None else tried.kept_bytes + more,
        bytes_after={place: num_bytes + more for place, num_bytes in tried.bytes_after.items()},
    )


def _together(recipe: Recipe, vocab_size: int) -> list[MicroBatch]:
    """Full micro-batches that go through the layers together."""
    rows, together = recipe.rows_at_once, rows_together(recipe)
    return [
        full_batch(min(rows, together - first), recipe.max_length, vocab_size) for first in range(0, together, rows)
    ]


def _try_few_layers(packed: PackedModel, recipe: Recipe, layerwise: LayerByLayer) -> Profile:
    """The same with the last few layers, for rows whose whole step takes minutes: layers take alike.

    With fp8 a forward takes less than it says, since the very last layer is in bf16.
    """
    config, layers = packed.model.config.get_text_config(), len(packed.decoder.layers)
    batches = [_as_documents_are(batch) for batch in _together(recipe, config.vocab_size)]
    parameters = [p for p in packed.model.parameters() if p.requires_grad]
    peaks, began = _LayerPeaks(packed, several=len(batches) > 1), time.perf_counter()
    period = _period([_kind(config, number) for number in range(layers)])
    short = _as_documents_are(full_batch(1, _length_to_compile(recipe), config.vocab_size))
    with _told(parameters, drop_gradient), layerwise.fewer(TRIED_PERIODS * period) as tried:
        for trial in ([short] if recipe.rows_at_once == 1 else batches[:1], batches):  # the first, for what is compiled
            start_seconds = time.perf_counter() - began
            layerwise.timeline.start()
            run = functools.partial(layerwise.run, trial, 1, nullcontext)
            taken, layer_forward, layer_backward = _timed_layers(peaks, run, packed.decoder.layers, len(trial), period)
            spans = layerwise.timeline.stop()
    packed.model.zero_grad()
    gradients, at_end = [p.nbytes for p in parameters if not is_streamed(p)], taken
    if isinstance(layerwise.inputs, KeptInputs):
        tokens = sum(batch.input_ids.numel() for batch in batches)
        taken += (layers - tried) * tokens * config.hidden_size * packed.model.dtype.itemsize
    kept = max(taken + max(gradients, default=0), at_end + sum(gradients))  # inputs go while gradients come
    forward, backward = (sum(s.end - s.start for s in spans if s.lane == lane) for lane in ("forward", "backward"))
    forward = layers * (layer_forward or forward)
    again = (1 - 1 / inputs_every(recipe.inputs)) * forward / layers  # of layers without a saved input
    backward += (layers - tried) * (layer_backward + again)  # the head is in it once
    return Profile(taken, kept, forward_seconds=forward, backward_seconds=backward, start_seconds=start_seconds)


def _length_to_compile(recipe: Recipe) -> int:
    """The shortest row whose tiles have the lengths that those of a whole one have. Attention is not compiled."""
    length, tile = recipe.max_length, tile_tokens(recipe)
    if not tile:
        return length
    wanted = _lengths(length, tile)
    some = range(max(wanted) + min(wanted), length, max(wanted))
    return next((n for n in some if _lengths(n, tile) == wanted), length)


def _lengths(tokens: int, tile: int) -> set[int]:
    return {span.stop - span.start for span in tiles.spans(tokens, tile)}


def _kind(config: PreTrainedConfig, layer: int) -> str:
    """Of layers that differ, such as those with a window and those without."""
    kinds = getattr(config, "layer_types", None)
    return str(kinds[layer]) if kinds else ""


def _period(kinds: Sequence[str]) -> int:
    """After how many layers the same kinds come again."""
    return next(n for n in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False)))


def _timed_layers(
    peaks: _LayerPeaks, run: Callable[..., Tensor], layers: Sequence[nn.Module], calls: int, period: int
) -> tuple[int, float, float]:
    """The peak of a run, and the seconds of a layer's forward and backward, each called so often.

    From the end of one's to that of another: a first forward has what happens once, such as memory that is asked for,
    and the last layer's backward begins with the head's.
    """
    forwards, backwards = list[torch.cuda.Event](), list[torch.cuda.Event]()

    def mark(marks: list[torch.cuda.Event]) -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    def watched(done: Callable[[nn.Module], None]) -> Tensor:
        def both(layer: nn.Module) -> None:
            mark(backwards)
            done(layer)

        return run(done=both)

    hooks = [layer.register_forward_hook(lambda *_: mark(forwards)) for layer in layers]
    try:
        taken = peaks.of(watched)
    finally:
        for hook in hooks:
            hook.remove()
    torch.cuda.synchronize()
    first_pass = forwards[: len(backwards) * calls]  # the others are computed again in backward
    return taken, _apart(first_pass[calls - 1 :: calls], period), _apart(backwards, period)


def _apart(ends: Sequence[torch.cuda.Event], period: int) -> float:
    """Seconds from one layer to the next, a mean over the last kinds of layers that repeat; of one layer 0."""
    count = min(period, len(ends) - 1)
    return ends[-1 - count].elapsed_time(ends[-1]) / 1e3 / count if count else 0.0


class _LayerPeaks:
    """The most that a step layer by layer takes, as the optimizer will have it.

    A trial drops gradients. In a step those of a layer add up in fp32 while it is there, and those of the layers that
    the host is ahead are on their way down.
    """

    def __init__(self, packed: PackedModel, *, several: bool) -> None:
        """`several`: micro-batches go through a layer, so that there are sums."""
        self._device = packed.device
        trained = [[p for p in layer.parameters() if p.requires_grad] for layer in packed.decoder.layers]
        layer = max(sum(p.nbytes for p in parameters) for parameters in trained)
        shapes = functools.reduce(operator.or_, (Counter(p.shape for p in parameters) for parameters in trained))
        sums = sum(4 * math.prod(shape) * count for shape, count in shapes.items())  # one takes the place of another
        self._beside = (UNIT_SLOTS - 1) * layer + (sums if several else 0)
        self._before = self._first = 0

    def of(self, run: Callable[..., Tensor]) -> int:
        """The peak of a run."""
        torch.cuda.synchronize(self._device)
        self._before, self._first = torch.cuda.memory_allocated(self._device), 0
        torch.cuda.reset_peak_memory_stats(self._device)
        run(done=self._layer_done)
        return max(self._first, self._since_then() + self._beside)

    def _layer_done(self, layer: nn.Module) -> None:
        if not self._first:  # the head and the last layer
            self._first = self._since_then()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _since_then(self) -> int:
        """With what other streams still use."""
        peak: int = torch.cuda.memory_stats(self._device)["active_bytes.all.peak"]
        return peak - self._before


def _in_thirds(batch: MicroBatch, recipe: Recipe) -> MicroBatch:
    """The same tokens as packed rows: those are compiled otherwise than whole ones."""
    cuts = (start + recipe.max_length // 3 for start in batch.boundaries[:-1])
    return replace(batch, boundaries=tuple(sorted({*batch.boundaries, *cuts})))


def _as_documents_are(batch: MicroBatch) -> MicroBatch:
    """The same tokens with a short example at the end of each row: attention takes more memory than of whole rows."""
    cuts = (end - SHORT_END for end in batch.boundaries[1:])
    return replace(batch, boundaries=tuple(sorted({*batch.boundaries, *cuts})))


def _warm_up(packed: PackedModel, recipe: Recipe, batch: MicroBatch, parameters: Sequence[nn.Parameter]) -> float:
    """Compile what packed rows and whole ones need, and make workspaces; the seconds of it.

    Of a model whose rows are long with one layer of each kind, as to what it is, what of it is computed again, and in
    what it multiplies.
    """
    began, config, layers = time.perf_counter(), packed.model.config.get_text_config(), packed.decoder.layers
    dials = recompute_by_layer(recipe.recompute, len(layers))
    in_fp8 = fp8_layers(len(layers)) if recipe.matmul == "fp8" else ()
    kinds = {(_kind(config, n), dials[n], n in in_fp8): n for n in reversed(range(len(layers)))}
    fewer = recipe.max_length >= LONG_ROW and not isinstance(packed.model, FSDPModule)
    with _told(parameters, drop_gradient), packed.decoder.only(sorted(kinds.values())) if fewer else nullcontext():
        for trial in (_in_thirds(batch, recipe), batch) if pick_compile(recipe, packed.device) else (batch,):
            packed.loss_sum(trial).backward()
            torch.cuda.synchronize(packed.device)
    return time.perf_counter() - began


def _time_pass(packed: PackedModel, batch: MicroBatch, watch: _Watch) -> tuple[float, float]:
    """Seconds of a forward and a backward."""
    watch.start()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    loss = packed.loss_sum(batch)
    marks[1].record()
    loss.backward()
    marks[2].record()
    watch.stop()
    torch.cuda.synchronize(packed.device)
    forward, backward = (a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))
    return forward, backward


@contextmanager
def _told(parameters: Sequence[nn.Parameter], hook: Callable[[Tensor], None]) -> Iterator[None]:
    """`hook` is told of every gradient that is there."""
    hooks = [p.register_post_accumulate_grad_hook(hook) for p in parameters]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def full_batch(rows: int, length: int, vocab_size: int) -> MicroBatch:
    """Rows without padding, each one example, every token trained on: the most that a micro-batch can take."""
    ids = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    places = torch.arange(rows * length).view(rows, length)
    return MicroBatch(
        input_ids=ids,
        position_ids=places % length,
        boundaries=tuple(range(0, rows * length + 1, length)),
        target_index=places[:, :-1].flatten(),
        targets=ids[:, 1:].flatten(),
        num_tokens=rows * length,
        num_trained=rows * (length - 1),
    )


def drop_gradient(parameter: Tensor) -> None:
    """A hook for a backward whose gradients nobody wants."""
    parameter.grad = None
