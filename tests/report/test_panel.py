"""The live panel, drawn into a console that records, and in a terminal."""

import codecs
import fcntl
import io
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace

import pytest
from rich.console import Console as RichConsole

from penstock.engine import MemoryUse
from penstock.recipe.presets import PRESETS
from penstock.report.console import Console
from penstock.report.metrics import StepRow
from penstock.report.panel import DOTS, Panel, Sources, braille, peak_flops, streaming_of

GIB = 2**30
MEMORY = [
    MemoryUse("gpu", "weights", 16 * GIB),
    MemoryUse("gpu", "state: gpu", 80 * GIB),
    MemoryUse("host", "state: stream", 38 * GIB),
]


def sources():
    return Sources(lambda: MEMORY, lambda: {"in": 0.4, "wait": 0.01}, {"gpu": 140 * GIB, "host": 125 * GIB}, 989e12)


def filled(steps=200):
    panel = Panel("llama-8b", 400, sources())
    for step in range(1, steps + 1):
        panel.row(StepRow(step, 3 / step + 0.5, 1e-5, 0.7, 16384, 9000, 1.8, step == 7, 9102.2, 455.1), 360.0)
    panel.evaluated(1.25)
    return panel


def drawn(panel, width, height=40, colour=False):
    file = io.StringIO()
    system = "truecolor" if colour else None
    console = RichConsole(file=file, width=width, height=height, color_system=system, soft_wrap=True, highlight=False)
    console.print(panel)
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 59, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [5, 17, 40])
def test_every_width_and_height_is_filled_and_not_passed(width, height):
    *lines, last = drawn(filled(), width, height).split("\n")[:-1]
    assert last == "", "the cursor does not stand at the end of a full line"
    assert {len(line) for line in lines} == {width}
    assert "200/400" in lines[1]


def test_it_shows_what_a_run_is_judged_by():
    text = drawn(filled(), 120)
    for part in ("0:06:00 left", "loss 0.5150", "eval 1.2500", "lr 1.00e-05", "norm 0.70", "tokens/s 9,102",
                 "TFLOP/s 455 (46% of 989)", "skipped 1", "96.0 GiB of 140.0 GiB", "38.0 GiB of 125.0 GiB",
                 "state: gpu 80.0 GiB", "in 40.0%", "3.500"):  # fmt: skip
        assert part in text, part


def test_a_panel_without_rows_and_one_with_only_bad_ones_are_drawn():
    assert "waiting for the first step" in drawn(Panel("x", 10, sources()), 80)
    panel = Panel("x", 10, sources())
    panel.row(StepRow(1, math.nan, 1e-5, math.nan, 10, 5, 0.1, True), 1.0)
    assert "skipped 1" in drawn(panel, 80)


def test_what_cannot_be_drawn_is_a_line_and_no_error():
    panel = filled()
    panel._memory = [None]
    assert "cannot be drawn" in drawn(panel, 80)


def test_saving_is_shown_while_it_lasts_and_after():
    panel = filled()
    panel.begins("Saving step 200")
    assert "Saving step 200: 0 s" in drawn(panel, 80)
    panel.ends("Saving step 200")
    assert "Saving step 200: 0.0 s" in drawn(panel, 80)


def test_a_falling_line_falls_in_braille():
    lines = braille([float(i) for i in range(40, 0, -1)], columns=20, rows=5)
    assert [len(line) for line in lines] == [20] * 5
    first, last = (next(i for i, line in enumerate(lines) if line[x] != "\u2800") for x in (0, 19))
    assert (first, last) == (0, 4)
    assert braille([1.0, 1.0], 4, 2)[1] == chr(0x2800 + DOTS[0][3] + DOTS[1][3]) * 4


def test_rates_of_the_data_sheet():
    assert peak_flops("NVIDIA GH200 480GB, 96 GiB") == 989e12
    assert peak_flops("NVIDIA L40S, 45 GiB") == 362e12
    assert peak_flops("CPU, 2 threads of 2 cores") == 0


@pytest.mark.parametrize(("encoding", "live"), [("utf-8", True), ("latin-1", False)])
def test_a_terminal_without_its_letters_gets_no_panel(encoding, live, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    keyboard, screen = pty.openpty()
    termios.tcsetwinsize(screen, (24, 80))
    with os.fdopen(screen, "w", encoding=encoding) as stdout, os.fdopen(keyboard):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert Console().live == live
        monkeypatch.undo()


@pytest.mark.parametrize("forced", ["", "1"])
@pytest.mark.parametrize("options", [{"json": True}, {"quiet": True}, {}])
def test_without_a_terminal_lines_are_plain(options, forced, capsys, monkeypatch):
    """Colours can be forced into a file; a panel is only drawn where it can be drawn over."""
    monkeypatch.setenv("FORCE_COLOR", forced)
    console = Console(**options)
    assert not console.live
    with console.training("x", 10, sources(), []):
        console.step(StepRow(1, 1.0, 1e-5, 0.5, 10, 5, 0.1, False, 100.0), 10, 1.0)
        console.step(StepRow(2, 1.0, 1e-5, 0.5, 10, 5, 0.1, False), 10, 1.0, due=False)
    out, err = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in capsys.readouterr())
    expected = [
        "Training 10 steps",
        "step  1/10  loss  1.0000  lr 1.00e-05  norm   0.50       100 tokens/s  0:00:01 left",
    ]
    assert out.splitlines() == ([] if options else expected)
    assert err.splitlines() == (expected if options.get("json") else [])


