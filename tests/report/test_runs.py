"""Runs read back, whole or not."""

import shutil

import pytest

from penstock.report.runs import exposed, overlap, read_runs


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
    assert not run.ended
    assert run.timeline == {}


def test_runs_of_the_same_name_are_told_apart(finished_run, tmp_path):
    other = tmp_path / "other" / finished_run.name
    shutil.copytree(finished_run, other, ignore=shutil.ignore_patterns("model", "checkpoints"))
    names = [run.name for run in read_runs([finished_run, other, other])]
    assert len(set(names)) == 3
