"""Under DistributedDataParallel all ranks end with the same bits, and train what one process trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_net import HOMES

import penstock

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


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name == "micro-batches" else pytest.mark.slow) for name in CASES]
)
def test_two_replicas_train_what_one_process_trains(ranks, case):
    (alone,) = ranks("replicas", 1, **{**CASES[case], "first": True})
    results = ranks("replicas", 2, **CASES[case])
    tolerance = 0.02 if CASES[case].get("dtype") else 2e-5
    for result in results:
        assert result["norms"] == pytest.approx(alone["norms"], rel=tolerance)
        for got, wanted in zip(result["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(a, b) for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_trainer_under_torchrun_learns_what_it_learns_alone(tmp_path, in_backward):
    model = Path(penstock.__file__).parent / "demo" / "model"
    words = [Path(__file__).with_name("trainer_job.py"), model]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    results = {}
    for name, start in (("alone", []), ("two", torchrun)):
        out = tmp_path / name
        out.mkdir()
        command = [sys.executable, *start, *words, out, str(in_backward)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        results[name] = [json.loads(path.read_text()) for path in sorted(out.glob("result-*.json"))]
    (alone,), (first, second) = results["alone"], results["two"]
    assert (len(first["losses"]), first["wrapped"]) == (6, "DistributedDataParallel")
    assert first["losses"] == pytest.approx(alone["losses"], rel=2e-3)
    assert first["losses"][-1] < first["losses"][0]
    assert first["weights"] == second["weights"]
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-6)
