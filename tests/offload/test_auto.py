import torch

from penstock.offload.auto import smaller_formats
from penstock.offload.formats import FORMATS


def test_a_shortage_names_the_formats_that_take_less():
    weights = [torch.empty(2**30, dtype=torch.bfloat16, device="meta")] * 2
    assert (
        smaller_formats(weights, FORMATS["fp32"]) == "--states bf16 (saves 8.0 GiB), --states int8 (saves 11.9 GiB), "
    )
    assert smaller_formats(weights, FORMATS["bf16"]) == "--states int8 (saves 3.9 GiB), "
    assert smaller_formats(weights, FORMATS["int8"]) == ""
