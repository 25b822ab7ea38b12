"""Processes that render and tokenize, as many as there are cores.

They are started afresh and get what they need through a pipe. Rejected: `fork`, which copies locks that threads of
torch or of a progress display may hold at that moment, and multiprocessing's `spawn`, which runs the main script of
whoever called us again. A process that is told nothing more ends by itself: its pipe is closed, by us or, however we
were killed, by the system.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

from penstock.data.coding import Coder, Encoded
from penstock.data.facts import TokenizerFacts
from penstock.data.forms import Format
from penstock.data.rows import Piece
from penstock.errors import DoesNotFit, UserError
from penstock.recipe.recipe import Recipe

_AHEAD = 4
"""Pieces of a process that may wait for an earlier one to be written."""


@dataclass(frozen=True)
class Job:
    """What all pieces of a source have in common."""

    facts: TokenizerFacts
    recipe: Recipe
    files: tuple[str, ...]

    def coder(self, form: Format) -> Coder:
        """For rows of one form."""
        return Coder(self.facts, self.recipe, self.files, form)


@dataclass(frozen=True)
class Task:
    """A piece and the form of its rows."""

    piece: Piece
    form: Format
    part: int = 0
    """Which of several sources it comes from."""


Results = Generator[tuple[Task, Encoded], None, None]


@dataclass(frozen=True)
class _Bug:
    """What went wrong in a process and is nobody's data."""

    text: str


def encode_here(job: Job, tasks: Iterator[Task]) -> Results:
    """In this process."""
    coders: dict[Format, Coder] = {}
    for task in tasks:
        if task.form not in coders:
            coders[task.form] = job.coder(task.form)
        yield task, coders[task.form].encode(task.piece)


def encode_in(job: Job, tasks: Iterator[Task], count: int) -> Results:
    """In so many other processes; results come in the order of the pieces, and so does the first fault."""
    with _processes(job, count) as (idle, started):
        waiting: deque[tuple[int, Task]] = deque()
        results: dict[int, Encoded | UserError | _Bug] = {}
        busy: dict[Connection, int] = {}
        numbered = _Numbered(tasks)
        following = numbered.next()
        while following or waiting:
            while following and idle and len(waiting) < _AHEAD * count:
                connection = idle.pop()
                try:
                    connection.send(following[1])
                except BrokenPipeError:
                    raise _ended(started) from None
                busy[connection] = following[0]
                waiting.append(following)
                following = numbered.next()
            while waiting and waiting[0][0] in results:
                number, task = waiting.popleft()
                yield task, _checked(results.pop(number))
            if busy and (not idle or not following or len(waiting) >= _AHEAD * count):
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection), "nothing else was waited for"
                    try:
                        results[busy.pop(ready)] = ready.recv()
                    except (EOFError, ConnectionResetError):
                        raise _ended(started) from None
                    idle.append(ready)
    if numbered.fault:
        raise numbered.fault


class _Numbered:
    """Tasks with their numbers. A fault of the reader is kept until all that comes before it is written."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._numbered = enumerate(tasks)
        self.fault: UserError | None = None

    def next(self) -> tuple[int, Task] | None:
        try:
            return next(self._numbered, None)
        except UserError as error:
            self.fault = error
            return None


def _checked(result: Encoded | UserError | _Bug) -> Encoded:
    if isinstance(result, UserError):
        raise result
    assert isinstance(result, Encoded), result.text if isinstance(result, _Bug) else "no result"
    return result


def _ended(started: list[subprocess.Popen[bytes]]) -> DoesNotFit:
    codes = [process.returncode for process in started if process.poll() is not None]
    what = f"a process that tokenizes rows has ended{f' (exit code {codes[0]})' if codes else ''}"
    remedy = "Most likely memory ran out. Free some, or give fewer cores: taskset -c 0 penstock ..."
    return DoesNotFit(what, where="tokenizing", remedy=remedy)


@contextmanager
def _processes(job: Job, count: int) -> Iterator[tuple[list[Connection], list[subprocess.Popen[bytes]]]]:
    """Processes that wait for their first piece. None of them is left when this ends, however it ends."""
    ours: list[Connection] = []
    started: list[subprocess.Popen[bytes]] = []
    # One thread each: they are as many as the cores already.
    threads = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        for _ in range(count):
            mine, theirs = Pipe()
            ours.append(mine)
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from penstock.data.workers import serve; serve({theirs.fileno()})"
            )
            command = [sys.executable, "-c", code]
            with theirs:
                started.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env={**os.environ, **threads}
                    )
                )
        for connection in ours:
            connection.send(job)
        yield list(ours), started
    finally:
        for connection in ours:
            connection.close()
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def serve(descriptor: int) -> None:
    """The life of such a process. Ctrl-C reaches it too, and is left to the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    coders: dict[Format, Coder] = {}
    try:
        job = connection.recv()
        while True:
            task = connection.recv()
            result: Encoded | UserError | _Bug
            try:
                if task.form not in coders:
                    coders[task.form] = job.coder(task.form)
                result = coders[task.form].encode(task.piece)
            except UserError as error:
                result = error
            except Exception:
                result = _Bug(traceback.format_exc())
            connection.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody wants more
        return
