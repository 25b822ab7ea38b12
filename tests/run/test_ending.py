"""Signals that end a run, once or twice."""

import os
import signal

import pytest

from penstock.checkpoint.places import NEWEST
from penstock.errors import OutputError
from penstock.machine.launched import ERRORS
from penstock.recipe.recipe import Recipe
from penstock.run import ending


@pytest.fixture
def exits(monkeypatch):
    found = []
    monkeypatch.setattr(ending.os, "_exit", found.append)
    return found


@pytest.mark.parametrize(
    ("environment", "numbers", "exited"),
    [
        ({}, ["SIGINT"], []),
        ({}, ["SIGINT", "SIGINT"], [130]),
        ({}, ["SIGINT", "SIGTERM"], [143]),
        ({"RANK": "0"}, ["SIGINT", "SIGTERM"], []),  # a launcher's echo of a Ctrl-C
        ({"RANK": "0"}, ["SIGINT", "SIGTERM", "SIGINT"], [130]),
        ({"RANK": "0"}, ["SIGTERM", "SIGTERM"], [143]),
        ({"RANK": "0", ERRORS: "notes"}, ["SIGINT", "SIGTERM"], [143]),  # ours passes each on once
        ({"RANK": "0", ERRORS: "notes"}, ["SIGTERM", "SIGTERM", "SIGTERM"], []),  # of a launcher's threads, as they die
    ],
)
def test_a_second_signal_ends_at_once_unless_it_is_the_same_request(environment, numbers, exited, exits, monkeypatch):
    for name in ("RANK", ERRORS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with ending.signals() as stop:
        for name in numbers:
            os.kill(os.getpid(), signal.Signals[name])
        assert stop.number == signal.Signals[numbers[0]]
    assert exits == exited


def test_a_launchers_second_signal_ends_at_once(exits, monkeypatch):
    monkeypatch.setenv(ERRORS, "notes")
    monkeypatch.setattr(ending, "DYING_SECONDS", 0.0)
    with ending.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert exits == [143]


@pytest.mark.parametrize("resumed", ["", NEWEST, "runs/a/checkpoints/step-00000002"])
def test_a_run_that_went_on_from_a_checkpoint_is_not_sent_back_there(resumed):
    stop = ending.Stop()
    stop.number = signal.SIGTERM
    advice = str(ending.interrupted(Recipe(), stop, 3, 6, resumed)).splitlines()[1]
    alone = "  The same command goes on with --resume alone; runs/a/checkpoints/step-00000002 would take it back there."
    assert advice == (alone if "runs" in resumed else "  The same command with --resume goes on.")


def test_a_directory_that_is_moved_while_the_run_goes_on_is_said(tmp_path):
    run = tmp_path / "run"
    run.mkdir()

    def write(name):
        with ending.disk_advice(run):
            (run / name).open("a")

    with pytest.raises(FileNotFoundError):
        write("not/there")  # a fault of ours, in a directory that is there
    run.rename(tmp_path / "moved")
    with pytest.raises(OutputError, match=r"run: the directory of the run is gone: .*\n.*moved.* --resume and the new"):
        write("metrics.jsonl")
    run.touch()  # a file of that name
    with pytest.raises(OutputError, match="is gone"):
        write("metrics.jsonl")
