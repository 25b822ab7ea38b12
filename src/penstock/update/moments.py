"""How moments are rounded when they are put away, in plain torch: what the C and Triton kernels are checked against.

Rounding is stochastic. With beta2 = 0.999 a step changes the second moment by a thousandth, far less than the gap
between two codes: rounded to the nearest it would never move again. Rounded up or down by chance, with the odds that
make the expected value right, it moves as it should on average.

The chance is no generator but a hash of (element, parameter, step), so it is the same on every device and however
state is cut; a generator would tie the bits to the order of the work. Everything is integer arithmetic that wraps, or
IEEE multiplication, division and square root in a fixed order: no power function, no fused multiply-add.

bf16: 16 random bits are added below the kept half, which is then cut off.

int8: of a block of 256 elements the largest magnitude is the scale. A first moment is a signed code c that stands for
sign(c) (c/127)^2 of the scale, a second moment a code that stands for (c/255)^4: codes lie close where values are
small, and the denominator sqrt(v) has the same form as the numerator. Linear codes were rejected: they turn everything
under 1/255 of the block's largest into zero. A second moment that is not zero never gets a code under 4, and a scale
is never under 2^-94, so that it never decodes to zero: a zero denominator under a first moment would explode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.plan.layout import BLOCK
from penstock.update.formats import StateView

FIRST_CODES, SECOND_CODES = 127, 255
SMALLEST_SECOND = 4
"""Code of the smallest second moment that is not zero. With 1, elements ten thousand times smaller than the largest of
their block took steps of 17 times the learning rate, where exact ones are under 1: chance drops their denominator and
raises their first moment. With 4 it is 2; with 8, elements a thousand times smaller begin to learn too slowly. See
test_an_outlier_does_not_blow_up_its_block."""
SMALLEST_SCALE, LARGEST_SCALE = 0x10800000, 0x7F7FFFFF
"""Bits of 2^-94, whose 255^4th part is the smallest normal number, and of the largest finite one."""
TOP_STEP = 0x7F7F0000
"""Bits of the largest bf16 number. From here up a carry would make an infinity of a number, so nothing is added."""
MAGNITUDE = 0x7FFFFFFF


def read_moments(state: StateView) -> tuple[Tensor, Tensor]:
    """Both moments in fp32."""
    if state.format.name != "int8":
        return state["first"].float(), state["second"].float()
    n = state["first"].numel()
    first, second = state["first"].float() * (1 / FIRST_CODES), state["second"].float() * (1 / SECOND_CODES)
    square = second * second
    m_scale, v_scale = _spread(state["first_scale"], n), _spread(state["second_scale"], n)
    return (first * first.abs()) * m_scale, (square * square) * v_scale


def write_moments(state: StateView, first: Tensor, second: Tensor, seed: Tensor) -> None:
    """Round both moments and put them away. `seed` is that of the step."""
    if state.format.name == "fp32":
        state["first"].copy_(first)
        state["second"].copy_(second)
        return
    for_first, for_second = random_bits(state, seed)
    if state.format.name == "bf16":
        state["first"].copy_(_round_to_bf16(first, for_first))
        state["second"].copy_(_round_to_bf16(second, for_second))
        return
    state["first_scale"].copy_(_scales(first))
    state["second_scale"].copy_(_scales(second))
    state["first"].copy_(_first_codes(first, state["first_scale"], for_first))
    state["second"].copy_(_second_codes(second, state["second_scale"], for_second))


def random_bits(state: StateView, seed: Tensor) -> tuple[Tensor, Tensor]:
    """16 random bits for the first moment of every element, and 16 for the second, in int64."""
    index = torch.arange(state.start, state.start + state["first"].numel(), device=state["first"].device) & 0xFFFFFFFF
    bits = mix(index ^ mix(mix(seed.to(torch.int64)) ^ state.salt))
    return bits & 0xFFFF, bits >> 16


def mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every bit of the result depends on every bit of `x` (Wellons' lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _round_to_bf16(values: Tensor, random: Tensor) -> Tensor:
    bits = values.view(torch.int32)
    added = torch.where((bits & MAGNITUDE) < TOP_STEP, random, 0).to(torch.int32)
    return ((bits + added) >> 16).to(torch.int16).view(torch.bfloat16)


def _scales(values: Tensor) -> Tensor:
    """The largest magnitude of every block, within the bounds; 0 for a block of zeros."""
    blocks = torch.nn.functional.pad(values.view(torch.int32) & MAGNITUDE, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.amax(1)  # magnitudes are ordered like their bits, and integers have no NaN to lose
    return torch.where(largest > 0, largest.clamp(SMALLEST_SCALE, LARGEST_SCALE), 0).view(torch.float32)


def _first_codes(values: Tensor, scale: Tensor, random: Tensor) -> Tensor:
    inverse = _spread(_inverse(torch.where(scale > 0, scale, 1.0)), values.numel())
    share = _at_most_one(values.abs() * inverse)
    below = (exact_root(share) * FIRST_CODES).to(torch.int32).clamp(max=FIRST_CODES - 1)
    low, high = below.float() * (1 / FIRST_CODES), (below + 1).float() * (1 / FIRST_CODES)
    code = below + _goes_up(share, low * low, high * high, random)
    return torch.where(values < 0, -code, code).to(torch.int8)


def _second_codes(values: Tensor, scale: Tensor, random: Tensor) -> Tensor:
    n, divisor = values.numel(), torch.where(scale > 0, scale, 1.0)
    share = _at_most_one(values * _spread(_inverse(divisor), n))
    # The root of the value is at hand from the update, and one of the scale does for the block: one root, not two.
    root = _at_most_one(exact_root(values) * _spread(_inverse(exact_root(divisor)), n))
    below = (exact_root(root) * SECOND_CODES).to(torch.int32).clamp(max=SECOND_CODES - 1)
    low, high = below.float() * (1 / SECOND_CODES), (below + 1).float() * (1 / SECOND_CODES)
    low, high = low * low, high * high
    code = below + _goes_up(share, low * low, high * high, random)
    return torch.where(values > 0, code.clamp(min=SMALLEST_SECOND), code).to(torch.uint8)


def _goes_up(share: Tensor, low: Tensor, high: Tensor, random: Tensor) -> Tensor:
    """Whether the upper of two neighbours is taken: with probability (share - low) / (high - low)."""
    chance = (random * 2 + 1).float() * 2.0**-17  # 65536 values evenly within (0, 1)
    return (chance * (high - low) < share - low).to(torch.int32)


def _at_most_one(x: Tensor) -> Tensor:
    """Also for infinity and NaN, which have no code of their own."""
    return torch.where(x < 1, x, 1.0)


def exact_root(x: Tensor) -> Tensor:
    """The fp32 root nearest to the true one. torch's own may be MKL's, whose last bit depends on the CPU.

    By way of fp64: its error there is far smaller than the distance of any root of an fp32 number from a tie.
    """
    return x.double().sqrt().float()


def _inverse(x: Tensor) -> Tensor:
    return torch.ones_like(x) / x  # 1 / x may be an approximation that torch makes


def _spread(scale: Tensor, num_elements: int) -> Tensor:
    return scale.repeat_interleave(BLOCK)[:num_elements]
