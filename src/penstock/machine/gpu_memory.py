"""How much of a GPU this process may take, and what of that is free."""

from __future__ import annotations

import torch

from penstock.errors import RecipeError
from penstock.recipe.lists import parse_size

LATER_BYTES = 600 * 2**20
"""Beside torch's own memory and the context as it begins, what the driver will take: kernels, which are loaded when
they are first used, and workspaces of libraries. Of gpt-oss-20b those were 432 MiB."""
MOST_CONTEXT = 2**30
"""More than this is another program's."""

_LIMITS: dict[int, int] = {}
"""By the number of a GPU, what torch may take of it."""


def limit_gpu(device: torch.device, size: str, others_bytes: int = 0) -> None:
    """From here on this process takes no more of the GPU than `size`, context included; `auto`: all of it.

    torch's allocator keeps the promise: what would go beyond is an error there. `others_bytes` is what other programs
    are known to have taken, such as the context of the one that started this.
    """
    if device.type != "cuda":
        if size != "auto":
            raise RecipeError("there is no GPU to limit", where=f"gpu_memory = {size}", remedy="Leave it out here.")
        return
    number, total = _number(device), torch.cuda.get_device_properties(device).total_memory
    wanted = parse_size(size)
    if wanted is None or wanted >= total:
        _LIMITS.pop(number, None)
        torch.cuda.set_per_process_memory_fraction(1.0, number)
        return
    free, _ = torch.cuda.mem_get_info(device)
    context = min(MOST_CONTEXT, total - free - torch.cuda.memory_reserved(device) - others_bytes)
    left = wanted - context - LATER_BYTES
    if left <= 0:
        raise RecipeError(
            f"the GPU's context alone takes {(context + LATER_BYTES) / 1e9:.1f} GB",
            where=f"gpu_memory = {size}",
            remedy="Allow more.",
        )
    _LIMITS[number] = left
    torch.cuda.set_per_process_memory_fraction(left / total, number)


def gpu_room(device: torch.device) -> tuple[int, int]:
    """Bytes that are free to take, and all that this process may take; torch's cache counts as taken."""
    free, total = torch.cuda.mem_get_info(device)
    limit = _LIMITS.get(_number(device))
    if limit is None:
        return free, total
    return max(0, min(free, limit - torch.cuda.memory_reserved(device))), limit


def gpu_left(device: torch.device) -> int:
    """Bytes that tensors may take: what is free, and what torch has in its cache."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return gpu_room(device)[0] + cached


def driver_bytes(device: torch.device) -> int:
    """What is taken of the GPU as the driver sees it, by all programs, contexts included."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def most_driver_bytes(device: torch.device) -> int:
    """The same when torch's allocator had most, since its peaks were last reset."""
    given_back = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    return driver_bytes(device) + given_back


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
