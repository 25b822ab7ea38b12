"""What a rank and the launcher that started it tell each other: notes in a directory that the environment names.

A rank that torchrun or srun started finds no such directory, and speaks for itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

ERRORS = "PENSTOCK_ERRORS"
"""Names a directory in which a rank leaves its error, instead of printing it."""
LAUNCHER = "PENSTOCK_LAUNCHER"
"""The launcher's process, whose child a rank is while it lives."""
MET, AGREED = "met", "agreed"
"""What a rank notes there too: that all ranks have met; that it leaves as all agreed to, whatever its exit code."""
TERMINAL = "PENSTOCK_TERMINAL"
"""Names the launcher's standard error, for what a rank whose output is hidden has to say to people."""
GOING_ON = "The same command with --resume goes on from the newest checkpoint, or begins again if there is none."
"""What is said to who cannot see the run's directory."""


def error_of(notes: Path, rank: int) -> Path:
    """Where a rank leaves its error."""
    return notes / f"{rank}.error"


def mark_of(notes: Path, rank: int, word: str) -> Path:
    """Where a rank notes how far it has come."""
    return notes / f"{rank}.{word}"


def leave_error(message: str) -> bool:
    """Give an error to the launcher that started this rank, if one did."""
    if ERRORS not in os.environ:
        return False
    error_of(Path(os.environ[ERRORS]), int(os.environ["RANK"])).write_text(message, encoding="utf-8")
    return True


def leave_mark(word: str) -> None:
    """Tell the launcher that started this rank, if one did, how far it has come."""
    if ERRORS in os.environ:
        mark_of(Path(os.environ[ERRORS]), int(os.environ["RANK"]), word).touch()


def say_here(text: str) -> None:
    """Say something to the people at this machine, although a launcher may hide what this rank prints."""
    with suppress(OSError):  # the terminal may be gone
        os.write(int(os.environ.get(TERMINAL, "2")), f"penstock: {text}\n".encode())


def follow_launcher() -> None:
    """Have the kernel send this rank a SIGTERM if its launcher dies, so that it saves and ends. If it has died, now."""
    if LAUNCHER in os.environ:
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != int(os.environ[LAUNCHER]):  # the kernel tells nobody of a death that was before
            signal.raise_signal(signal.SIGTERM)
