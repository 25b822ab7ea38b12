"""Lines for people, and what becomes of them when nobody reads."""

import dataclasses
import math
import os
import subprocess
import sys
import time

import pytest

from penstock.errors import short
from penstock.report.console import Console
from penstock.report.metrics import Speed, StepRow, Summary


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


def test_a_line_is_as_it_was_said(capsys):
    text = "x[:end:2] is [bold]:on: the [/] \\[way]"
    console = Console()
    console.say(text)
    with console.phase(text):
        pass
    assert capsys.readouterr().out == f"{text}\n" * 2


def test_a_disk_without_room_for_lines_does_not_end_the_run(monkeypatch, capsys):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        console = Console()
        console.say("one")
        with console.phase("two"):
            console.say("three")
        print("others go on too", flush=True)
    assert capsys.readouterr().err == "WARNING: no more lines can be written (No space left on device): none follow\n"


def test_a_line_has_the_rates_of_its_step():
    console = Console()
    row = StepRow(3, 1.5, 1e-5, 0.7, 16384, 9000, 1.409, False, 11628.1, 598.4, 743.2)
    with console.rich.capture() as capture:
        console.step(row, 40, 52.0)
        console.step(dataclasses.replace(row, reference_tflops=math.nan), 40, 52.0)
        console.step(StepRow(3, 1.5, 1e-5, 0.7, 16384, 9000, 1.409, False, 11628.1), 40, 52.0)
    whole, experts, unknown = capture.get().splitlines()
    assert "norm   0.70    11,628 tokens/s  598 TFLOP/s (reference 743)  0:00:52 left" in whole
    assert "11,628 tokens/s  598 TFLOP/s  0:00:52 left" in experts
    assert "11,628 tokens/s  0:00:52 left" in unknown


def test_with_several_ranks_a_line_says_that_its_flops_are_of_one():
    console = Console()
    with console.rich.capture() as capture:
        console.step(StepRow(3, 1.5, 1e-5, 0.7, 16384, 9000, 1.409, False, 11628.1, 598.4, 743.2, ranks=2), 40, 52.0)
    assert "11,628 tokens/s  598 TFLOP/s a rank (reference 743)  0:00:52 left" in capture.get()


def summary_of(*speeds):
    told = {"steps": 5, "loss_first": 2.0, "loss_last": 1.0, "eval_loss": None, "tokens": 500, "trained_tokens": 250}
    told |= {"tokens_per_s": 70.0, "model_tflops": 6.0, "reference_tflops": math.nan, "seconds": 7.0}
    told |= {"skipped_steps": 0, "model_dir": "", "run_dir": "runs/x", "answer": None, "speeds": speeds}
    console = Console()
    with console.rich.capture() as capture:
        console.summary(Summary(**told))
    return capture.get()


def test_the_summary_says_what_its_flops_are_of():
    one, two = (Speed(1, 2, 50.0, 8.0, math.nan), Speed(2, 3, 100.0, 4.0, 5.0))
    assert "speed     70 tokens/s  6 TFLOP/s, 0:00:07 in all" in summary_of(one)
    assert "speed     70 tokens/s  6 TFLOP/s a rank, 0:00:07 in all" in summary_of(two)
    shown = summary_of(one, two)
    assert "speed     70 tokens/s, 0:00:07 in all\n" in shown
    assert "50 tokens/s  8 TFLOP/s, 2 steps on 1 rank\n" in shown
    assert "100 tokens/s  4 TFLOP/s a rank (reference 5), 3 steps on 2 ranks\n" in shown


@pytest.mark.parametrize(
    ("number", "text"), [(1234.5, "1,234"), (598.4, "598"), (45.67, "45.7"), (0.01234, "0.0123"), (0.00012, "0.000120")]
)
def test_rates_are_short_and_without_powers(number, text):
    assert short(number) == text


@pytest.mark.slow
def test_time_before_the_command_is_not_counted():
    """A shell turns into the last command of a line, whose process is then as old as the shell."""
    code = "from penstock.report.console import Console; print(Console(quiet=True).all_times()[0][1])"
    start = time.monotonic()
    line = ["bash", "-c", 'sleep 1 && exec "$0" -c "$1"', sys.executable, code]
    shown = float(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    assert 0 < shown < time.monotonic() - start - 1
