"""Forward and backward layer by layer: all micro-batches pass a layer before the next one begins.

Autograd does not see the layers at once: each is computed again in backward from its saved input, and its backward runs
alone, so that its weights need not be on the device before or after, and its gradients are final when it ends. Where
inputs are saved of every n-th layer only, backward first computes those of the layers between, n at a time. What is
around the layers is the model's own code. It is run twice for every micro-batch, with layers that only listen: once to
learn what each layer is called with, and once from the last layer's result on, to the loss.
"""

from __future__ import annotations

import functools
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from penstock.data.loader import MicroBatch
from penstock.engine.packed import PackedModel, Rows
from penstock.engine.parked import SavedInputs
from penstock.engine.weights import StreamedWeights
from penstock.errors import ModelError
from penstock.flow.timeline import Timeline
from penstock.model.attention import Segments
from penstock.model.loss import forward_replaced
from penstock.model.tiles import Tiled, spans

Held = Callable[[], AbstractContextManager[None]]


@dataclass
class _Call:
    """What a layer is called with beside its input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class _Pass:
    """One micro-batch on its way."""

    rows: Rows
    calls: list[_Call]
    embedded: Tensor
    """The first layer's input, with its graph."""
    hidden: Tensor
    """In forward what the last layer gave, in backward the gradient of that."""
    looked_up: list[tuple[Tensor, Tensor]]
    """Tokens and their embeddings, whose gradients wait for those of the other micro-batches."""


