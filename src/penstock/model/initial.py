"""Random weights that depend on the seed and on each module's name, and on nothing else.

transformers draws all weights from one generator, module after module, so a rank that holds half of each would draw
others than one that holds all. Here every module is drawn from a generator of its own, whole, on every rank, and each
rank keeps its rows: one module is in memory at a time, and the weights are the same for any number of ranks.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int, device: torch.device | None = None) -> None:
    """Initialize every weight and buffer of a model. The caller keeps the global generators.

    Weights are drawn on `device`, if they lie elsewhere: other devices draw other numbers.
    """
    drawn: set[int] = set()
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if id(p) not in drawn}  # tied weights once
        if not own and not any(True for _ in module.buffers(recurse=False)):
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        elsewhere = {key: p for key, p in own.items() if isinstance(p, DTensor) or p.device != (device or p.device)}
        for key, p in elsewhere.items():
            whole = torch.empty(p.shape, dtype=p.dtype, device=device or p.device)
            module._parameters[key] = nn.Parameter(whole, requires_grad=p.requires_grad)
        for key in own:
            vars(module._parameters[key])["_is_hf_initialized"] = False  # transformers draws only what has no such mark
        model._init_weights(module)
        for key in own:
            vars(module._parameters[key])["_is_hf_initialized"] = True  # a tied weight is met again
        for key, p in elsewhere.items():
            drawn_whole = module._parameters[key]
            assert drawn_whole is not None
            if isinstance(p, DTensor):
                keep_rows(p, drawn_whole)
            else:
                p.copy_(drawn_whole)
            module._parameters[key] = p
        drawn |= {id(p) for p in own.values()}


def keep_rows(parameter: DTensor, whole: Tensor) -> None:
    """Copy this rank's rows of `whole` to the parameter; nothing is sent."""
    rows, ranks = parameter.shape[0], parameter.device_mesh.size()
    each = -(-rows // ranks)
    start = min(parameter.device_mesh.get_local_rank() * each, rows)
    own = parameter.to_local()
    own.copy_(whole[start : start + own.shape[0]])
