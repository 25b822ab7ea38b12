"""Arenas: exact-size host allocations that the GPU can copy from and to at full speed.

torch's own pinned allocator was rejected: it rounds sizes up to powers of two and pins at 1.8 GB/s. Memory that is
mapped, touched by many threads and then registered is exact and several times faster.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from penstock.errors import DoesNotFit
from penstock.machine.hardware import available_host_bytes
from penstock.plan.layout import ALIGNMENT, padded

TOUCH_BYTES = 256 * 2**20
STATE, WEIGHTS, INPUTS = "optimizer state", "weights that stream", "inputs that are parked"
"""What an arena is for, where there is no room for it."""


def _remedy(what: str) -> str:
    if what == WEIGHTS:
        return "Let fewer layers stream (--weights), take more GPUs, or free host memory."
    if what == INPUTS:
        return "Park inputs of fewer layers (--inputs parked:N), try --inputs kept or fewer rows, or free host memory."
    return "Try --states bf16 or int8, keep more of it on the GPU (--homes), or free host memory."


class Arena:
    """One allocation from which chunks are cut. `close` gives it back; until then its tensors stay valid."""

    def __init__(self, num_bytes: int, *, pinned: bool, cores: Sequence[int], what: str = STATE) -> None:
        self.num_bytes = max(num_bytes, ALIGNMENT)
        available = available_host_bytes()
        if self.num_bytes > available:
            raise DoesNotFit(
                f"{what}: {self.num_bytes / 2**30:.1f} GiB are needed, {available / 2**30:.1f} are available",
                where="host memory",
                remedy=_remedy(what),
            )
        began = time.perf_counter()
        mapped = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to fault and to register
        if hasattr(mmap, "MADV_DONTFORK"):
            mapped.madvise(mmap.MADV_DONTFORK)  # or the workers of a loader would each get a copy of what is pinned
        self._memory: Tensor | None = torch.frombuffer(mapped, dtype=torch.uint8)
        self._touch(cores)
        if pinned:
            self._register(what)
        self._unpin = weakref.finalize(self, _unregister, self._memory.data_ptr()) if pinned else None
        self.pinned, self.seconds = pinned, time.perf_counter() - began
        self._used = 0

    def cut(self, num_bytes: int) -> Tensor:
        """The next bytes, aligned for every vector unit and copy engine."""
        assert self._memory is not None, "the arena is closed"
        start = self._used
        self._used += padded(num_bytes)
        assert self._used <= self.num_bytes, "an arena is cut to the sizes it was made for"
        return self._memory[start : start + num_bytes]

    def close(self) -> None:
        """Unregister and unmap."""
        if self._unpin is not None:
            self._unpin()
        self._memory = None  # unmapped with the last tensor that was cut from it

    def _touch(self, cores: Sequence[int]) -> None:
        """Fault every page from several threads before it is registered. Pages go to the NUMA node of `cores`."""
        assert self._memory is not None
        start = self._memory.data_ptr()
        parts = range(0, self.num_bytes, TOUCH_BYTES)
        with ThreadPoolExecutor(len(cores), initializer=os.sched_setaffinity, initargs=(0, cores)) as pool:
            for part in parts:
                pool.submit(ctypes.memset, start + part, 0, min(TOUCH_BYTES, self.num_bytes - part))

    def _register(self, what: str) -> None:
        assert self._memory is not None
        code = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self.num_bytes, 0))
        if code:
            raise DoesNotFit(
                f"{what}: cannot pin {self.num_bytes / 2**30:.1f} GiB (CUDA error {code})",
                where="host memory",
                remedy="Raise the limit of locked memory (ulimit -l), or keep more on the GPU.",
            )


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
