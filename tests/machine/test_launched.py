"""What a rank tells the launcher that started it, and does not where another one did."""

import os
import signal
import subprocess
import sys

import pytest

from penstock.machine.launched import (
    ERRORS,
    LAUNCHER,
    MET,
    TERMINAL,
    error_of,
    leave_error,
    leave_mark,
    mark_of,
    say_here,
)


def test_an_error_and_a_mark_lie_where_the_launcher_looks(tmp_path, monkeypatch):
    monkeypatch.setenv(ERRORS, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    assert leave_error("no room")
    leave_mark(MET)
    assert error_of(tmp_path, 3).read_text() == "no room"
    assert mark_of(tmp_path, 3, MET).exists()
    assert not mark_of(tmp_path, 2, MET).exists()


def test_a_rank_that_another_launcher_started_speaks_for_itself(tmp_path, monkeypatch):
    monkeypatch.delenv(ERRORS, raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.chdir(tmp_path)
    assert not leave_error("no room")
    leave_mark(MET)
    assert not list(tmp_path.iterdir())


def test_what_people_must_hear_passes_a_hidden_output_and_a_terminal_that_is_gone(tmp_path, monkeypatch):
    with (tmp_path / "terminal").open("w") as terminal:
        monkeypatch.setenv(TERMINAL, str(terminal.fileno()))
        say_here("rank 1 is awaited")
    assert (tmp_path / "terminal").read_text() == "penstock: rank 1 is awaited\n"
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setenv(TERMINAL, str(writing))
    say_here("nobody hears it")
    os.close(writing)


@pytest.mark.parametrize(("launcher_lives", "code"), [(True, 0), (False, -signal.SIGTERM)])
def test_a_rank_that_comes_after_its_launcher_has_died_ends_as_one_that_sees_it_die(launcher_lives, code):
    launcher = os.getpid()
    if not launcher_lives:
        gone = subprocess.Popen(["true"])
        gone.wait()
        launcher = gone.pid
    rank = [sys.executable, "-c", "from penstock.machine.launched import follow_launcher; follow_launcher()"]
    assert subprocess.run(rank, env={**os.environ, LAUNCHER: str(launcher)}).returncode == code
