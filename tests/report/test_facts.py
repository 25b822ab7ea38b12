"""What a run leaves for its report."""

import dataclasses
import json
import shutil

import pytest
import torch

from penstock.flow.timeline import Span
from penstock.report.console import Console
from penstock.report.facts import Environment, Recorder, cut, environment
from penstock.run.train import train


def facts(run):
    return {path.stem: json.loads(path.read_text()) for path in (run / "facts").iterdir()}


def check(run, recipe, recorded_step):
    found = facts(run)
    assert set(found) == {"environment", "placement", "timeline", "memory", "data", "plan", "summary"}
    assert found["plan"]["host_bytes"] > 0
    assert found["plan"]["step_seconds"] == 0 or found["environment"]["gpu_bytes"], "no time without a GPU"
    state = sum(unit["num_bytes"] for unit in found["placement"])
    assert {unit["home"] for unit in found["placement"]} == {"gpu", "stream", "host"}
    assert state == sum(use["num_bytes"] for use in found["memory"] if use["part"].startswith("state"))
    weights = next(use["num_bytes"] for use in found["memory"] if use["part"] == "weights")
    assert state in (2 * weights, 5 * weights), "two fp32 moments; with bf16 weights a remainder too"
    assert found["timeline"]["step"] == recorded_step
    assert found["data"]["train"]["examples"] == 36
    assert found["data"]["samples"][0]["runs"][-1][1] in (True, False)
    assert found["summary"]["answer"]["prompt"] == recipe.prompt


def test_a_run_leaves_its_facts(finished_run, small_recipe):
    check(finished_run, small_recipe, 3)
    lanes = {span["lane"] for span in facts(finished_run)["timeline"]["spans"]}
    assert {"forward", "backward", "in", "update", "out", "cpu"} <= lanes
    runs = facts(finished_run)["data"]["samples"][0]["runs"]
    assert [trained for _, trained in runs][:2] == [False, True]
    assert "it is." in runs[1][0]


@pytest.mark.slow
def test_after_a_resume_they_are_those_of_the_whole_run(small_recipe, tmp_path):
    first = dataclasses.replace(small_recipe, output_dir=str(tmp_path / "run"), save_every=2, keep=3)
    train(first, Console(quiet=True))
    shutil.rmtree(tmp_path / "run" / "facts")
    train(first, Console(quiet=True), resume=str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    check(tmp_path / "run", first, 5)


def test_a_run_of_one_step_is_recorded_too(small_recipe, tmp_path):
    recipe = dataclasses.replace(small_recipe, output_dir=str(tmp_path / "run"), max_steps=1, prompt=None, keep=0)
    train(recipe, Console(quiet=True))
    timeline = facts(tmp_path / "run")["timeline"]
    assert timeline["step"] == 1
    assert any(span["lane"] == "update" for span in timeline["spans"])


def test_a_name_that_is_no_letters_is_written_and_read(tmp_path):
    (tmp_path / "facts").mkdir()
    Recorder(tmp_path, None, 1, 1)._write("data", {"source": "caf\udce9 中.jsonl"})
    assert facts(tmp_path) == {"data": {"source": "caf\udce9 中.jsonl"}}


def test_the_timeline_is_cut_where_nothing_could_hide_an_update():
    spans = [Span("forward", 0, 1), Span("backward", 1, 3), Span("update", 3, 3.5), Span("forward", 3.1, 4),
             Span("wait", 3.2, 3.3), Span("backward", 4, 6), Span("update", 6.5, 7), Span("wait", 6, 7)]  # fmt: skip
    timeline = cut(3, spans)
    assert timeline.seconds == 6
    assert [span.lane for span in timeline.spans] == ["forward", "backward", "update", "forward", "wait", "backward"]
    assert timeline.load() == pytest.approx({"update": 0.5 / 6, "wait": 0.1 / 6})
    only = cut(1, spans[:3])
    assert only.seconds == 3.5


def test_the_environment_is_what_is_listed_and_nothing_else(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-key")
    written = json.dumps(dataclasses.asdict(environment(torch.device("cpu"))))
    assert "a-secret-key" not in written
    assert set(json.loads(written)) == {field.name for field in dataclasses.fields(Environment)}
