"""Sizes and views of the formats."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.layout import BLOCK, FORMATS, Chunk
from penstock.update.formats import part_of, torch_dtype, view_state
from penstock.update.gpu_kernels import PROGRAM
from penstock.update.host_threads import PART

DTYPES = [torch.bfloat16, torch.float32]


def test_bytes_a_parameter():
    n = 1 << 20
    with_bf16 = {name: f.num_bytes(n, weight_bytes=2) / n for name, f in FORMATS.items()}
    with_fp32 = {name: f.num_bytes(n, weight_bytes=4) / n for name, f in FORMATS.items()}
    assert with_bf16 == {"fp32": 10, "bf16": 6, "int8": 4 + 8 / 256}
    assert with_fp32 == {"fp32": 8, "bf16": 4, "int8": 2 + 8 / 256}
    assert with_bf16 == {name: f.bytes_per_element(2) for name, f in FORMATS.items()}
    assert with_fp32 == {name: f.bytes_per_element(4) for name, f in FORMATS.items()}


def test_types_are_torchs_with_their_sizes():
    parts = {part for f in FORMATS.values() for part in f.parts(2)}
    assert {part.name for part in parts} == {"remainder", "first", "second", "first_scale", "second_scale"}
    assert all(torch_dtype(part).itemsize == part.item_bytes for part in parts)


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.sampled_from(DTYPES), st.integers(1, 3000))
def test_a_view_covers_the_buffer_once(states, dtype, n):
    chunk = Chunk(3, 512, n, FORMATS[states], dtype.itemsize, offset=1024)
    buffer = torch.zeros(chunk.state_bytes, dtype=torch.uint8)
    view = view_state(chunk, buffer)
    assert view.format is FORMATS[states]
    assert (view.start, view.salt) == (1024 + 512, 3)
    assert view["first"].numel() == view["second"].numel() == n
    assert (view.get("remainder") is None) == (dtype is torch.float32)
    assert dtype is torch.float32 or view["remainder"].numel() == n
    assert [(part.name, tensor.dtype) for part, tensor in view.moments()] == [
        (part.name, torch_dtype(part)) for part in FORMATS[states].moments
    ]
    for tensor in view.tensors.values():
        tensor.view(torch.uint8).add_(1)
    assert torch.equal(buffer, torch.ones_like(buffer))


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 11), st.integers(1, 3000))
def test_a_chunk_has_its_own_scales_out_of_those_of_a_parameter(n, block, length):
    begin = min(block * BLOCK, (n - 1) // BLOCK * BLOCK)
    chunk = Chunk(0, begin, min(length, n - begin), FORMATS["int8"], 2)
    parts = {part.name: part for part in FORMATS["int8"].parts(2)}
    scales = torch.arange(parts["first_scale"].count(n))
    end = begin + chunk.size
    assert part_of(parts["first_scale"], scales, chunk).tolist() == sorted({i // BLOCK for i in range(begin, end)})
    assert part_of(parts["first"], torch.arange(n), chunk).tolist() == list(range(begin, end))


def test_a_block_cannot_be_cut():
    assert [FORMATS["int8"].whole_blocks(n) for n in (1, 256, 257)] == [256, 256, 512]
    assert FORMATS["bf16"].whole_blocks(7) == 7
    assert {name: f.block for name, f in FORMATS.items()} == {"fp32": 1, "bf16": 1, "int8": BLOCK}


def test_those_who_split_the_work_split_between_blocks():
    assert PART % BLOCK == 0
    assert PROGRAM % BLOCK == 0
