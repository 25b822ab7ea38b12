"""Lines for people, and what becomes of them when nobody reads."""

import os
import sys

from penstock.report.console import Console


def test_who_stops_reading_does_not_end_the_run(monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        console = Console()
        console.say("one")
        assert os.read(reader, 99) == b"one\n"
        os.close(reader)
        with console.phase("two"):
            console.say("three")
        assert not console.live
        print("others go on too", flush=True)
