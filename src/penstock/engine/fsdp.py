"""FSDP2 around a model: which weights are gathered together, how gradients are reduced, and what rounding leaves.

Weights are gathered unit by unit, each module that holds weights on its own, so that a gather waits for the updates of
that unit and of no other. Putting the final norm and the head into the root, as is usual, was rejected: the root is
gathered first and updated last, so forward would begin with waiting for the whole update. A head that is tied to the
embedding is gathered with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedConfig, PreTrainedModel

from penstock.engine.weights import streams
from penstock.errors import ModelError
from penstock.model.decoder import find_decoder
from penstock.model.load import Say
from penstock.model.load_rows import build_on_meta, load_own_rows
from penstock.offload.dtensors import gathered_groups, local
from penstock.recipe.recipe import Recipe
from penstock.update.master import split


@dataclass(frozen=True)
class RankModel:
    """A model with this rank's rows, and what these lost in rounding to bf16 if they were loaded with more."""

    model: PreTrainedModel
    remainders: dict[nn.Parameter, Tensor]


def load_for_ranks(
    recipe: Recipe, config: PreTrainedConfig, device: torch.device, num_ranks: int, say: Say
) -> RankModel:
    """Load the rows of this rank, to host memory if weights are to stream. The process group must be there."""
    mesh, there = init_device_mesh(device.type, (num_ranks,)), torch.device("cpu") if streams(recipe) else device

    def shard(model: PreTrainedModel) -> None:
        shard_over_ranks(model, mesh, torch.float32 if recipe.reduce_dtype == "fp32" else None)

    model = load_own_rows(recipe, config, there, shard, say, draw_on=device)
    if recipe.dtype != "bf16" or model.dtype is not torch.float32:
        return RankModel(model, {})
    rounded = build_on_meta(recipe, model.config, torch.bfloat16, shard)
    rounded.to_empty(device=there)
    rounded.tie_weights()
    return RankModel(rounded, _round_into(rounded, model))


def shard_over_ranks(model: PreTrainedModel, mesh: DeviceMesh, reduce_dtype: torch.dtype | None) -> None:
    """Shard a model, in place. Gradients are summed over ranks: each loss is a share of the step's already."""
    decoder = find_decoder(model)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    head, embedding = decoder.head.module, model.get_input_embeddings()
    tied = head is not embedding and any(p is q for p in head.parameters() for q in embedding.parameters())
    if tied and len(list(head.parameters())) > 1:
        what = "a head that is tied to the embedding and has a bias of its own cannot be sharded"
        raise ModelError(what, where=type(model).__name__, remedy="Train it on one GPU.")
    for unit in decoder.units:
        if tied and unit.module is embedding:
            fully_shard([embedding, head], mesh=mesh, mp_policy=policy)
        elif not (tied and unit.module is head):
            fully_shard(unit.module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules() if mesh.size() > 1 else ():  # of one rank FSDP2 would divide into a second copy
        if isinstance(module, FSDPModule):
            # Plain sums: FSDP2 would average, and gloo knows no scaled sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            for group in gathered_groups(module):
                _refuse_gradients_of_some(group)


def _refuse_gradients_of_some(group: Any) -> None:
    """Have a backward fail that has gradients of other weights than that of another rank, or than the first one.

    FSDP2 adds up what the ranks have by its place in memory: of a weight that has a gradient on some of them only, as
    of an expert that no token of a rank was sent to, it adds up those of different weights, and says nothing.
    """
    reduce = group.post_backward
    agreed: list[list[str]] = []

    def post_backward(*args: Any) -> None:
        lacking = [p._param_fqn for p in group.fsdp_params if not _has_gradient(p)]
        if len(lacking) < len(group.fsdp_params):  # FSDP2 also asks when none of them has one yet
            if not agreed:
                everyones: list[list[str]] = [[]] * dist.get_world_size()
                dist.all_gather_object(everyones, lacking)
                agreed.extend(everyones)
            others = [names for names in agreed if names != lacking]
            if others:
                name = sorted({*lacking} ^ {*others[0]})[0]
                raise ModelError(
                    "has a gradient on some ranks, or in some steps, and in others none, which cannot be added up",
                    where=name,
                    remedy="Train this model on one GPU: which of its weights it uses depends on the data.",
                )
        reduce(*args)

    group.post_backward = post_backward


def _has_gradient(parameter: Any) -> bool:
    """Of FSDP2's own, that was gathered."""
    if not hasattr(parameter, "_unsharded_param"):
        return False
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None


@torch.no_grad()
def _round_into(rounded: PreTrainedModel, exact: PreTrainedModel) -> dict[nn.Parameter, Tensor]:
    """Move this rank's fp32 rows to a bf16 model, weight by weight, so that no more than one is there twice."""
    sources = dict(exact.named_parameters())
    remainders: dict[nn.Parameter, Tensor] = {}
    for name, parameter in rounded.named_parameters():
        weight, remainders[parameter] = split(local(sources[name]).contiguous().view(-1))
        local(parameter).view(-1).copy_(weight)
        owner = exact.get_submodule(name.rpartition(".")[0])
        owner._parameters[name.rpartition(".")[2]] = None
        del sources[name]
    for name, buffer in exact.named_buffers():
        owner = rounded.get_submodule(name.rpartition(".")[0])
        owner._buffers[name.rpartition(".")[2]] = buffer
    rounded.generation_config = exact.generation_config
    return remainders
