"""By what a model is known again: whether a checkpoint was trained from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.offload.dtensors import local, local_start
from penstock.update.master import join


def model_fingerprint(
    model: nn.Module, *, values: bool, remainders: Mapping[nn.Parameter, torch.Tensor] | None = None
) -> str:
    """Names and shapes of all weights and, if their values are the model's own, some of each.

    Reading all of them was rejected: a resumed run takes its weights from the checkpoint, so this only has to tell one
    model from another, and no two models agree in both ends of every matrix. The number of ranks does not show in it.
    """
    hasher = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        hasher.update(f"{name} {tuple(parameter.shape)}".encode())
        if values:
            hasher.update(_ends(parameter, (remainders or {}).get(parameter)).numpy().tobytes())
    return hasher.hexdigest()


def _ends(parameter: torch.Tensor, remainder: torch.Tensor | None) -> torch.Tensor:
    """The first and last elements in fp32, of all ranks together; with what was rounded off, if that is known."""
    own, start, count = local(parameter).view(-1), local_start(parameter), min(1024, parameter.numel())
    ends = torch.zeros(2 * count)
    for place, first in ((0, 0), (count, parameter.numel() - count)):
        low, high = max(first, start), min(first + count, start + own.numel())
        if low < high:
            part = own[low - start : high - start]
            exact = part if remainder is None else join(part, remainder[low - start : high - start])
            ends[place + low - first : place + high - first] = exact.float().cpu()
    # By how it is placed, not by what is here: of few rows one rank may have all, and would leave the others waiting.
    if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
        dist.all_reduce(ends.view(torch.int32))  # each is zero but on one rank; as numbers, -0.0 would become 0.0
    return ends
