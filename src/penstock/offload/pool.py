"""The threads of `host`: one call updates a whole chunk on all cores, without the interpreter in between."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.offload.kernels import GO, StateView, adamw_reference_, host_library

BLOCK = 1 << 15
"""Elements that a thread takes at a time: a tenth of a millisecond, so that all threads end together."""


class _Job(ctypes.Structure):
    _fields_ = (
        ("remainder", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("scalars", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int32),
    )


class Pool:
    """One thread a core. Without the C kernel the torch reference runs on torch's own threads: same bits, slower."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._library = host_library()
        self._address: int | None = None
        if self._library is not None:
            self._library.pool_open.restype = ctypes.c_void_p
            numbers = (ctypes.c_int32 * len(cores))(*cores)
            self._address = self._library.pool_open(numbers, ctypes.c_int32(len(cores)))
        if self._address:
            self._close = weakref.finalize(self, self._library.pool_close, ctypes.c_void_p(self._address))  # type: ignore[union-attr]

    def adamw_(self, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor) -> None:
        """Update flat host tensors in place. The interpreter lock is free meanwhile."""
        if not coefficients[GO]:
            return
        if self._library is None or not self._address:
            adamw_reference_(weight, gradient, state, coefficients)
            return
        tensors = (state.remainder, state.first, state.second, weight, gradient, coefficients)
        assert all(t.is_contiguous() for t in tensors), "kernels take flat tensors"
        job = _Job(*(t.data_ptr() for t in tensors), weight.dtype is torch.bfloat16)
        size = ctypes.c_int64(weight.numel())
        pool = ctypes.c_void_p(self._address)
        self._library.pool_run(pool, self._library.adamw_range, ctypes.byref(job), size, ctypes.c_int64(BLOCK))

    def close(self) -> None:
        """Stop the threads."""
        if self._address:
            self._close()
            self._address = None
