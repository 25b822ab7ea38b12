"""A layer in tiles along the row: what grows with the row and is not attention is computed some tokens at a time.

Attention is where tokens meet; everything else of a layer is done to each token alone: norms, projections, rotary
positions, residuals, the MLP, the choice of experts and the experts. So a layer is computed in three parts. Tile by
tile up to its attention, whose queries, keys and values are written one tile after another; attention, of the whole
row; tile by tile from there to the end. Backward goes the same way back, and computes every tile again before it. At
its peak a layer then takes a few times its input, whatever its MLP is wide.

The parts are the layer's own code, called with tokens of one tile and with an attention that stops there, or gives what
attention gave (`attention.Before`, `After`). Rejected: parts written here for every architecture, and tiles for the MLP
module alone, which leave norms, projections and rotary positions at the length of the row. Of the way to attention the
second part computes what it need not, if it is not compiled; the compiler leaves it out.

Gradients of weights are sums over tiles: each tile's product is rounded as that of a whole row would be, the sum is
fp32, and is rounded once. Autograd is given one gradient of a weight, as by a whole layer.
"""

from __future__ import annotations

import functools
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from penstock.errors import ModelError
from penstock.model.attention import After, Before, Reached, Segments, attend
from penstock.model.compiled import Attempt, Say, experts_of, leave_out_experts, prepare_compiler
from penstock.model.loss import forward_replaced

_NONE = "Use --tile none."


def set_tiles(layers: Sequence[nn.Module], tile: int, say: Say, *, compiled: bool = False) -> None:
    """Compute layers in tiles of about so many tokens, or undo it with 0. What else replaced a forward is undone first.

    Such a layer has no graph: `Tiled.gradient` is its backward.
    """
    for layer in layers:
        if isinstance(vars(layer).get("forward"), Tiled):
            del layer.forward
    if not tile:
        return
    if compiled:
        prepare_compiler()
    attempt = Attempt(say) if compiled else None
    for layer in layers:
        if compiled:
            leave_out_experts(layer)
        layer.forward = Tiled(layer, tile, attempt)


