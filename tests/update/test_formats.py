"""Sizes and views of the formats."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RecipeError
from penstock.plan.layout import BLOCK
from penstock.update.formats import FORMATS, format_named
from penstock.update.gpu_kernels import PROGRAM
from penstock.update.host_threads import PART

DTYPES = [torch.bfloat16, torch.float32]


def test_bytes_a_parameter():
    n = 1 << 20
    with_bf16 = {name: f.num_bytes(n, torch.bfloat16) / n for name, f in FORMATS.items()}
    with_fp32 = {name: f.num_bytes(n, torch.float32) / n for name, f in FORMATS.items()}
    assert with_bf16 == {"fp32": 10, "bf16": 6, "int8": 4 + 8 / 256}
    assert with_fp32 == {"fp32": 8, "bf16": 4, "int8": 2 + 8 / 256}


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.sampled_from(DTYPES), st.integers(1, 3000))
def test_a_view_covers_the_buffer_once(states, dtype, n):
    format = FORMATS[states]
    buffer = torch.zeros(format.num_bytes(n, dtype), dtype=torch.uint8)
    view = format.cut(buffer, n, dtype)
    assert view.states is format
    assert view.first.numel() == view.second.numel() == n
    assert view.remainder.numel() == (n if dtype is torch.bfloat16 else 0)
    for tensor in (view.first, view.second, view.first_scale, view.second_scale, view.remainder):
        tensor.view(torch.uint8).add_(1)
    assert torch.equal(buffer, torch.ones_like(buffer))


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 11), st.integers(1, 3000))
def test_a_part_has_its_own_blocks_and_knows_where_it_is(n, block, length):
    begin, end = min(block * BLOCK, n // BLOCK * BLOCK), n
    end = min(end, begin + length)
    format = FORMATS["int8"]
    view = format.cut(torch.zeros(format.num_bytes(n, torch.bfloat16), dtype=torch.uint8), n, torch.bfloat16, start=512)
    view.first_scale.copy_(torch.arange(view.first_scale.numel()))
    part = view.part(begin, end)
    assert part.start == 512 + begin
    assert part.first.numel() == part.remainder.numel() == end - begin
    assert part.first_scale.tolist() == sorted({i // BLOCK for i in range(begin, end)})


def test_a_block_cannot_be_cut():
    view = FORMATS["int8"].cut(torch.zeros(FORMATS["int8"].num_bytes(999, torch.float32)).byte(), 999, torch.float32)
    with pytest.raises(AssertionError, match="cannot be cut"):
        view.part(100, 300)
    assert [FORMATS["int8"].whole_blocks(n) for n in (1, 256, 257)] == [256, 256, 512]
    assert FORMATS["bf16"].whole_blocks(7) == 7


def test_those_who_split_the_work_split_between_blocks():
    assert PART % BLOCK == 0
    assert PROGRAM % BLOCK == 0


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(RecipeError, match=r"states = 'fp8'.*\n.*fp32, bf16, int8"):
        format_named("fp8")
