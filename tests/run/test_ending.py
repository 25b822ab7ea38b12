"""Signals that end a run, once or twice."""

import os
import signal

import pytest

from penstock.machine.launched import ERRORS
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
