"""Under DistributedDataParallel all ranks end with the same bits, and train what one process trains."""

import pytest
import torch
from small_net import HOMES

CASES = {
    "clipped": {},
    "in backward": {"max_grad_norm": 0.0},
    "views of buckets": {"views": True},
    "made of the wrapped model": {"first": False},
    "micro-batches": {"micro_batches": 3},
    "bf16": {"dtype": "bfloat16", "micro_batches": 2, "views": True},
}


@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_replicas_stay_the_same(ranks, homes):
    first, second = ranks("replicas", 2, homes=homes, max_grad_norm=0.0)
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_two_replicas_train_what_one_process_trains(ranks, case):
    (alone,) = ranks("replicas", 1, **{**CASES[case], "first": True})
    results = ranks("replicas", 2, **CASES[case])
    tolerance = 0.02 if CASES[case].get("dtype") else 2e-5
    for result in results:
        assert result["norms"] == pytest.approx(alone["norms"], rel=tolerance)
        for got, wanted in zip(result["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(a, b) for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True))
