"""Rows as columns: every byte where it belongs, on a CPU, in Triton's interpreter, on a GPU, and compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.model.turned import cast_columns, turned

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
OPERATION = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
SHAPES = [(16, 16), (16, 48), (128, 128), (400, 272), (144, 496)]


def any_bytes(rows, columns, device="cpu"):
    """NaN among them."""
    drawn = torch.randint(256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    return drawn.to(device).view(torch.float8_e4m3fn)


def assert_turned(found, x):
    assert found.is_contiguous()
    assert found.dtype == x.dtype
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8).t())


def wide_numbers(rows, columns, dtype=torch.bfloat16, device="cpu"):
    """Of all sizes that fp8 numbers have and smaller ones, in other places than those of one after the other."""
    generator = torch.Generator().manual_seed(columns)
    drawn = torch.randn(rows, columns, generator=generator) * 2.0 ** -torch.randint(
        24, (rows, columns), generator=generator
    )
    return drawn.to(dtype).to(device)


def assert_cast(x):
    """As torch casts."""
    rate = 448 / x.abs().amax().float()
    assert_turned(cast_columns(x, rate), (x.float() * rate).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (0, 16)])
def test_rows_become_columns(rows, columns):
    x = any_bytes(rows, columns)
    assert_turned(turned(x), x)
    torch.library.opcheck(turned, (x.view(torch.uint8),))


def test_they_are_cast_on_the_way():
    x = wide_numbers(400, 272)
    assert_cast(x)
    assert_cast(x.t().contiguous().t())
    torch.library.opcheck(cast_columns, (x, torch.tensor(2.0)), test_utils=OPERATION)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton runs there")
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_kernel_in_tritons_interpreter(rows, columns):
    from penstock.model.turned_kernel import launch_turn

    x = any_bytes(rows, columns)
    found = torch.empty(columns, rows, dtype=x.dtype)
    launch_turn(x, found)
    assert_turned(found, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton runs there")
def test_the_kernel_casts_in_tritons_interpreter():
    from penstock.model.turned_kernel import launch_turn

    wanted = any_bytes(144, 496).float().nan_to_num().to(torch.float8_e4m3fn)
    x, rate = wanted.bfloat16() / 4, torch.tensor(4.0)  # which nothing rounds: the interpreter would cut off
    found = torch.empty(496, 144, dtype=wanted.dtype)
    launch_turn(x, found, rate)
    assert_turned(found, wanted)


@pytest.mark.slow
def test_only_words_change_hands_between_threads():
    """Bytes that do may be garbage on Hopper, which no test on this machine can see. This asks the compiler.

    It also shows that the assembler takes the kernel, for Ada, Hopper and both kinds of Blackwell.
    """
    words = [sys.executable, Path(__file__).with_name("turned_layouts.py"), "89", "90", "100", "120"]
    done = subprocess.run(words, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert [line.split()[-1] for line in done.stdout.splitlines()] == [b"128x32xi32"] * 24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (0, 16), (16384, 4096), (4096, 14336)])
def test_gpu_rows_become_columns(rows, columns, dtype):
    x = any_bytes(rows, columns, "cuda").view(dtype)
    assert_turned(turned(x), x)
    other = x.t().contiguous().t()  # the same numbers, which lie otherwise
    assert_turned(turned(other), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (16384, 4096)])
def test_gpu_they_are_cast_on_the_way(rows, columns, wide):
    x = wide_numbers(rows, columns, wide, "cuda")
    assert_cast(x)
    assert_cast(x.t().contiguous().t())
    shifted = torch.empty(x.numel() + 1, dtype=wide, device="cuda")[1:].view(rows, columns)
    assert_cast(shifted.copy_(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
def test_gpu_more_than_32_bits_count():
    x = torch.zeros(65536, 40000, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    x.view(torch.uint8)[-1, -1] = 7
    found = turned(x).view(torch.uint8)
    assert found[-1, -1] == 7
    assert int(found.sum()) == 7


@pytest.mark.slow
def test_the_compiler_leaves_it_alone():
    torch._dynamo.reset()
    x = torch.randn(64, 32)

    def both(x):
        narrow = (2 * x).to(torch.float8_e4m3fn)
        return narrow, turned(narrow)

    rows, columns = torch.compile(both)(x)
    assert_turned(columns, rows)
