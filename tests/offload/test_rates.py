import pytest
import torch

from penstock.offload.rates import measure_rates


@pytest.mark.slow
def test_rates_are_those_of_a_machine(device):
    rates = measure_rates(torch.device(device), [0, 1])
    assert 1e8 < rates.link_bytes_per_s < 1e12
    assert 1e6 < rates.host_params_per_s < 1e11
