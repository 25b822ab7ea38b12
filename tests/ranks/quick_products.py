"""Products of tiny matrices on ARM, where tests would spend most of their time."""

import platform
import warnings

import torch

from penstock.machine.hardware import cpu_has_bf16

KEPT = []
"""Whoever lets go of such a library takes back what it put there."""


def use_quick_products():
    """In this process.

    With oneDNN one takes 0.6 ms, without 0.01. Of bf16 tensors torch has no kernel for a CPU without instructions for
    them, and takes 30 times as long as in fp32: here sums are in fp32 too, and each product is rounded once.
    """
    if platform.machine() != "aarch64":
        return
    torch.backends.mkldnn.set_flags(False)
    if cpu_has_bf16() or KEPT:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this takes the place of what is there
        KEPT.append(torch.library.Library("aten", "IMPL"))
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            KEPT[0].impl(name, _product(name), "CPU")


def _product(name):
    into = getattr(torch.ops.aten, name).out

    def multiply(*tensors, **scalars):
        dtype = tensors[0].dtype
        if dtype is not torch.bfloat16:
            return into(*tensors, **scalars, out=torch.empty(0, dtype=dtype))
        return into(*(tensor.float() for tensor in tensors), **scalars, out=torch.empty(0)).bfloat16()

    return multiply
