import torch

from penstock.offload.placing import need_of, smaller_formats
from penstock.plan.split import Need
from penstock.update.formats import FORMATS


def test_a_shortage_names_the_formats_that_take_less():
    weights = Need(2**31, 10, 2, activation_bytes=0, kept_bytes=0, gradients_leave=False, hidden_seconds=0)
    assert (
        smaller_formats(weights, FORMATS["fp32"]) == "--states bf16 (saves 8.0 GiB), --states int8 (saves 11.9 GiB), "
    )
    assert smaller_formats(weights, FORMATS["bf16"]) == "--states int8 (saves 3.9 GiB), "
    assert smaller_formats(weights, FORMATS["int8"]) == ""


def need(**changes):
    parameters = [torch.empty(1000, dtype=torch.bfloat16), torch.empty(24, dtype=torch.bfloat16)]
    known = {"activation_bytes": 500, "kept_bytes": 2000, "accumulates": False, "in_backward": False, "leave": True}
    return need_of(parameters, FORMATS["fp32"], hidden_seconds=1.0, **(known | changes))


def test_gradients_count_as_they_are_kept():
    after = need()
    assert (after.num_params, after.state_bytes, after.weight_bytes) == (1024, 10, 2)
    assert (after.activation_bytes, after.kept_bytes, after.gradients_leave) == (500, 2000, True)
    assert need(kept_bytes=None).kept_bytes == 500 + 2048
    assert not need(leave=False).gradients_leave
    assert need(in_backward=True).kept_bytes == 500
    many = need(accumulates=True)
    assert (many.activation_bytes, many.kept_bytes, many.gradients_leave) == (2548, 2548, False)