class LayerByLayer:
    """Losses and gradients of the micro-batches of a step."""

    def __init__(
        self,
        packed: PackedModel,
        weights: StreamedWeights | None,
        inputs: SavedInputs,
        timeline: Timeline,
        every: int = 1,
    ) -> None:
        """`every`: layers from one saved input to the next."""
        self._packed, self._weights, self.inputs, self.timeline = packed, weights, inputs, timeline
        self._layers = packed.decoder.layers
        count = len(self._layers)
        self._groups = [range(first, min(first + every, count)) for first in range(0, count, every)]
        """Layers by number, with an input saved of the first of each."""
        self._list = _list_of(packed.decoder.backbone, self._layers)
        # Of a tied weight the head's gradient comes first and the embedding's last.
        self._tied = bool(packed.decoder.tied)
        self._embedding = embedding_of(packed.decoder.backbone)

    @contextmanager
    def fewer(self, layers: int) -> Iterator[int]:
        """For a trial: the last groups of layers only, about so many layers; how many they are."""
        groups, size = self._groups, len(self._groups[0])
        self._groups = groups[-max(1, layers // size) :]
        try:
            yield sum(map(len, self._groups))
        finally:
            self._groups = groups

    def run(
        self,
        batches: Sequence[MicroBatch],
        trained: int,
        held: Held,
        *,
        last: bool = True,
        done: Callable[[nn.Module], None] = lambda layer: None,
    ) -> Tensor:
        """The loss, a mean over `trained` tokens. In `held()` no gradient is final; with `last` all are at the end.

        `done` is told of each layer whose gradients are all there, while its weights are still present.
        """
        try:
            with self.timeline.on_device("forward"):
                passes = self._forward(batches)
            with self.timeline.on_device("backward"):
                return self._backward(passes, trained, held, done if last else None)
        finally:
            self.inputs.forget()

    def _forward(self, batches: Sequence[MicroBatch]) -> list[_Pass]:
        if self._weights is not None:
            backward = [number for group in reversed(self._groups) for number in (*group[:-1], *reversed(group))]
            forward = [number for group in self._groups for number in group]
            self._weights.announce([self._layers[number] for number in (*forward, *backward)])
        passes = [self._begin(batch) for batch in batches]
        saved = {group[0] for group in self._groups}
        with torch.no_grad():
            for number in (number for group in self._groups for number in group):
                layer = self._layers[number]
                with self._present(layer):
                    for place, one in enumerate(passes):
                        if number in saved:
                            self.inputs.save((number, place), one.hidden)
                        one.hidden = _called(layer, one.hidden, one.calls[number])
        return passes

    def _backward(
        self, passes: list[_Pass], trained: int, held: Held, done: Callable[[nn.Module], None] | None
    ) -> Tensor:
        last = done is not None
        self.inputs.announce((group[0], place) for group in reversed(self._groups) for place in range(len(passes)))
        total = self._loss(passes, trained, held, last=last)
        for group in reversed(self._groups):
            between = self._between(passes, group)
            for number in reversed(group):
                layer = self._layers[number]
                with self._present(layer, stale=True):
                    for place, one in enumerate(passes):
                        key = (number, place)
                        with self._final(held, last and place == len(passes) - 1):
                            hidden = between.pop(key) if key in between else self.inputs.take(key)
                            one.hidden = self._gradient(layer, hidden, one, number)
                    if done is not None:
                        done(layer)
        for place, one in enumerate(passes):
            if one.embedded.requires_grad:
                with self._final(held, last and place == len(passes) - 1):
                    one.embedded.backward(one.hidden)
            one.hidden = one.embedded = one.hidden.new_empty(0)
        with self._final(held, last):
            self._embedding_backward([pair for one in passes for pair in one.looked_up])
        return total

    @torch.no_grad()
    def _between(self, passes: Sequence[_Pass], group: range) -> dict[tuple[int, int], Tensor]:
        """Inputs of the layers of a group, computed again from that of the first. Of one layer: it is still saved."""
        found: dict[tuple[int, int], Tensor] = {}
        for number in group[:-1]:
            layer = self._layers[number]
            with self._present(layer):
                for place, one in enumerate(passes):
                    if number == group[0]:
                        found[number, place] = self.inputs.take((number, place))
                    found[number + 1, place] = _called(layer, found[number, place], one.calls[number])
        return found

    def _embedding_backward(self, looked_up: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Of all micro-batches at once: one gradient of the whole table, instead of one each and their sum in fp32."""
        if not any(found.grad is not None for _, found in looked_up):
            return
        assert self._embedding is not None, "it has looked them up"
        pairs = [(ids.flatten(), found.grad.flatten(0, -2)) for ids, found in looked_up if found.grad is not None]
        ids, gradients = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        with torch.enable_grad():
            self._embedding.forward(ids).backward(gradients)

    def _final(self, held: Held, yes: bool) -> AbstractContextManager[None]:
        return nullcontext() if yes else held()

    def _present(self, layer: nn.Module, *, stale: bool = False) -> AbstractContextManager[None]:
        return nullcontext() if self._weights is None else self._weights.present(layer, stale=stale)

    def _begin(self, batch: MicroBatch) -> _Pass:
        """Run the model up to its last layer, with layers that give back what they get, and note their calls."""
        rows, calls, inputs = self._packed.rows(batch), list[_Call](), list[Tensor]()
        looked_up: list[tuple[Tensor, Tensor]] = []

        def listen(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not calls:
                inputs.append(hidden)
            calls.append(_Call(args, kwargs))
            if len(calls) == len(self._layers):
                raise _Enough
            return hidden

        with self._listening(listen), self._looking_up(looked_up), suppress(_Enough):
            self._packed.hidden_states(rows)
        (embedded,) = inputs
        self._refuse_other_gradients(calls)
        return _Pass(rows, calls, embedded, embedded.detach(), looked_up)

    def _looking_up(self, looked_up: list[tuple[Tensor, Tensor]]) -> AbstractContextManager[None]:
        """What the embedding gives has no graph inside, and is noted with its tokens."""
        if self._embedding is None:
            return nullcontext()
        forward = self._embedding.forward

        def look_up(*args: Tensor, **kwargs: Tensor) -> Tensor:
            (ids,) = (*args, *kwargs.values())
            with torch.no_grad():
                found: Tensor = forward(ids)
            looked_up.append((ids, found.requires_grad_()))
            return found.view_as(found)  # some models scale it in place

        return forward_replaced(self._embedding, look_up)

    def _refuse_other_gradients(self, calls: list[_Call]) -> None:
        """What goes into a layer beside its input has no backward here: a weight before it would not be trained."""
        given = tree_leaves([(call.args, call.kwargs) for call in calls])
        shared = any(isinstance(value, UserDict) for value in given)  # where layers leave keys and values for others
        if shared or any(isinstance(value, Tensor) and value.requires_grad for value in given):
            raise ModelError(
                "its layers are given more than one tensor that is trained, so that they cannot be computed one by one",
                where=type(self._packed.model).__name__,
                remedy="Use --weights resident and --order rows.",
            )

    def _loss(self, passes: list[_Pass], trained: int, held: Held, *, last: bool) -> Tensor:
        """From the last layer's results to the loss, and back.

        The head sees the tokens of all micro-batches at once, so that its gradient is one sum, in fp32, and rounded
        once. What is between the layers and the head runs backward by itself, and in tiles if the layers do: of a whole
        row a norm has six tensors in fp32.
        """
        parts = [part for one in passes for part in self._in_tiles(one)]
        whole = len(parts) == len(passes)
        with torch.enable_grad():
            with nullcontext() if whole else torch.no_grad():
                chosen = [self._chosen(*part) for part in parts]
            gathered, sizes = torch.cat([some.detach() for some in chosen]).requires_grad_(), list(map(len, chosen))
            chosen = chosen if whole else []
            loss = self._packed.head_loss(gathered, torch.cat([one.rows.batch.targets for one in passes])) / trained
            with self._final(held, last and not self._tied):
                loss.backward()
            assert gathered.grad is not None, "the loss depends on what the head is given"
            gradients = gathered.grad.split(sizes)
            del gathered
            for place, (rows, top) in enumerate(parts):
                with self._final(held, last and place == len(parts) - 1):
                    (chosen[place] if whole else self._chosen(rows, top)).backward(gradients[place])
                assert top.grad is not None, "the head is given what the last layer gives"
                if whole:
                    passes[place].hidden = top.grad.view_as(passes[place].hidden)
                else:
                    top.detach().copy_(top.grad)  # where its part of the micro-batch lies
                    top.grad = None
        return loss.detach()

    def _in_tiles(self, one: _Pass) -> list[tuple[Rows, Tensor]]:
        """A micro-batch, and what its last layer gave, of which each part is a leaf of a graph of its own."""
        tiled = vars(self._layers[-1]).get("forward")
        if not isinstance(tiled, Tiled):
            return [(one.rows, one.hidden.detach().requires_grad_())]
        one.hidden = one.hidden.contiguous()
        batch, hidden = one.rows.batch, one.hidden.flatten(0, 1)[None]
        tokens = spans(hidden.shape[1], tiled.tile)
        ends = torch.tensor([some.stop for some in tokens], device=hidden.device)
        cuts = [0, *torch.searchsorted(batch.target_index, ends).tolist()]  # they lie in order
        ids, places = (x.flatten()[None] for x in (batch.input_ids, batch.position_ids))
        parts = []
        for some, (first, end) in zip(tokens, itertools.pairwise(cuts), strict=True):
            index, targets = batch.target_index[first:end] - some.start, batch.targets[first:end]
            part = replace(
                batch, input_ids=ids[:, some], position_ids=places[:, some], target_index=index, targets=targets
            )
            segments = Segments.of((0, some.stop - some.start), hidden.device)
            parts.append((Rows(part, segments), hidden[:, some].detach().requires_grad_()))
        return parts

    def _chosen(self, rows: Rows, top: Tensor) -> Tensor:
        """What the head is given of a micro-batch, with `top` as the last layer's result."""
        count = 0

        def listen(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            nonlocal count
            count += 1
            return top if count == len(self._layers) else hidden.detach()

        with self._listening(listen):
            return self._packed.chosen(self._packed.hidden_states(rows), rows)

    def _gradient(self, layer: nn.Module, hidden: Tensor, one: _Pass, number: int) -> Tensor:
        """Compute the layer again, then backward through it alone; the gradient of its input."""
        if isinstance(layer.forward, Tiled):
            with forward_replaced(layer, functools.partial(layer.forward.gradient, one.hidden)):
                return _called(layer, hidden, one.calls[number])
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            result = _called(layer, hidden, one.calls[number])
            result.backward(one.hidden)
        assert hidden.grad is not None, "a layer's result depends on its input"
        return hidden.grad

    @contextmanager
    def _listening(self, listen: Callable[..., Tensor]) -> Iterator[None]:
        """Other modules in the place of the layers: called as themselves, they would wait for their updates."""
        theirs = dict(self._list._modules)
        for name, layer in theirs.items():
            self._list._modules[name] = _Listener(layer, listen)
        try:
            yield
        finally:
            self._list._modules.update(theirs)


class _Enough(Exception):
    """All layers have been called."""


class _Listener(nn.Module):
    """Stands in for a layer: it has what the layer has, and is called instead of it."""

    def __init__(self, layer: nn.Module | None, listen: Callable[..., Tensor]) -> None:
        super().__init__()
        vars(self).update(_layer=layer, _listen=listen)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the model calls its layer with."""
        if "hidden_states" in kwargs:
            args = (kwargs.pop("hidden_states"), *args)
        result: Tensor = vars(self)["_listen"](*args, **kwargs)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"], name)


def _called(layer: nn.Module, hidden: Tensor, call: _Call) -> Tensor:
    result = layer(hidden, *call.args, **call.kwargs)
    if not isinstance(result, Tensor):
        raise ModelError(
            f"its layers return {type(result).__name__}, not a tensor, so that they cannot be computed one by one",
            where=type(layer).__name__,
            remedy="Use --weights resident and --order rows.",
        )
    return result


def embedding_of(backbone: nn.Module) -> nn.Module | None:
    """The embedding, if the gradients of all its tokens can be made at once without rounding more often.

    On a GPU torch adds them up in fp32, but for steps of up to 3,072 tokens, which it adds in their own type as it does
    on a CPU. None also if it is not trained.
    """
    find = getattr(backbone, "get_input_embeddings", None)
    module = find() if find is not None else None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.requires_grad:
        return None
    return module if weight.is_cuda or weight.dtype is torch.float32 else None


def _list_of(backbone: nn.Module, layers: Sequence[nn.Module]) -> nn.ModuleList:
    """The module that the model takes its layers from."""
    lists = (module for module in backbone.modules() if isinstance(module, nn.ModuleList))
    return next(found for found in lists if tuple(found) == tuple(layers))
