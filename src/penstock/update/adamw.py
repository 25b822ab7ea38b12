"""AdamW, three ways to run it, the same bits from each: plain torch, C on the CPU, Triton on the GPU.

The order of operations is fixed and every operation is IEEE: no fused multiply-add, correctly rounded square root and
division. The scalars of a step are rounded to fp32 once and shared. So where a chunk is updated cannot be seen in the
result, and state may move freely between homes.

Decay and step leave the master in one subtraction. Multiplying it by `1 - lr * weight_decay` first, as torch does, was
rejected: in fp32 that number is a multiple of 6e-8, so that lr 1e-5 and decay 0.01 shrink weights by 19 % too much, and
lr 2e-6 not at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from penstock.plan.layout import FORMATS
from penstock.update.formats import StateView
from penstock.update.host_threads import host_library, pointer
from penstock.update.master import join, split
from penstock.update.moments import exact_root, read_moments, write_moments
from penstock.update.rule import GO, SCALE, Groups, HostCall, Stage, device_rows
from penstock.update.spans import root

# The columns after SCALE and GO, all fp32. `SEED` is the number of the step, for stochastic rounding: a whole number
# under 2^24, so fp32 holds it exactly. The C and Triton kernels know the same order.
BETA1, BETA1_REST, BETA2, BETA2_REST, ROOT_CORRECTION2, EPS, DECAY, STEP_SIZE, SEED = range(2, 11)
NUM_COEFFICIENTS = 11
NUM_SEEDS = 1 << 24
POWER_BITS = 32
"""Of the count of steps."""


class _Job(ctypes.Structure):
    """Must match `job` in host_kernel.c."""

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


class AdamW:
    """The rule."""

    name = "AdamW"
    num_coefficients = NUM_COEFFICIENTS
    in_stages = True
    formats = FORMATS
    saved_names: Mapping[str, str] = {
        "first": "exp_avg",
        "second": "exp_avg_sq",
        "first_scale": "exp_avg_scale",
        "second_scale": "exp_avg_sq_scale",
    }

    def scalars(self, device: torch.device) -> AdamWScalars:
        """As before the first step."""
        return AdamWScalars(device)

    def update_(
        self, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor, stage: Stage = "whole"
    ) -> None:
        """With the fastest kernel there is for the device; in stages on the host only."""
        if weight.is_cuda:
            assert stage == "whole", "on the device nothing waits for the moments"
            from penstock.update.gpu_kernels import launch_adamw

            launch_adamw(weight, gradient, state, coefficients)
        elif coefficients[GO]:
            call = self.host_call(weight, gradient, state, coefficients, stage)
            if call is None:
                adamw_reference_(weight, gradient, state, coefficients, stage)
            else:
                call.function(ctypes.byref(call.job), ctypes.c_int64(0), ctypes.c_int64(weight.numel()))

    def host_call(
        self, weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor, stage: Stage = "whole"
    ) -> HostCall | None:
        """None where there was no compiler."""
        library = host_library()
        if library is None:
            return None
        parts = [state.get(name) for name in ("remainder", "first", "second", "first_scale", "second_scale")]
        pointers = map(pointer, (weight, gradient, *parts, coefficients))
        kind = 2 * list(FORMATS).index(state.format.name) + (weight.dtype is torch.float32)
        function = 3 * kind + get_args(Stage).index(stage)
        keeps = (weight, gradient, *state.tensors.values(), coefficients)
        return HostCall(library.adamw_range, _Job(*pointers, state.start, state.salt, function), keeps)


def adamw_reference_(
    weight: Tensor, gradient: Tensor, state: StateView, coefficients: Tensor, stage: Stage = "whole"
) -> None:
    """The same in plain torch: what the other two are checked against, and the fallback without a compiler."""
    c = coefficients
    g = gradient.float() * c[SCALE]
    first, second = read_moments(state)
    first = first * c[BETA1] + g * c[BETA1_REST]
    second = second * c[BETA2] + (g * g) * c[BETA2_REST]
    if stage != "master":
        write_moments(state, first, second, c[SEED])
    if stage == "moments":
        return
    master = join(weight, state["remainder"]) if weight.dtype is torch.bfloat16 else weight
    denominator = exact_root(second) / c[ROOT_CORRECTION2] + c[EPS]
    master = master - (c[DECAY] * master + c[STEP_SIZE] * (first / denominator))
    if weight.dtype is torch.bfloat16:
        rounded, remainder = split(master)
        weight.copy_(rounded)
        state["remainder"].copy_(remainder)
    else:
        weight.copy_(master)


class AdamWScalars:
    """The count of steps that were applied. Everything else is a function of it and of the groups, as in torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._squares: tuple[list[tuple[float, float]], Tensor] = [], torch.empty(0, device=device)

    def coefficients(self, groups: Groups) -> Tensor:
        """The row of each group for the step that would come next, unclipped and set to go."""
        columns = [[g["betas"][0], g["betas"][1], g["lr"], g["weight_decay"], g["eps"]] for g in groups]
        beta1, beta2, lr, weight_decay, eps = device_rows(columns, self._device).unbind(1)
        power1, power2 = self._powers([(g["betas"][0], g["betas"][1]) for g in groups]).unbind(1)
        ones = torch.ones_like(lr)
        seed = ones * (self._steps % NUM_SEEDS)
        rows = (
            ones, ones, beta1, 1 - beta1, beta2, 1 - beta2, root(1 - power2), eps, lr * weight_decay,
            lr / (1 - power1), seed,
        )  # fmt: skip
        assert len(rows) == NUM_COEFFICIENTS
        return torch.stack(rows, dim=1).float()

    def advance(self, groups: Groups, applied: Tensor) -> None:
        """Count the step if it was applied."""
        self._steps = self._steps + applied

    def _powers(self, betas: list[tuple[float, float]]) -> Tensor:
        """The betas of each group to the power of the step that would come next.

        By squaring and multiplying in fp64, the same bits on every device: a power function would not give them.
        """
        if self._squares[0] != betas:  # most schedules leave them alone
            squares = [device_rows(betas, self._device)]
            while len(squares) < POWER_BITS:
                squares.append(squares[-1] * squares[-1])
            self._squares = betas, torch.stack(squares)
        places = torch.arange(POWER_BITS, device=self._device)
        has_bit = ((self._steps + 1) >> places) & 1
        factors = torch.where(has_bit.view(-1, 1, 1) != 0, self._squares[1], 1.0)
        while len(factors) > 1:
            factors = factors[: len(factors) // 2] * factors[len(factors) // 2 :]
        return factors[0]

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return {"steps": self._steps}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take it back."""
        self._steps = tensors["steps"].to(self._device)
