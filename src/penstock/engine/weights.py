"""Units that stream: their weights lie in host memory, and on the device only while they compute.

A parameter of such a unit is, at any time, either its bytes in an arena or its bytes in a slot: `parameter.data` is
pointed at the one or the other. So whoever saves, loads or exports weights sees them in host memory, and whoever calls
the module computes on the device. Modules of their own in the slots were rejected: layers differ, if only by their
kind of attention, and everything that holds on to a parameter (hooks, groups, names) would hold on to the wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from penstock.engine.ranks import World
from penstock.engine.shards import StreamedShards
from penstock.errors import RecipeError
from penstock.flow.arena import WEIGHTS, Arena
from penstock.flow.transfers import Link, link_of
from penstock.flow.unit_slots import UnitSlots
from penstock.machine.hardware import near_cores
from penstock.model.decoder import find_decoder
from penstock.model.load import load_model
from penstock.model.load_rows import draw_model
from penstock.offload.dtensors import lies_at, lies_here
from penstock.plan.layout import UNIT_SLOTS, padded
from penstock.recipe.recipe import Recipe


def num_streamed(recipe: Recipe, num_layers: int) -> int:
    """How many decoder layers stream, the last ones. `auto`, if nobody has planned, is none."""
    if not streams(recipe):
        return 0
    count = num_layers if recipe.weights == "streamed" else int(recipe.weights)
    if count > num_layers:
        raise RecipeError(
            f"the model has {num_layers} layers", where=f"weights = {recipe.weights}", remedy="Use streamed for all."
        )
    return count


def streams(recipe: Recipe) -> bool:
    """Whether weights of any layer do, so that the model is loaded to host memory."""
    return recipe.weights not in ("auto", "resident")


def layer_by_layer(recipe: Recipe) -> bool:
    """Whether steps are computed layer by layer, each layer again in backward from its saved input."""
    return streams(recipe) or recipe.order == "layers"


class _Unit:
    """One layer: its parameters, where they lie in host memory, and how they are cut from a slot."""

    def __init__(self, module: nn.Module, link: Link) -> None:
        self.parameters = tuple(module.parameters())
        device = link.streams.device
        num_bytes = sum(padded(p.nbytes) for p in self.parameters)
        # One arena a unit: while they are filled, no more than one unit is in host memory twice.
        self._arena = Arena(num_bytes, pinned=device.type == "cuda", cores=near_cores(device), what=WEIGHTS)
        self.bytes = self._arena.cut(num_bytes)
        self.at_home = self.cut(self.bytes)
        for p, home in zip(self.parameters, self.at_home, strict=True):
            home.copy_(p.detach())
            p.data = home
            lies_at(p, home)
        for buffer in module.buffers():  # small, and not trained
            buffer.data = buffer.data.to(device)

    def cut(self, memory: Tensor) -> list[Tensor]:
        """Its parameters, as they lie in memory one after another."""
        found, start = [], 0
        for p in self.parameters:
            found.append(memory[start : start + p.nbytes].view(p.dtype).view(p.shape))
            start += padded(p.nbytes)
        return found

    def point_at(self, places: Sequence[Tensor]) -> None:
        """From here on the parameters are there."""
        for p, place in zip(self.parameters, places, strict=True):
            p.data = place

    def close(self) -> None:
        """Give the arena back; the parameters keep the memory alive that they point at."""
        for p in self.parameters:
            lies_here(p)
        self._arena.close()


class StreamedWeights:
    """The layers that stream, their slots, and the hooks by which a call of a layer brings its weights in."""

    def __init__(self, layers: Sequence[nn.Module], link: Link) -> None:
        with torch.no_grad():
            self._units = [_Unit(layer, link) for layer in layers]
        self.num_bytes = sum(unit.bytes.nbytes for unit in self._units)
        self.updated: Callable[[nn.Module], None] = lambda module: None
        """Returns once the weights of a layer in host memory are those of the last step; called in a thread."""
        self._layers, self._number = tuple(layers), {layer: number for number, layer in enumerate(layers)}
        self._slots = UnitSlots(UNIT_SLOTS, [unit.bytes for unit in self._units], link, self._ready)
        self.slot_bytes = min(UNIT_SLOTS, len(self._units)) * max(unit.bytes.nbytes for unit in self._units)
        self._present: set[int] = set()
        self._alone: set[int] = set()  # of those, the ones that a call of the layer itself brought in
        self._hooks: list[RemovableHandle] = []
        for layer in layers:
            self._hooks.append(layer.register_forward_pre_hook(self._called))
            self._hooks.append(layer.register_forward_hook(self._returned, always_call=True))

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those that stream, trained or frozen."""
        return {p for unit in self._units for p in unit.parameters}

    def announce(self, layers: Sequence[nn.Module]) -> None:
        """Layers that will be called, in this order; those that do not stream are passed over."""
        self._slots.announce(self._number[layer] for layer in layers if layer in self._number)

    @contextmanager
    def present(self, layer: nn.Module, *, stale: bool = False) -> Iterator[None]:
        """The weights of a layer are on the device inside. `stale`: after that they will be updated."""
        number = self._number.get(layer)
        if number is None or number in self._present:
            yield
            return
        self._enter(number)
        try:
            yield
        finally:
            self._leave(number, stale=stale)

    def describe(self) -> str:
        """How much of what lies where, in words."""
        held = f"{self.num_bytes / 1e9:,.2f} GB of weights in host memory"
        return f"{len(self._layers)} layers stream: {held}, {self.slot_bytes / 1e9:,.2f} GB of slots for them"

    def forget(self) -> None:
        """Weights were written in host memory: none that lies in a slot is true any more."""
        self._slots.forget()

    def close(self) -> None:
        """Take the hooks off and give the slots back. Weights stay where they are, in host memory."""
        for hook in self._hooks:
            hook.remove()
        self._slots.close()
        for unit in self._units:
            unit.close()

    def _ready(self, number: int) -> None:
        self.updated(self._layers[number])

    def _enter(self, number: int) -> None:
        unit = self._units[number]
        unit.point_at(unit.cut(self._slots.take(number)))
        self._present.add(number)

    def _leave(self, number: int, *, stale: bool) -> None:
        self._present.discard(number)
        unit = self._units[number]
        unit.point_at(unit.at_home)
        self._slots.leave(number, stale=stale)

    def _called(self, layer: nn.Module, _: object) -> None:
        number = self._number[layer]
        if number not in self._present:
            assert not torch.is_grad_enabled(), "backward would find the weights gone: LayerByLayer computes it"
            self._enter(number)
            self._alone.add(number)

    def _returned(self, layer: nn.Module, *_: object) -> None:
        number = self._number[layer]
        if number in self._alone:
            self._alone.discard(number)
            self._leave(number, stale=False)


