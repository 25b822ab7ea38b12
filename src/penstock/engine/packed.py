"""A model that computes the loss of packed rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.flow.transfers import link_of
from penstock.machine.hardware import pick_compile
from penstock.model.attention import Segments, use_attention
from penstock.model.compiled import set_compile
from penstock.model.decoder import find_decoder
from penstock.model.loss import call_as, check_logits, packed_loss
from penstock.model.recompute import set_recompute
from penstock.recipe.recipe import Recipe, recompute_by_layer


class PackedModel:
    """A model made ready for packed rows: attention, recompute, and the loss of a micro-batch."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.model = model
        self.decoder = find_decoder(model)
        self.device = next(model.parameters()).device
        use_attention(model, recipe.attention)
        check_logits(model, self.decoder)
        layers, compiled = self.decoder.layers, pick_compile(recipe, self.device)
        set_recompute(layers, recompute_by_layer("none", len(layers)))
        set_recompute(layers, set_compile(layers, compiled, say, recompute_by_layer(recipe.recompute, len(layers))))
        model.train()

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum of the losses of the trained tokens."""
        with link_of(self.device).to_device.for_the_model() as made:
            batch, segments = batch.to(self.device), Segments.of(batch.boundaries, self.device)
            made += [batch.input_ids, batch.position_ids, batch.target_index, batch.targets, segments.offsets]

        def loss(input_ids: Tensor) -> Tensor:
            rows = (input_ids, batch.position_ids, segments, batch.target_index, batch.targets)
            return packed_loss(self.decoder, *rows)

        # FSDP2 begins and ends a pass where the whole model is called; forward here calls its parts.
        sharded = isinstance(self.model, FSDPModule)
        return call_as(self.model, loss, batch.input_ids) if sharded else loss(batch.input_ids)
