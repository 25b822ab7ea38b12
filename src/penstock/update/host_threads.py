"""The C library, and the threads of `host`: each call updates a whole chunk on all cores, without the interpreter."""

from __future__ import annotations

import ctypes
import importlib.machinery
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from penstock.update.formats import StateView
from penstock.update.rule import GO, HostCall, Rule, Stage

PART = 1 << 15
"""Elements that a thread takes at a time: a tenth of a millisecond, so that all threads end together. A multiple of
every format's block."""


@cache
def host_library() -> ctypes.CDLL | None:
    """The compiled C kernels, or None where there was no compiler at install."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_host_kernel{suffix}")
        if path.exists():
            return ctypes.CDLL(str(path))  # ctypes releases the interpreter lock during calls: threads run in parallel
    return None


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a flat tensor lies; null for one that is not there."""
    assert tensor is None or tensor.is_contiguous(), "kernels take flat tensors"
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class HostThreads:
    """One thread a core. What has no C kernel runs in the calling thread: same bits, slower."""

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
        self,
        rule: Rule,
        weight: Tensor,
        gradient: Tensor,
        state: StateView,
        coefficients: Tensor,
        stage: Stage = "whole",
    ) -> Callable[[], None] | None:
        """Have flat host tensors updated in place. What is returned waits until they are; None: nothing changes.

        The next may be given before, if it is of other tensors: a thread that finds no more to do goes on with it. Only
        the third waits, for the first. The interpreter lock is free while the threads work.
        """
        if not coefficients[GO]:
            return None
        call = rule.host_call(weight, gradient, state, coefficients, stage) if self._address else None
        if call is None:
            rule.update_(weight, gradient, state, coefficients, stage)
            return lambda: None
        assert self._library is not None, "it has an address"
        library, pool, size = self._library, ctypes.c_void_p(self._address), ctypes.c_int64(weight.numel())
        number = library.pool_begin(pool, call.function, ctypes.byref(call.job), size, ctypes.c_int64(PART))

        def wait(_used: HostCall = call) -> None:  # which must live until then
            library.pool_wait(pool, ctypes.c_uint64(number))

        return wait

    def update_(self, rule: Rule, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor) -> None:
        """Update and wait."""
        if wait := self.begin(rule, weight, gradient, state, coefficients):
            wait()

    def close(self) -> None:
        """Stop the threads."""
        if self._address:
            self._close()
            self._address = None
