"""The ceilings on this machine: every number there is, and the sizes plausible."""

import dataclasses

import pytest
import torch

from penstock.bench.ceilings import Ceilings, measure_ceilings


@pytest.fixture(scope="module")
def ceilings():
    before = torch.get_num_threads()
    found = measure_ceilings(torch.device("cpu"), torch.float32)
    assert torch.get_num_threads() == before, "other measurements run with the threads they had"
    return found


def test_a_cpu_has_everything_but_a_link(ceilings):
    values = dataclasses.asdict(ceilings)
    nothing = {name for name, value in values.items() if value is None}
    assert nothing == {
        "h2d_bytes_per_s",
        "d2h_bytes_per_s",
        "both_ways_bytes_per_s",
        "device_memory_bytes_per_s",
        "fp8_flops_per_s",
    }
    assert all(value > 0 for value in values.values() if value is not None)


def test_rates_are_of_this_world(ceilings):
    """Off by a thousand is a wrong unit: a core adds 1e8 to 1e11 numbers a second, memory moves 1e9 to 1e12 bytes."""
    assert 1e9 < ceilings.host_memory_bytes_per_s < 1e13
    assert 1e9 < ceilings.matrix_flops_per_s < 1e14
    assert 1e6 < ceilings.cpu_adamw_params_per_s < 1e11
    assert 1e6 < ceilings.torch_adamw_params_per_s < 1e11


def test_lines_name_what_there_is():
    lines = Ceilings(16, 55.5e9, 55.3e9, 49.4e9, 83e9, 4.18e12, 814e12, 3.1e9, 3.9e9).lines()
    text = "\n".join(lines)
    for part in ("55.5 GB/s to the GPU", "49.4 each way", "host 83.0", "GPU 4,180", "814 TFLOP/s", "3.10 G", "3.90"):
        assert part in text
    assert "link: none" in Ceilings(2, None, None, None, 1e9, None, 1e9, 1e9, 1e9).lines()[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_both_ways_at_once_are_no_faster_than_one():
    found = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    assert 0 < found.both_ways_bytes_per_s < 1.1 * max(found.h2d_bytes_per_s, found.d2h_bytes_per_s)
    assert found.device_memory_bytes_per_s > found.h2d_bytes_per_s
