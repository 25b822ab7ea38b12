"""The threads of `host`: each call updates a whole chunk on all cores, without the interpreter in between."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.update.formats import FORMATS, StateView
from penstock.update.kernels import GO, adamw_reference_, host_library

PART = 1 << 15
"""Elements that a thread takes at a time: a tenth of a millisecond, so that all threads end together. A multiple of
every format's block."""


class _Job(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("first_scale", ctypes.c_void_p),
        ("second_scale", ctypes.c_void_p),
        ("scalars", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("salt", ctypes.c_uint32),
        ("function", ctypes.c_int32),
    )


class Pool:
    """One thread a core. Without the C kernel the torch reference runs on torch's own threads: same bits, slower."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._library = host_library()
        self._address: int | None = None
        if self._library is not None:
            self._library.pool_open.restype = ctypes.c_void_p
            self._library.pool_begin.restype = ctypes.c_uint64
            numbers = (ctypes.c_int32 * len(cores))(*cores)
            self._address = self._library.pool_open(numbers, ctypes.c_int32(len(cores)))
        if self._address:
            self._close = weakref.finalize(self, self._library.pool_close, ctypes.c_void_p(self._address))  # type: ignore[union-attr]

    def begin(
        self, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor
    ) -> Callable[[], None] | None:
        """Have flat host tensors updated in place. What is returned waits until they are; None: nothing changes.

        The next may be given before, if it is of other tensors: a thread that finds no more to do goes on with it. Only
        the third waits, for the first. The interpreter lock is free while the threads work.
        """
        if not coefficients[GO]:
            return None
        if self._library is None or not self._address:
            adamw_reference_(weight, gradient, state, coefficients)
            return lambda: None
        moments = (state.first, state.second, state.first_scale, state.second_scale)
        tensors = (weight, gradient, state.remainder, *moments, coefficients)
        assert all(t.is_contiguous() for t in tensors), "kernels take flat tensors"
        function = 2 * list(FORMATS).index(state.states.name) + (weight.dtype is torch.float32)
        job = _Job(*(t.data_ptr() for t in tensors), state.start, state.salt, function)
        library, pool, size = self._library, ctypes.c_void_p(self._address), ctypes.c_int64(weight.numel())
        number = library.pool_begin(pool, library.adamw_range, ctypes.byref(job), size, ctypes.c_int64(PART))

        def wait(_used: Sequence[object] = (job, tensors)) -> None:  # which must live until then
            library.pool_wait(pool, ctypes.c_uint64(number))

        return wait

    def adamw_(self, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor) -> None:
        """Update and wait."""
        if wait := self.begin(weight, gradient, state, coefficients):
            wait()

    def close(self) -> None:
        """Stop the threads."""
        if self._address:
            self._close()
            self._address = None
