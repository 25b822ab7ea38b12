"""What libraries print, and where it goes."""

import ctypes
import os
import sys

import pytest

from penstock.command.libraries import output_for_people


def test_only_the_object_is_standard_output(capfd):
    c = ctypes.CDLL(None)
    with output_for_people():
        print("a tracker")
        os.write(1, b"a library\n")
        c.puts(b"a library in C, which writes when its buffer is full or the process ends")
    print("{}")
    out, err = capfd.readouterr()
    assert out == "{}\n"
    assert [line.split()[0] for line in err.splitlines()] == ["a"] * 3


def test_a_standard_output_that_is_closed_stays_so(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with output_for_people():
        print("to nobody")
    assert sys.stdout is None


def test_standard_output_is_there_again_after_an_error(capfd):
    with pytest.raises(KeyError), output_for_people():
        raise KeyError
    print("{}")
    sys.stdout.flush()
    assert capfd.readouterr().out == "{}\n"
