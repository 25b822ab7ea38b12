"""Rows as columns: every byte where it belongs, on a CPU, in Triton's interpreter, on a GPU, and compiled."""

import pytest
import torch

from penstock.model.turned import turned

SHAPES = [(4, 1), (16, 48), (128, 128), (400, 272), (132, 500)]


def any_bytes(rows, columns, device="cpu"):
    """NaN among them."""
    drawn = torch.randint(256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    return drawn.to(device).view(torch.float8_e4m3fn)


def assert_turned(found, x):
    assert found.is_contiguous()
    assert found.dtype == x.dtype
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8).t())


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (0, 16)])
def test_rows_become_columns(rows, columns):
    x = any_bytes(rows, columns)
    assert_turned(turned(x), x)
    torch.library.opcheck(turned, (x.view(torch.uint8),))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton runs there")
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_kernel_in_tritons_interpreter(rows, columns):
    from penstock.model.turned_kernel import launch_turn

    x = any_bytes(rows, columns)
    found = torch.empty(columns, rows, dtype=x.dtype)
    launch_turn(x.view(torch.uint8), found.view(torch.int32))
    assert_turned(found, x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (0, 16), (16384, 4096), (4096, 14336)])
def test_gpu_rows_become_columns(rows, columns, dtype):
    x = any_bytes(rows, columns, "cuda").view(dtype)
    assert_turned(turned(x), x)
    other = x.t().contiguous().t()  # the same numbers, which lie otherwise
    assert_turned(turned(other), x)


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
