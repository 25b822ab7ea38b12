import pytest
import torch

from penstock.offload import pool as pool_module
from penstock.offload.kernels import GO, NUM_COEFFICIENTS, StateView, adamw_reference_
from penstock.offload.pool import BLOCK, Pool


def problem(n, dtype):
    gen = torch.Generator().manual_seed(n)
    weight, gradient = (torch.randn(n, generator=gen).to(dtype) for _ in range(2))
    remainder = torch.randint(-(2**15), 2**15, (n,), generator=gen, dtype=torch.int16)
    first, second = torch.randn(n, generator=gen), torch.rand(n, generator=gen)
    return weight, gradient, StateView(remainder if dtype is torch.bfloat16 else remainder[:0], first, second)


def copy_of(weight, gradient, state):
    return weight.clone(), gradient, StateView(state.remainder.clone(), state.first.clone(), state.second.clone())


def tensors(weight, _, state):
    return weight, state.remainder, state.first, state.second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 13])
@pytest.mark.parametrize("cores", [[0], [0, 1], [0] * 7])
def test_threads_change_no_bit(n, dtype, cores):
    coefficients = torch.tensor([0.5, 0.9, 0.1, 0.999, 0.001, 0.3, 1e-8, 0.99, 1e-3, 1.0])
    ours, wanted = problem(n, dtype), problem(n, dtype)
    pool = Pool(cores)
    for _ in range(3):
        pool.adamw_(*ours, coefficients)
        adamw_reference_(*wanted, coefficients)
    pool.close()
    assert all(torch.equal(a, b) for a, b in zip(tensors(*ours), tensors(*wanted), strict=True))


def test_a_step_that_must_not_go_changes_nothing():
    coefficients = torch.full((NUM_COEFFICIENTS,), 0.5)
    coefficients[GO] = 0.0
    work = problem(100, torch.bfloat16)
    before = copy_of(*work)
    pool = Pool([0, 1])
    pool.adamw_(*work, coefficients)
    pool.close()
    assert all(torch.equal(a, b) for a, b in zip(tensors(*work), tensors(*before), strict=True))


def test_without_the_c_kernel_the_bits_are_the_same(monkeypatch):
    coefficients = torch.full((NUM_COEFFICIENTS,), 0.5)
    with_c, without = problem(1000, torch.bfloat16), problem(1000, torch.bfloat16)
    pool = Pool([0, 1])
    pool.adamw_(*with_c, coefficients)
    pool.close()
    monkeypatch.setattr(pool_module, "host_library", lambda: None)
    pool = Pool([0, 1])
    pool.adamw_(*without, coefficients)
    pool.close()
    assert all(torch.equal(a, b) for a, b in zip(tensors(*with_c), tensors(*without), strict=True))
