"""Full-parameter fine-tuning of language models that do not fit their GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.offload.adamw import OffloadAdamW

__version__ = "0.1.0"
__all__ = ["OffloadAdamW", "__version__"]

BEGAN = time.monotonic()
"""When the command began. The process may be older: a shell turns into the last command that it was given."""


def __getattr__(name: str) -> Any:
    """`penstock.OffloadAdamW`, imported when it is asked for: importing penstock alone must not import torch."""
    if name == "OffloadAdamW":
        from penstock.offload.adamw import OffloadAdamW

        return OffloadAdamW
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
