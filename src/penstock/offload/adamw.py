"""OffloadAdamW: exact AdamW whose state lives where there is room, in anyone's training loop.

optimizer = OffloadAdamW(model, lr=1e-5)
for batch in data:
with optimizer.accumulate():          # around every micro-batch but the last
model(batch.first).backward()
model(batch.last).backward()
optimizer.step()
optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from penstock.offload.behaviour import Behaviour, UpdateTime
from penstock.offload.misuse import check_values
from penstock.offload.optimizer import OffloadOptimizer
from penstock.offload.placing import Homes
from penstock.plan.placement import Placement
from penstock.update.adamw import AdamW


class OffloadAdamW(OffloadOptimizer):
    """AdamW with an exact fp32 master for bf16 weights and state in three homes. `optimizer.py` says when it updates.

    - `params`: parameter groups, as torch's optimizers take them; without, all trainable parameters are one group.
    - `max_grad_norm`: gradients are scaled down to this global norm. 0: never; `update="auto"` is then `in-backward`.
    - `states`: `fp32` is exact; `bf16` and `int8` keep the moments in fewer bits, with stochastic rounding that depends
      on nothing but element, parameter and step, so homes and chunks stay invisible. See `update/formats.py`.
    - `homes`: `auto`, one home, shares such as `{"gpu": 0.5, "stream": 0.3, "host": 0.2}`, or a `Placement`, which says
      it for every chunk (`placing.py` makes them, with other chunk sizes and cores, and from what a trial measured).
      With `auto` a quarter of the GPU is left to activations. Homes and `overlap` are questions of speed and change no
      bit.
    - `micro_batches`: backward passes in a step, for loops that cannot call `accumulate()`.
    - `units`: modules that are called as a whole, if those are not the elements of each ModuleList.
    - `accumulate_dtype`: gradients of micro-batches add up in fp32, and each sum is rounded once. `bf16` takes half of
      the memory, and its error grows with their number.

    Parameters may be sharded by FSDP2's `fully_shard`. Each rank then updates its shards, a unit is what FSDP2 gathers
    at once, and its gather waits for its update; clipping is by the norm over all ranks. Under
    DistributedDataParallel every rank updates all of them in `step()`, when gradients have been reduced.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        *,
        params: Iterable[dict[str, Any]] | None = None,
        states: str = "fp32",
        homes: Homes | Placement = "auto",
        update: UpdateTime | Literal["auto"] = "auto",
        overlap: bool = True,
        micro_batches: int = 1,
        units: Iterable[nn.Module] | None = None,
        accumulate_dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        params = None if params is None else list(params)
        groups = [group for group in params or () if isinstance(group, Mapping)]
        behaviour = Behaviour(max_grad_norm, states, update, overlap, micro_batches, accumulate_dtype)
        for values in (defaults | vars(behaviour), *groups):
            check_values(values)
        super().__init__(model, AdamW(), defaults, behaviour, params=params, homes=homes, units=units)