def test_a_phase_that_takes_a_while_says_how_long_and_how_fast(capsys, monkeypatch):
    clock = iter([0.0, 0.0, 0.0, 4.0, 4.0])  # of the program, the phase, its line on a terminal, and its end
    monkeypatch.setattr("penstock.report.console.time.perf_counter", lambda: next(clock))
    with Console().phase("Loading x") as phase:
        phase.num_bytes = 16 * 10**9
    assert capsys.readouterr().out.splitlines() == ["Loading x", "  Loading x: 4.0 s, 16.0 GB at 4.0 GB/s"]


def screen(text, width):
    """What a terminal shows after `text`: enough of one for rich's panel."""
    lines, row, column = [[]], 0, 0
    for code, control, character in re.findall(r"\x1b\[([0-9;?]*)([A-Za-z])|(.)", text, flags=re.S):
        if control == "A":
            row = max(0, row - int(code or 1))
        elif control == "K":
            lines[row] = []
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        elif character:
            if column == width:  # only what comes after the last column begins a line
                row, column = row + 1, 0
            lines += [[] for _ in range(row + 1 - len(lines))]
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = character
            column += 1
        lines += [[] for _ in range(row + 1 - len(lines))]
    return ["".join(line) for line in lines]


def in_terminal(words, env, *, until, then=None, limit=150):
    """Run the command in a terminal of its own; everything it wrote, and its exit code.

    `then` is a signal, or what someone types.
    """
    child, terminal = pty.fork()
    if child:
        rows, columns = int(env.get("LINES", 24)), int(env.get("COLUMNS", 80))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    if child == 0:
        os.environ.update(env)
        os.execv(sys.executable, [sys.executable, "-m", "penstock", *words])
    text, end, decoder = "", time.monotonic() + limit, codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while time.monotonic() < end:
            if select.select([terminal], [], [], 1)[0]:
                try:
                    text += decoder.decode(os.read(terminal, 65536))
                except OSError:  # the child has closed it
                    break
            # Not in mid drawing: with a Ctrl-C the kernel throws away what it has not handed over yet.
            if then and re.search(until, text) and not select.select([terminal], [], [], 0.1)[0]:
                os.write(terminal, then) if isinstance(then, bytes) else os.kill(child, then)
                then = None
    finally:
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(terminal)
    return text, os.waitstatus_to_exitcode(status)


WORDS = ("train", "demo", "--max-steps", "40", "--batch-size", "1", "--max-length", "64")


@pytest.mark.slow
def test_in_a_terminal_the_panel_is_there_and_ctrl_c_leaves_a_cursor(tmp_path):
    env = {"TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    words = [*WORDS, "--output-dir", str(tmp_path / "run")]
    text, code = in_terminal(words, env, until=r"tokens/s", then=b"\x03")
    assert code == 130
    shown = "\n".join(screen(text, 90))
    assert shown.count("╭─ demo") == shown.count("╰─") == 1, shown
    assert "╭─ demo" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "stopped by SIGINT" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor was shown after it was hidden last"


@pytest.mark.slow
def test_a_terminal_that_is_lost_ends_the_run_with_a_checkpoint(tmp_path):
    """Its lines can be written no more, and the run is saved all the same."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update({"TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"})
        os.execv(sys.executable, [sys.executable, "-m", "penstock", *WORDS, "--output-dir", str(tmp_path / "run")])
    text = ""
    while not re.search("tokens/s", text):
        text += os.read(terminal, 65536).decode(errors="replace")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith("step-")]


@pytest.mark.slow
@pytest.mark.parametrize(("ignored", "code"), [("INT HUP", 0), ("", 130)])
def test_a_signal_that_was_inherited_ignored_stays_so(ignored, code, tmp_path):
    """As a script's background jobs inherit SIGINT, and `nohup` hands SIGHUP on."""
    words = ["train", "demo", "--max-steps", "4", "--batch-size", "1", "--max-length", "64", "--prompt", "None"]
    trap = f"trap '' {ignored}; " if ignored else ""
    command = f'{trap}exec "$0" -m penstock "$@"'
    arguments = ["sh", "-c", command, sys.executable, *words, "--output-dir", str(tmp_path / "run")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        while "step 1/4" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == code


@pytest.mark.slow
def test_a_dumb_terminal_gets_lines(tmp_path):
    words = [*WORDS, "--max-steps", "2", "--keep", "0", "--output-dir", str(tmp_path / "run")]
    text, code = in_terminal(words, {"TERM": "dumb"}, until="never")
    assert code == 0
    assert "\x1b[" not in text
    assert "step 2/2" in text


def test_how_weights_move_is_said():
    recipe = replace(PRESETS["llama-8b"], weights="streamed", inputs="parked", gpu_memory="24GB")
    said = "weights streamed, order layers, inputs parked, 24GB of the GPU allowed"
    assert streaming_of(recipe) == said
    assert streaming_of(PRESETS["llama-8b"]) == ""
    panel = Panel("llama-8b", 400, replace(sources(), streaming=said))
    panel.row(StepRow(1, 3.0, 1e-5, 0.7, 16384, 9000, 1.8, False, 9102.2, 455.1), 360.0)
    assert said in drawn(panel, 100)


@pytest.mark.parametrize(("ranks", "label"), [(1, "TFLOP/s 455"), (2, "TFLOP/s a rank 455")])
@pytest.mark.parametrize("width", [40, 80, 100])
def test_flops_of_one_of_several_ranks_are_called_so(ranks, label, width):
    panel = Panel("llama-8b", 400, sources())
    panel.row(StepRow(1, 3.0, 1e-5, 0.7, 16384, 9000, 1.8, False, 9102.2, 455.1, ranks=ranks), 360.0)
    assert label in drawn(panel, width)