def spans(tokens: int, tile: int) -> list[slice]:
    """So many tokens in tiles of no more than `tile`, of one length where that takes at most twice as many."""
    least = -(-tokens // tile)
    count = next((n for n in range(least, 2 * least + 1) if tokens % n == 0), least)
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


@dataclass(frozen=True)
class _Call:
    """What a layer is called with, its rows laid end to end."""

    hidden: Tensor
    """(1, tokens, size)."""
    segments: Segments
    leaves: list[Any]
    """All other arguments; those that have a place for every token are laid end to end as well."""
    by_token: frozenset[int]
    spec: TreeSpec

    @classmethod
    def of(cls, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        rows, length = hidden.shape[:2]
        kwargs = dict(kwargs)
        segments = kwargs.pop("segments")
        leaves, spec = tree_flatten((args, kwargs))
        found = set[int]()
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.ndim >= 2 and leaf.shape[:2] in ((rows, length), (1, length)):
                leaves[number] = leaf.expand(rows, length, *leaf.shape[2:]).reshape(1, rows * length, *leaf.shape[2:])
                found.add(number)
        flat = hidden.reshape(1, rows * length, -1)
        return cls(flat, segments, leaves, frozenset(found), spec)

    def at(self, tokens: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The other arguments for these tokens."""
        cut = [_some(leaf, tokens) if number in self.by_token else leaf for number, leaf in enumerate(self.leaves)]
        return cast(tuple[tuple[Any, ...], dict[str, Any]], tree_unflatten(cut, self.spec))


class Tiled:
    """A layer's forward in tiles, and its backward."""

    def __init__(self, layer: nn.Module, tile: int, attempt: Attempt | None) -> None:
        """`attempt`: to compile it, while it trains."""
        self.plain, self._layer, self.tile = layer.forward, weakref.ref(layer), tile
        functools.update_wrapper(self, self.plain)  # transformers reads the signatures of forwards
        self._parts = _Parts(self.plain, layer, attempt)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer itself. Where rows are not packed, as in generation, it is the layer itself."""
        if "segments" not in kwargs:
            return self.plain(*args, **kwargs)
        assert not torch.is_grad_enabled(), "gradients of a layer in tiles come from `gradient`"
        hidden, args = _first(args, kwargs)
        call = _Call.of(hidden, args, kwargs)
        projected = self._projected(call)
        attended = _attended(self._asked(call), projected, call.segments)
        del projected  # or it would be there beside the result
        result = torch.empty_like(call.hidden)
        for tokens in self._tiles(call):
            result[:, tokens] = self._parts.finish(
                _some(call.hidden, tokens), _some(attended, tokens), *call.at(tokens)
            )
        return result.view(hidden.shape)

    def gradient(self, grad: Tensor, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The gradient of the input from that of the result, which it is written over. Weights get theirs."""
        layer, shape = self._layer(), hidden.shape
        assert layer is not None, "it is called"
        call, sums = _Call.of(hidden.detach(), args, kwargs), _Sums([p for p in layer.parameters() if p.requires_grad])
        grad = grad.reshape(call.hidden.shape)
        with torch.no_grad():
            projected = self._projected(call)
        projected = [x.requires_grad_() for x in projected]
        with torch.enable_grad():
            attended = _attended(self._asked(call), projected, call.segments)
        grad_attended = torch.empty_like(attended)
        for tokens in self._tiles(call):
            x, y = (_some(t.detach(), tokens).requires_grad_() for t in (call.hidden, attended))
            with torch.enable_grad():
                result = self._parts.finish(x, y, *call.at(tokens))
            grad[:, tokens], grad_attended[:, tokens] = sums.add([result], [x, y], [grad[:, tokens]])
            del result, x, y  # and its graph, or two tiles would be there at once
        gradients = sums.add([attended], projected, [grad_attended])
        del attended, grad_attended, projected
        for tokens in self._tiles(call):
            x = _some(call.hidden, tokens).detach().requires_grad_()
            with torch.enable_grad():
                parts = self._parts.project(x, *call.at(tokens))
            (found,) = sums.add(parts, [x], [g[:, :, tokens] for g in gradients])
            grad[:, tokens] += found
            del parts
        del gradients
        sums.deliver()
        return grad.view(shape)

    def _tiles(self, call: _Call) -> list[slice]:
        return spans(call.hidden.shape[1], self.tile)

    def _asked(self, call: _Call) -> tuple[Any, ...]:
        """What attention is called with, beside queries, keys and values: of the layer, told by one token."""
        asked: tuple[Any, ...] = self._parts.before(call.hidden[:, :1].detach(), *call.at(slice(0, 1)))
        return asked

    def _projected(self, call: _Call) -> list[Tensor]:
        """Queries, keys and values of all tokens: (1, heads, tokens, head size), each token's in one piece."""
        whole: list[Tensor] = []
        for tokens in self._tiles(call):
            parts = self._parts.project(_some(call.hidden, tokens), *call.at(tokens))
            if not whole:
                total = call.hidden.shape[1]
                whole = [x.new_empty(total, x.shape[1], x.shape[3]).transpose(0, 1).unsqueeze(0) for x in parts]
            for x, part in zip(whole, parts, strict=True):
                x[:, :, tokens] = part
        return whole


def _some(x: Tensor, tokens: slice) -> Tensor:
    """Of (1, tokens, ...) these tokens, as a tensor that shows nothing of how many there are.

    A plain slice would in the stride of its first dimension, and for that the compiler makes every graph again.
    """
    return x[0, tokens].unsqueeze(0)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """The hidden states, however they are given, and what is left of `args`."""
    return (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())


def _attended(asked: tuple[Any, ...], projected: Sequence[Tensor], segments: Segments) -> Tensor:
    """Attention over whole rows: (1, tokens, heads, head size)."""
    module, *_, mask, scaling, dropout, named = asked
    query, key, value = projected
    return attend(module, query, key, value, mask, scaling, dropout, **{**named, "segments": segments})[0]


class _Sums:
    """Gradients of weights, added up over tiles in fp32."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self._weights = weights
        self._sums: list[Tensor | None] = [None] * len(weights)

    def add(self, results: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Backward from `results`: the gradients of `inputs`; those of weights are added."""
        found = list(torch.autograd.grad(results, [*inputs, *self._weights], gradients, allow_unused=True))
        own, of_weights = found[: len(inputs)], found[len(inputs) :]
        del found
        for number, total in enumerate(self._sums):
            gradient = of_weights.pop(0)  # which is dropped when it is added
            if gradient is not None:
                # The first is kept as it came: where there is one tile, nothing is added.
                self._sums[number] = gradient if total is None else total.float().add_(gradient)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(own, inputs, strict=True)]

    def deliver(self) -> None:
        """Hand each to autograd, as a backward of the whole layer would."""
        there = [number for number, total in enumerate(self._sums) if total is not None]
        if there:
            weights = [self._weights[number] for number in there]
            sums = [cast(Tensor, self._sums[number]) for number in there]
            self._sums = []
            with torch.enable_grad():
                handed: Tensor = _Handed.apply(sums, *weights)  # type: ignore[no-untyped-call]
                handed.backward()


class _Handed(torch.autograd.Function):
    """Nothing, whose gradients by weights are known. They are let go here, so that autograd takes them uncopied."""

    @staticmethod
    def forward(ctx: Any, sums: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.sums, ctx.dtypes = sums, [weight.dtype for weight in weights]
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *(ctx.sums.pop(0).to(dtype) for dtype in ctx.dtypes))


class _Parts:
    """What of a layer is before its attention, and what is after it; as it is written, or compiled."""

    def __init__(self, plain: Callable[..., Any], layer: nn.Module, attempt: Attempt | None) -> None:
        self._plain, self._layer, self._attempt = plain, weakref.ref(layer), attempt
        if attempt is not None:
            # The layer is an argument: bound to the function, each would be one of its own, and compiled for itself.
            forward, self._experts = cast(MethodType, plain).__func__, experts_of(layer)
            self._project = functools.partial(torch.compile(_project), forward)
            self._finish = functools.partial(torch.compile(_finish), forward)

    @property
    def _trains(self) -> nn.Module | None:
        """The layer, where it is to run compiled."""
        layer = self._layer()
        return layer if self._attempt is not None and layer is not None and layer.training else None

    def before(self, hidden: Tensor, args: Any, kwargs: Any) -> Any:
        """What attention is called with."""
        asked = Before(stop=True)
        with suppress(Reached):
            self._plain(hidden, *args, segments=asked, **kwargs)
        (call,) = asked.calls
        return call

    def project(self, hidden: Tensor, args: Any, kwargs: Any) -> list[Tensor]:
        """Queries, keys and values of a tile."""

        def plain(*_: Any) -> list[Tensor]:
            return list(self.before(hidden, args, kwargs)[1:4])

        if (layer := self._trains) is None or self._attempt is None:
            return plain()
        with ExitStack() as stack:
            for experts in self._experts:  # the compiler does not look into them, and would run all that is before them
                stack.enter_context(forward_replaced(experts, _given_back))
            return list(self._attempt.call(self._project, plain, layer, hidden, args, kwargs))

    def finish(self, hidden: Tensor, attended: Tensor, args: Any, kwargs: Any) -> Tensor:
        """The result of a tile, from what attention gave."""

        def plain(*_: Any) -> Any:
            return self._plain(hidden, *args, segments=After(attended), **kwargs)

        layer, attempt = self._trains, self._attempt
        result: Tensor
        if layer is None or attempt is None:
            result = plain()
        else:
            result = attempt.call(self._finish, plain, layer, hidden, attended, args, kwargs)
        return result


def _project(forward: Callable[..., Any], layer: nn.Module, hidden: Tensor, args: Any, kwargs: Any) -> Any:
    asked = Before(stop=False)
    forward(layer, hidden, *args, segments=asked, **kwargs)
    return asked.calls[0][1:4]


def _finish(
    forward: Callable[..., Any], layer: nn.Module, hidden: Tensor, attended: Tensor, args: Any, kwargs: Any
) -> Any:
    return forward(layer, hidden, *args, segments=After(attended), **kwargs)


def _given_back(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


@torch.no_grad()
def check_tiles(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Prove on a few tokens that the layer gives in tiles what it gives at once."""
    kwargs = dict(kwargs)
    hidden, args = _first(args, kwargs)
    if "segments" not in kwargs:
        raise ModelError("tiles need varlen attention", where=type(layer).__name__, remedy=_NONE)
    asked = Before(stop=False)
    layer.forward(hidden, *args, **{**kwargs, "segments": asked})
    if len(asked.calls) != 1:
        what = f"calls its attention {len(asked.calls)} times, so that it cannot be computed in tiles"
        raise ModelError(what, where=type(layer).__name__, remedy=_NONE)
    whole = layer.forward(hidden, *args, **kwargs)
    tiled = Tiled(layer, 3, None)(hidden, *args, **kwargs)
    # Of most tokens: a rounding may give one of them to another expert.
    error = statistics.median(_errors(whole, tiled)) if isinstance(whole, Tensor) else 0.0
    if error > (1e-4 if hidden.dtype is torch.float32 else 5e-2):
        what = f"gives another result in tiles, off by {error:.3g}: its tokens meet outside of attention"
        raise ModelError(what, where=type(layer).__name__, remedy=_NONE)


def _errors(whole: Tensor, tiled: Tensor) -> Iterator[float]:
    """Of every token, beside the largest value."""
    off = (whole - tiled).float().abs().amax(-1) / whole.float().abs().amax(-1)
    yield from off.flatten().tolist()
