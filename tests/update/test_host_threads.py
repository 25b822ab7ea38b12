import pytest
import torch

from penstock.plan.layout import FORMATS, Chunk
from penstock.update.adamw import NUM_COEFFICIENTS, AdamW, adamw_reference_
from penstock.update.formats import view_state
from penstock.update.host_threads import PART, HostThreads
from penstock.update.moments import write_moments
from penstock.update.rule import GO

COEFFICIENTS = torch.tensor([0.5, 1.0, 0.9, 0.1, 0.999, 0.001, 0.3, 1e-8, 0.99, 1e-3, 7.0])
ADAMW = AdamW()


def problem(n, dtype, states="fp32"):
    gen = torch.Generator().manual_seed(n)
    weight, gradient = (torch.randn(n, generator=gen).to(dtype) for _ in range(2))
    chunk = Chunk(3, 512, n, FORMATS[states], dtype.itemsize)
    state = view_state(chunk, torch.zeros(chunk.state_bytes, dtype=torch.uint8))
    if dtype is torch.bfloat16:
        state["remainder"].random_(-(2**15), 2**15, generator=gen)
    write_moments(state, torch.randn(n, generator=gen), torch.rand(n, generator=gen), torch.tensor(1))
    return weight, gradient, state


def tensors(weight, _, state):
    return {"weight": weight, **state.tensors}


def same(a, b):
    ours, theirs = tensors(*a), tensors(*b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def update(work, coefficients, cores, times=1):
    threads = HostThreads(cores)
    for _ in range(times):
        threads.update_(ADAMW, *work, coefficients)
    threads.close()


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, PART - 1, PART, 5 * PART + 13])
def test_threads_change_no_bit(n, dtype, states):
    wanted = problem(n, dtype, states)
    for _ in range(3):
        adamw_reference_(*wanted, COEFFICIENTS)
    for cores in ([0], [0, 1], [0] * 7):
        ours = problem(n, dtype, states)
        update(ours, COEFFICIENTS, cores, times=3)
        assert same(ours, wanted)


def test_a_step_that_must_not_go_changes_nothing():
    still = COEFFICIENTS.clone()
    still[GO] = 0.0
    work = problem(100, torch.bfloat16)
    update(work, still, [0, 1])
    assert same(work, problem(100, torch.bfloat16))


def test_without_the_c_kernel_the_bits_are_the_same(monkeypatch):
    assert len(COEFFICIENTS) == NUM_COEFFICIENTS
    with_c, without = problem(1000, torch.bfloat16), problem(1000, torch.bfloat16)
    update(with_c, COEFFICIENTS, [0, 1])
    for module in ("host_threads", "adamw"):
        monkeypatch.setattr(f"penstock.update.{module}.host_library", lambda: None)
    update(without, COEFFICIENTS, [0, 1])
    assert same(with_c, without)


def test_more_updates_than_it_holds_may_be_given_before_any_is_waited_for():
    sizes = [3 * PART + 5, 1, PART, 7, 2 * PART, 100, PART + 1]
    wanted, ours = ([problem(n, torch.bfloat16) for n in sizes] for _ in range(2))
    threads = HostThreads([0, 1])
    for _ in range(3):
        waits = [threads.begin(ADAMW, *work, COEFFICIENTS) for work in ours]
        for wait in reversed(waits):
            wait()
    threads.close()
    for work in wanted:
        for _ in range(3):
            adamw_reference_(*work, COEFFICIENTS)
    assert all(same(a, b) for a, b in zip(ours, wanted, strict=True))
