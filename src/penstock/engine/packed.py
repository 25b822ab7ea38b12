"""A model that computes the loss of packed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.flow.transfers import link_of
from penstock.machine.hardware import pick_compile
from penstock.model.attention import Segments, use_attention
from penstock.model.compiled import set_compile
from penstock.model.decoder import find_decoder
from penstock.model.loss import call_as, check_logits, head_loss, hidden_states
from penstock.model.recompute import set_recompute
from penstock.recipe.recipe import Recipe, recompute_by_layer


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
        check_logits(model, self.decoder)
        layers, compiled = self.decoder.layers, pick_compile(recipe, self.device)
        chosen = recompute_by_layer("none" if one_by_one else recipe.recompute, len(layers))
        set_recompute(layers, recompute_by_layer("none", len(layers)))
        set_recompute(layers, set_compile(layers, compiled, say, chosen, forward_too=one_by_one))
        model.train()

    def rows(self, batch: MicroBatch) -> Rows:
        """A micro-batch, brought to the device."""
        with link_of(self.device).to_device.for_the_model() as made:
            batch, segments = batch.to(self.device), Segments.of(batch.boundaries, self.device)
            made += [batch.input_ids, batch.position_ids, batch.target_index, batch.targets, segments.offsets]
        return Rows(batch, segments)

    def hidden_states(self, rows: Rows) -> Tensor:
        """What the head is given."""
        return hidden_states(self.decoder, rows.batch.input_ids, rows.batch.position_ids, rows.segments)

    def loss_of(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Sum of the losses of the trained tokens, from what the head is given."""
        return head_loss(self.decoder.head, hidden, rows.batch.target_index, rows.batch.targets)

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum of the losses of the trained tokens."""
        rows = self.rows(batch)

        def loss(input_ids: Tensor) -> Tensor:
            return self.loss_of(self.hidden_states(rows), rows)

        # FSDP2 begins and ends a pass where the whole model is called; forward here calls its parts.
        sharded = isinstance(self.model, FSDPModule)
        return call_as(self.model, loss, rows.batch.input_ids) if sharded else loss(rows.batch.input_ids)
