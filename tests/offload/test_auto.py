from penstock.offload.auto import smaller_formats
from penstock.offload.formats import FORMATS
from penstock.plan.place import Need


def test_a_shortage_names_the_formats_that_take_less():
    weights = Need(2**31, 10, 2, activation_bytes=0, kept_bytes=0, gradients_leave=False, hidden_seconds=0)
    assert (
        smaller_formats(weights, FORMATS["fp32"]) == "--states bf16 (saves 8.0 GiB), --states int8 (saves 11.9 GiB), "
    )
    assert smaller_formats(weights, FORMATS["bf16"]) == "--states int8 (saves 3.9 GiB), "
    assert smaller_formats(weights, FORMATS["int8"]) == ""
