"""How an offloaded optimizer updates, whatever its rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.offload.misuse import refuse_clipping

UpdateTime = Literal["after-norm", "in-backward"]


@dataclass(frozen=True)
class Behaviour:
    """What of it is chosen; `OffloadAdamW` says what each value means."""

    max_grad_norm: float = 1.0
    states: str = "fp32"
    update: UpdateTime | Literal["auto"] = "auto"
    overlap: bool = True
    micro_batches: int = 1
    accumulate_dtype: str = "fp32"


def update_time(behaviour: Behaviour) -> UpdateTime:
    """`auto`: after the norm where there is one to clip by, else in backward."""
    if behaviour.update == "auto":
        return "after-norm" if behaviour.max_grad_norm else "in-backward"
    if behaviour.update == "in-backward":
        refuse_clipping(behaviour.max_grad_norm)
    return behaviour.update
