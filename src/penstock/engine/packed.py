"""A model that computes the loss of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.flow.transfers import link_of
from penstock.machine.hardware import pick_compile
from penstock.model.attention import Segments, use_attention
from penstock.model.compiled import set_compile
from penstock.model.decoder import find_decoder
from penstock.model.experts import use_experts
from penstock.model.loss import call_as, check_logits, head_loss, hidden_states
from penstock.model.matmul import describe, inner, set_matmul
from penstock.model.recompute import set_recompute
from penstock.model.tiles import check_tiles, set_tiles
from penstock.model.unneeded import keep_last_products, leave_out_last_product
from penstock.recipe.recipe import Recipe, recompute_by_layer, tile_tokens


@dataclass(frozen=True)
class Rows:
    """A micro-batch on the device."""

    batch: MicroBatch
    segments: Segments


class PackedModel:
    """A model made ready for packed rows: attention, recompute, and the loss of a micro-batch."""

    def __init__(
        self, model: PreTrainedModel, recipe: Recipe, say: Callable[[str], None], *, one_by_one: bool = False
    ) -> None:
        """`one_by_one`: layers are computed again as a whole by whoever calls them (`layerwise.py`)."""
        self.model = model
        self.decoder = find_decoder(model)
        self.device = next(model.parameters()).device
        use_attention(model, recipe.attention)
        use_experts(model)
        layers, compiled = self.decoder.layers, pick_compile(recipe, self.device)
        tile = tile_tokens(recipe) if one_by_one else 0
        set_tiles(layers, 0, say)
        set_recompute(layers, recompute_by_layer("none", len(layers)))
        set_compile(layers, False, say)
        self.compute_in("bf16")  # which is compared: a last bit may be another fp8 number, and that shows
        check_logits(model, self.decoder)
        if tile:
            self._try_layers(check_tiles)
        self.compute_in(recipe.matmul)
        if recipe.matmul == "fp8":
            say(describe(model, layers, recipe, self.device))
        if one_by_one:
            self._try_layers(leave_out_last_product)
        chosen = recompute_by_layer("none" if one_by_one else recipe.recompute, len(layers))
        set_recompute(layers, set_compile(layers, compiled and not tile, say, chosen, forward_too=one_by_one))
        set_tiles(layers, tile, say, compiled=compiled)
        model.train()

    def compute_in(self, matmul: str) -> None:
        """What products of the layers run in from here on: `bf16`, which is as they are written, or `fp8`."""
        keep_last_products(self.decoder.layers)
        set_matmul(self.model, inner(self.decoder.layers), matmul)

    @contextmanager
    def as_exported(self) -> Iterator[None]:
        """For a while the model computes as whoever loads it will: what it answers then can be compared."""
        linears = [m for layer in self.decoder.layers for m in layer.modules() if isinstance(m, nn.Linear)]
        kinds = [type(linear) for linear in linears]
        self.compute_in("bf16")
        try:
            yield
        finally:
            for linear, kind in zip(linears, kinds, strict=True):
                linear.__class__ = kind

    def _try_layers(self, trial: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object]) -> None:
        """Call `trial` with every layer and what it is called with, for a few tokens."""

        def called(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            trial(layer, args, kwargs)

        hooks = [layer.register_forward_pre_hook(called, with_kwargs=True) for layer in self.decoder.layers]
        try:
            ids = torch.arange(8, device=self.device).view(1, 8) % self.decoder.head.weight.shape[0]
            places, segments = torch.arange(8, device=self.device)[None], Segments.of((0, 8), self.device)
            with torch.no_grad():
                hidden_states(self.decoder, ids, places, segments)
        finally:
            for hook in hooks:
                hook.remove()

    def rows(self, batch: MicroBatch) -> Rows:
        """A micro-batch, brought to the device."""
        with link_of(self.device).to_device.for_the_model() as made:
            batch, segments = batch.to(self.device), Segments.of(batch.boundaries, self.device)
            made += [batch.input_ids, batch.position_ids, batch.target_index, batch.targets, segments.offsets]
        return Rows(batch, segments)

    def hidden_states(self, rows: Rows) -> Tensor:
        """What the head is given."""
        return hidden_states(self.decoder, rows.batch.input_ids, rows.batch.position_ids, rows.segments)

    def chosen(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Of hidden states those that are trained on."""
        return hidden.flatten(0, 1).index_select(0, rows.batch.target_index)

    def head_loss(self, chosen: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of the trained tokens, from what the head is given."""
        return head_loss(self.decoder.head, chosen, targets)

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum of the losses of the trained tokens."""
        rows = self.rows(batch)

        def loss(input_ids: Tensor) -> Tensor:
            return self.head_loss(self.chosen(self.hidden_states(rows), rows), rows.batch.targets)

        # FSDP2 begins and ends a pass where the whole model is called; forward here calls its parts.
        sharded = isinstance(self.model, FSDPModule)
        return call_as(self.model, loss, rows.batch.input_ids) if sharded else loss(rows.batch.input_ids)
