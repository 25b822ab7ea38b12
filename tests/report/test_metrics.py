import dataclasses
import json
import math

import pytest
import torch

from penstock.engine import StepResult
from penstock.flow.lanes import Instant, Mark, ToHost
from penstock.model.flops import Flops
from penstock.report.metrics import Metrics, Speed, StepFacts, StepRow, mean_rate, speeds_of

CPU = torch.device("cpu")


class NotYet(Mark):
    """A mark that the device has not passed."""

    def ready(self):
        return False


class At(Instant):
    """A step that ended at such a second."""

    def __init__(self, second):
        super().__init__(CPU)
        self._time = second


def result(loss, mark, ended=None):
    ended = ended or Instant(CPU)
    return StepResult(ToHost(torch.tensor([loss, 2.0, 0.0]), mark), ended)


def test_a_row_is_read_when_it_is_ready_or_when_the_next_step_is_there(tmp_path):
    seen = []
    metrics = Metrics(tmp_path, device=CPU, on_row=seen.append)
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


def test_of_several_ranks_none_reads_a_row_before_the_next_step(tmp_path):
    """Which is ready when differs between them, and what a row says may end the run."""
    seen = []
    metrics = Metrics(tmp_path, device=CPU, on_row=seen.append, ranks=2)
    metrics.add(StepFacts(1, 1e-5, 100, 50), result(3.0, Mark()))
    assert seen == []
    metrics.add(StepFacts(2, 1e-5, 100, 50), result(2.0, Mark()))
    assert [row.step for row in seen] == [1]
    metrics.settle()
    assert [row.step for row in seen] == [1, 2]


def test_steps_that_are_read_at_once_took_what_they_took(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path, device=CPU, on_row=lambda row: None)
    monkeypatch.setattr("penstock.report.metrics.Instant", lambda device: At(9.0))
    metrics.start_clock()
    metrics.add(StepFacts(1, 1e-5, 100, 50), result(3.0, NotYet(), At(10.0)))
    metrics.add(StepFacts(2, 1e-5, 100, 50), result(2.0, Mark(), At(10.25)))
    assert len(metrics.rows) == 2, "both were read when the second came"
    metrics.add(StepFacts(3, 1e-5, 100, 50), result(1.0, Mark(), At(10.75)))
    assert [row.step_seconds for row in metrics.rows] == [1.0, 0.25, 0.5]
    assert [row.tokens_per_s for row in metrics.rows] == [100, 400, 200]
    monkeypatch.setattr("penstock.report.metrics.Instant", lambda device: At(20.0))
    metrics.start_clock()
    metrics.add(StepFacts(4, 1e-5, 100, 50), result(1.0, Mark(), At(20.5)))
    assert metrics.rows[3].step_seconds == 0.5, "what came between, such as an evaluation, is of no step"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
def test_on_a_gpu_the_device_says_how_long_a_step_took():
    device = torch.device("cuda")
    torch.cuda._sleep(1000)
    before = Instant(device)
    torch.cuda._sleep(20_000_000)
    after = Instant(device)
    torch.cuda.synchronize()
    assert 2e-3 < after.since(before) < 1


def test_rows_come_back_and_the_files_begin_with_them(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = Metrics(tmp_path / "one", device=CPU, on_row=lambda row: None, flops=Flops(2e9, 3e9))
    for step, loss in enumerate([3.0, float("nan"), 0.1 + 0.2], start=1):
        first.add(StepFacts(step, 1e-5, 100, 50), result(loss, Mark()))
    first.add_eval(3, 1 / 3)
    saved = json.loads(json.dumps(first.saved()))
    second = Metrics(tmp_path / "two", device=CPU, on_row=lambda row: pytest.fail("not a new row"))
    second.restore(saved)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert (tmp_path / "two" / name).read_text() == (tmp_path / "one" / name).read_text()
    assert second.evals == first.evals
    assert second.rows[0] == first.rows[0]
    assert math.isnan(second.rows[1].loss)


def test_a_row_has_the_rates_of_its_step(tmp_path):
    metrics = Metrics(tmp_path, device=CPU, on_row=lambda row: None, flops=Flops(2e9, 3e9, pair=1e7))
    metrics.add(StepFacts(1, 1e-5, 100, 50), result(3.0, Mark()), example=400.0)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["tokens_per_s"] == pytest.approx(100 / row["step_seconds"])
    assert row["model_tflops"] == pytest.approx(row["tokens_per_s"] * 6e9 / 1e12), "4e9 of them are attention's"
    assert row["reference_tflops"] == pytest.approx(row["tokens_per_s"] * 3e9 / 1e12)


def test_rows_of_earlier_versions_have_no_rates_and_are_read(tmp_path):
    old = {"step": 1, "loss": 3.0, "lr": 1e-5, "grad_norm": 2.0, "tokens": 100, "trained_tokens": 50,
           "step_seconds": 0.5, "skipped": False}  # fmt: skip
    metrics = Metrics(tmp_path, device=CPU, on_row=lambda row: None, flops=Flops(2e9))
    metrics.restore({"steps": [old], "evals": []})
    metrics.add(StepFacts(2, 1e-5, 100, 50), result(3.0, Mark()))
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert {name: first[name] for name in old} == old
    assert first["model_tflops"] is None
    assert second["model_tflops"] > 0
    assert second["reference_tflops"] is None, "a model with experts"
    assert mean_rate(metrics.rows, "model_tflops") == pytest.approx(second["model_tflops"])
    assert math.isnan(mean_rate(metrics.rows, "reference_tflops"))


def test_rates_are_kept_apart_by_number_of_ranks(tmp_path):
    """FLOPs are those of one rank: a mean over one and two of them would be of neither."""
    rows = [StepRow(n, 1.0, 1e-5, 1.0, 100, 50, 2.0, False, 50.0, 8.0, ranks=1) for n in (1, 2)]
    rows.append(StepRow(3, 1.0, 1e-5, 1.0, 100, 50, 1.0, False, 100.0, 8.0, 9.0, ranks=2))
    one, two = speeds_of(rows)
    assert (one.ranks, one.steps, one.tokens_per_s, one.model_tflops) == (1, 2, 50.0, 8.0)
    assert math.isnan(one.reference_tflops)
    assert two == Speed(ranks=2, steps=1, tokens_per_s=100.0, model_tflops=8.0, reference_tflops=9.0)
    metrics = Metrics(tmp_path, device=CPU, on_row=lambda row: None, ranks=2)
    metrics.restore({"steps": [{**dataclasses.asdict(rows[0]), "of_a_later_version": 1}], "evals": []})
    metrics.add(StepFacts(2, 1e-5, 100, 50), result(3.0, Mark()))
    metrics.settle()
    assert [json.loads(line)["ranks"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
