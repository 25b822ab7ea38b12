import json

import torch

from penstock.engine import StepResult
from penstock.offload.lanes import Mark, ToHost
from penstock.report.metrics import Metrics, StepFacts


class NotYet(Mark):
    """A mark that the device has not passed."""

    def ready(self):
        return False


def result(loss, mark):
    return StepResult(ToHost(torch.tensor([loss, 2.0, 0.0]), mark))


def test_a_row_is_read_when_it_is_ready_or_when_the_next_step_is_there(tmp_path):
    seen = []
    metrics = Metrics(tmp_path, on_row=seen.append)
    metrics.add(StepFacts(1, 1e-5, 100, 50), result(3.0, NotYet()))
    assert seen == []
    metrics.add(StepFacts(2, 1e-5, 100, 50), result(2.0, NotYet()))
    assert [row.step for row in seen] == [1]
    metrics.add(StepFacts(3, 1e-5, 100, 50), result(1.0, Mark()))
    assert [row.step for row in seen] == [1, 2, 3]
    metrics.add(StepFacts(4, 1e-5, 100, 50), result(0.5, NotYet()))
    metrics.settle()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [3.0, 2.0, 1.0, 0.5]
    assert all(row["step_seconds"] > 0 for row in rows)
