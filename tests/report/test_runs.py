"""Runs read back, whole or not."""

import json
import shutil

import pytest

from penstock.command.cli import main
from penstock.errors import CheckpointError
from penstock.report.page import render
from penstock.report.runs import SHOWN, exposed, overlap, read_runs


def span(lane, start, end):
    return {"lane": lane, "start": start, "end": end}


def test_hidden_is_what_the_model_computed_over():
    spans = [span("forward", 0, 10), span("in", 2, 6), span("update", 5, 8), span("wait", 7, 8)]
    assert exposed(spans) == [(7, 8)]
    assert overlap(spans).busy == 6
    assert overlap(spans).hidden_share == pytest.approx(5 / 6)


def test_work_while_the_model_stands_still_is_exposed_though_nobody_waits():
    spans = [span("forward", 0, 1), span("backward", 1, 2), span("cpu", 1.5, 3), span("forward", 2.5, 4)]
    assert exposed(spans) == [(2, 2.5)]
    assert overlap([]).hidden_share == 1.0


def test_a_run_that_is_still_going_is_read_as_far_as_it_is(finished_run, tmp_path):
    copy = tmp_path / "going"
    shutil.copytree(finished_run, copy, ignore=shutil.ignore_patterns("model", "checkpoints"))
    shutil.rmtree(copy / "facts")
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join(lines[:2]) + '\n{"step": 3, "lo')
    (run,) = read_runs([copy])
    assert [row["step"] for row in run.steps] == [1, 2]
    assert run.left_out == [], "a line that is being written is not damaged"
    assert not run.ended
    assert run.timeline == {}


@pytest.fixture
def copied_run(finished_run, tmp_path):
    copy = tmp_path / "copied"
    shutil.copytree(finished_run, copy, ignore=shutil.ignore_patterns("model", "checkpoints"))
    return copy


@pytest.mark.parametrize("line", [b"{}", b"null", b"[1]", b'"x"', b"\xff\xfe", b'{"step": 3, "eval_loss": "x"}'])
def test_a_line_that_is_no_row_is_left_out(finished_run, copied_run, line):
    for name in ("metrics.jsonl", "eval.jsonl"):
        first, *others = (finished_run / name).read_bytes().splitlines()
        (copied_run / name).write_bytes(b"\n".join([first, line, *others, b""]))
    (whole,), (run,) = read_runs([finished_run]), read_runs([copied_run])
    assert (run.steps, run.evals) == (whole.steps, whole.evals)
    assert (whole.left_out, run.left_out) == ([], ["1 line of metrics.jsonl", "1 line of eval.jsonl"])
    assert "1 line of metrics.jsonl, 1 line of eval.jsonl" in render([run], library="")


def test_a_row_whose_numbers_are_not_finite_is_shown_and_one_without_a_time_is_not(finished_run, copied_run):
    row, *_ = (json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines())
    rows = [{**row, "loss": None, "grad_norm": None}, {**row, "step_seconds": None}]
    (copied_run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = read_runs([copied_run])
    assert run.steps == rows[:1]


def test_the_command_says_what_it_left_out(copied_run, capsys):
    (copied_run / "facts" / "plan.json").write_text("{")
    assert main(["report", str(copied_run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["left_out"] == [f"{copied_run}: facts/plan.json"]
    assert f"WARNING: damaged, and left out: {copied_run}: facts/plan.json" in err


@pytest.mark.parametrize("text", ["null", "3", '"x"', "[1]", '{"x": 1}', '[{"x": 1}]'])
def test_facts_that_are_not_what_they_should_be_are_left_out(copied_run, text):
    for path in (copied_run / "facts").iterdir():
        path.write_text(text)
    (run,) = read_runs([copied_run])
    assert not any(getattr(run, name) for name in SHOWN)
    assert run.left_out == [f"facts/{name}.json" for name in SHOWN]
    assert "<dt>steps</dt>" in render([run], library="")


def test_what_the_page_takes_from_the_facts_is_there(finished_run):
    (run,) = read_runs([finished_run])
    assert all(getattr(run, name) for name in SHOWN)


def test_a_damaged_recipe_is_said(copied_run):
    (copied_run / "recipe.yaml").write_text("")
    with pytest.raises(CheckpointError, match=r"recipe\.yaml: the run's recipe is damaged"):
        read_runs([copied_run])


def test_runs_of_the_same_name_are_told_apart(finished_run, tmp_path):
    other = tmp_path / "other" / finished_run.name
    shutil.copytree(finished_run, other, ignore=shutil.ignore_patterns("model", "checkpoints"))
    names = [run.name for run in read_runs([finished_run, other, other])]
    assert len(set(names)) == 3
