"""Sums of squares by one fixed tree."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.layout import num_spans
from penstock.update.spans import halve, root, span_sums, span_sums_reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, 1024, 65_536, 65_537, 300_001])
def test_span_sums_equal_reference_and_are_right(n, dtype, device):
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    expected, got = torch.empty(num_spans(n), dtype=torch.float64), torch.empty(num_spans(n), dtype=torch.float64)
    span_sums_reference(values, expected)
    got = got.to(device)
    span_sums(values.to(device), got)
    assert torch.equal(expected, got.cpu())
    torch.testing.assert_close(got.cpu().sum(), values.double().square().sum(), rtol=1e-12, atol=0)


@settings(max_examples=20)
@given(st.integers(0, 8))
def test_halve_adds_everything(levels):
    values = torch.arange(2.0**levels, dtype=torch.float64)
    assert halve(values) == values.sum()


def test_roots_are_those_of_every_machine(device):
    """numpy's are IEEE's."""
    x = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e5
    assert np.array_equal(root(x.to(device)).cpu().numpy(), np.sqrt(x.numpy()))
    assert root(x[0].to(device)).shape == ()
    assert not root(torch.tensor(float("nan"), dtype=torch.float64, device=device)).isfinite()
