"""What this machine has. Nothing here allocates; torch is imported only when a device is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.errors import RecipeError

if TYPE_CHECKING:
    import torch


def pick_device(choice: str) -> torch.device:
    """The device a run uses: the GPU if there is one, unless the recipe says otherwise."""
    import torch

    if choice == "cuda" and not torch.cuda.is_available():
        raise RecipeError("device = 'cuda': torch sees no GPU", remedy="Use --device cpu, or install a CUDA torch.")
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


def describe(device: torch.device) -> str:
    """The device in words, for the console."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