def load_to_stream(
    recipe: Recipe, config: PreTrainedConfig, device: torch.device, say: Callable[[str], None]
) -> PreTrainedModel:
    """The model in host memory, from where `stream_weights` takes it."""
    host = torch.device("cpu")
    if recipe.init == "random" and device != host:
        return draw_model(recipe, config, host, device, say)
    return load_model(recipe, config, host, say)


def stream_weights(
    model: PreTrainedModel, recipe: Recipe, device: torch.device | None, world: World
) -> StreamedWeights | StreamedShards | None:
    """Put the layers that stream into host memory, and the rest of the model on the device. None if nothing streams."""
    layers = find_decoder(model).layers
    count = num_streamed(recipe, len(layers))
    if not count:
        return None
    device = device or next(model.parameters()).device
    streamed = layers[len(layers) - count :]
    weights: StreamedWeights | StreamedShards
    if world.many:
        weights = StreamedShards(model, streamed, link_of(device))
    else:
        weights = StreamedWeights(streamed, link_of(device))
        away = weights.parameters
        for p in model.parameters():
            if p not in away:
                p.data = p.data.to(device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
    for module in model.modules():  # frequencies of rotary positions: the host computes other last bits
        if any(True for _ in module.buffers(recurse=False)) and not any(True for _ in module.parameters()):
            model._init_weights(module)
    return weights
