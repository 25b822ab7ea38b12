"""The three kernels give the same bits in every format."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.plan.layout import FORMATS, Chunk
from penstock.update import adamw
from penstock.update.adamw import AdamW, adamw_reference_
from penstock.update.formats import view_state
from penstock.update.host_threads import host_library
from penstock.update.master import split
from penstock.update.moments import write_moments

gpu = pytest.mark.gpu
all_formats = pytest.mark.parametrize("states", FORMATS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
adamw_ = AdamW().update_


def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU on this machine")


def coefficients(t=3, lr=1e-3, scale=0.7, go=1.0, betas=(0.9, 0.999), eps=1e-8, decay=0.01):
    b1, b2 = betas
    row = [scale, go, b1, 1 - b1, b2, 1 - b2, (1 - b2**t) ** 0.5, eps, lr * decay, lr / (1 - b1**t), t]
    return torch.tensor(row, dtype=torch.float32)


def problem(n, dtype, states="fp32", seed=0, start=512, salt=5):
    gen = torch.Generator().manual_seed(seed)
    master = torch.randn(n, generator=gen)
    weight, remainder = split(master) if dtype is torch.bfloat16 else (master, None)
    gradient = (torch.randn(n, generator=gen) * 1e-3).to(dtype)
    second = torch.rand(n, generator=gen) * 1e-6
    first = torch.randn(n, generator=gen) * 1e-3
    still = n // 50  # elements without gradient, whose moments stay denormal
    gradient[:still], first[:still], second[:still] = 0, 1e-40, 1e-41
    chunk = Chunk(salt, start, n, FORMATS[states], dtype.itemsize)
    state = view_state(chunk, torch.zeros(chunk.state_bytes, dtype=torch.uint8))
    if remainder is not None:
        state["remainder"].copy_(remainder)
    write_moments(state, first, second, torch.tensor(99))
    return weight.clone(), gradient, state


def extremes(states):
    """Moments that are the gradient and its square: overflow, the largest numbers, ten decades, tiny blocks."""
    largest = torch.finfo(torch.float32).max
    hard = torch.tensor([largest, -largest, 1.8446e19, -1e19, 1e-45, 0.0, 1e-20, 1.0]).repeat(96)
    decades = (torch.linspace(-9, 1, 768), torch.linspace(-18, -15, 256), torch.linspace(-44, -30, 256))
    small = 10.0 ** torch.cat(decades) * torch.tensor([1.0, -1.0]).repeat(640)
    weight, _, state = problem(2048, torch.float32, states)
    row = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1e-8, 0, 1e-3, 17]).float()
    return (weight, torch.cat((hard, small)), state), row


def copies(weight, gradient, state, device):
    tensors = {name: tensor.clone().to(device) for name, tensor in state.tensors.items()}
    return weight.clone().to(device), gradient.to(device), replace(state, tensors=tensors)


def assert_same(a, b):
    (weight_a, _, state_a), (weight_b, _, state_b) = a, b
    assert torch.equal(weight_a.cpu(), weight_b.cpu())
    assert state_a.tensors.keys() == state_b.tensors.keys()
    for name, tensor in state_a.tensors.items():
        assert torch.equal(tensor.cpu(), state_b[name].cpu()), name


def test_the_c_kernel_was_built():
    assert host_library() is not None, "gcc is part of the test machine; the build at install must have worked"


@all_formats
@both_dtypes
@pytest.mark.parametrize("n", [1, 2, 63, 256, 1000, 65_537])
def test_c_equals_reference(n, dtype, states):
    a = problem(n, dtype, states)
    b = copies(*a, "cpu")
    for t in range(1, 5):
        adamw_(*a, coefficients(t))
        adamw_reference_(*b, coefficients(t))
    assert_same(a, b)


@all_formats
@both_dtypes
@pytest.mark.parametrize("update_", [adamw_, adamw_reference_], ids=["c", "reference"])
def test_master_and_moments_one_after_the_other_are_the_whole(update_, dtype, states):
    a = problem(1000, dtype, states)
    b = copies(*a, "cpu")
    for t in range(1, 4):
        adamw_(*a, coefficients(t))
        before = copies(*b, "cpu")
        update_(*b, coefficients(t), "master")
        assert torch.equal(a[0], b[0])
        assert all(torch.equal(b[2][name], before[2][name]) for name in b[2].tensors if name != "remainder")
        update_(*b, coefficients(t), "moments")
        assert_same(a, b)


@all_formats
@both_dtypes
@pytest.mark.parametrize("n", [1, 255, 1024, 2500])
def test_triton_in_its_interpreter_equals_reference(n, dtype, states):
    from penstock.update.gpu_kernels import launch_adamw

    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so Triton compiles")
    a = problem(n, dtype, states)
    b = copies(*a, "cpu")
    for t in range(1, 4):
        launch_adamw(*a, coefficients(t))
        adamw_reference_(*b, coefficients(t))
    assert_same(a, b)


@pytest.mark.slow
def test_no_product_is_fused_with_a_sum_on_any_gpu():
    """Nor is a quotient or a root an approximation: what the compiler makes of it for Ampere, Hopper and Blackwell."""
    words = [sys.executable, Path(__file__).with_name("compiled_kernels.py"), "80", "90", "120"]
    done = subprocess.run(words, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == 3 * (6 + 2)
    assert not [line for line in found if line[-1] != "0"]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@all_formats
def test_extremes_are_the_same_in_every_kernel(states):
    from penstock.update.gpu_kernels import launch_adamw

    a, row = extremes(states)
    b, c = copies(*a, "cpu"), copies(*a, "cuda" if torch.cuda.is_available() else "cpu")
    adamw_(*a, row)
    adamw_reference_(*b, row)
    launch_adamw(*c, row.to(c[0].device))
    assert_same(a, b)
    assert_same(c, b)


@gpu
@all_formats
@both_dtypes
@pytest.mark.parametrize("n", [1, 1023, 5_000_001])
def test_triton_equals_c(n, dtype, states):
    needs_gpu()
    a = problem(n, dtype, states)
    b = copies(*a, "cuda")
    for t in range(1, 5):
        adamw_(*a, coefficients(t))
        adamw_(*b, coefficients(t).cuda())
    assert_same(a, b)


@all_formats
def test_denormals_survive_a_thread_that_flushes_them(states):
    a = problem(1000, torch.bfloat16, states)
    b = copies(*a, "cpu")
    adamw_reference_(*b, coefficients())
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        adamw_(*a, coefficients())
    finally:
        torch.set_flush_denormal(False)
    assert_same(a, b)


@all_formats
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_step_that_must_not_go_changes_nothing(device, states):
    if device == "cuda":
        needs_gpu()
    a = copies(*problem(3000, torch.bfloat16, states), device)
    b = copies(*a, device)
    adamw_(*a, coefficients(scale=float("nan"), go=0.0).to(device))
    assert_same(a, b)


@pytest.mark.slow
def test_contraction_would_be_noticed(tmp_path, monkeypatch):
    """A negative control: the same C file built with fused multiply-add gives other bits."""
    source, library = Path(adamw.__file__).with_name("host_kernel.c"), tmp_path / "fused.so"
    fused = ["-ffp-contract=fast", "-O3", "-march=native", "-fno-math-errno", "-DCLONES_OFF"]
    subprocess.run(["gcc", *fused, "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    a = problem(10_000, torch.bfloat16)
    b = copies(*a, "cpu")
    adamw_reference_(*a, coefficients())
    monkeypatch.setattr(adamw, "host_library", lambda: ctypes.CDLL(str(library)))
    adamw_(*b, coefficients())
    assert not torch.equal(a[2]["remainder"], b[2]["remainder"])
