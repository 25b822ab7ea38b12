"""`penstock train --gpus N`: the command starts itself once a rank, and ends them together.

A rank is this same command with torch's variables in its environment, so a run that torchrun or srun starts is no other
run. torchrun's own agent (`elastic_launch`) was rejected: it restarts ranks, it turns every exit code into 1, and it
prints a table and a traceback for each rank that was ended because another one failed. Here the first error is shown
once, with its rank, and its exit code is the command's. Nothing heavy is imported: the launcher only waits.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from penstock.errors import RankLost, RecipeError, counted, tell
from penstock.machine.launched import AGREED, ERRORS, GOING_ON, LAUNCHER, MET, TERMINAL, error_of, mark_of
from penstock.machine.lost import announce, announce_for, meeting_store
from penstock.machine.ports import free_port
from penstock.machine.signals import handling, leave_terminal

TELLING_SECONDS = 30.0
"""How long other machines are told of a rank that failed before they met: they may still be importing torch."""
INSISTING_SECONDS = 10.0
"""From the second signal to the end of ranks that did not follow it."""
GRACE_SECONDS = 5.0
"""After one rank has ended by an error: the others may be ending too, by the same or because of it."""


@dataclass(frozen=True)
class Machines:
    """Where the ranks of a run are started."""

    gpus: int = 1
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""

    def __post_init__(self) -> None:
        host, port = self._host_and_port()
        if self.gpus < 1 or self.nodes < 1:
            where = f"--gpus {self.gpus} --nodes {self.nodes}"
            raise RecipeError("must be at least 1", where=where, remedy="1 is the default of both.")
        if not 0 <= self.node_rank < self.nodes:
            raise RecipeError(
                f"there {'is' if self.nodes == 1 else 'are'} {counted(self.nodes, 'machine')}",
                where=f"--node-rank {self.node_rank}",
                remedy=f"They count from 0: the last is {self.nodes - 1}. --nodes says how many there are.",
            )
        written = host and not set("[]") & set(host) and port.isdecimal() and 0 < int(port) < 2**16
        if self.nodes == 1 and self.rendezvous and not written:
            raise RecipeError(
                "is not an address and a port",
                where=f"--rendezvous {self.rendezvous!r}",
                remedy="Leave it out: one machine needs none. Or write it as 10.0.0.1:29500 or [fd00::1]:29500.",
            )
        if self.nodes > 1 and not written:
            raise RecipeError(
                f"{self.nodes} machines must find each other",
                where=f"--rendezvous {self.rendezvous!r}",
                remedy="Name an address of the first one and a free port there: 10.0.0.1:29500 or [fd00::1]:29500.",
            )

    def _host_and_port(self) -> tuple[str, str]:
        """As they are written, but for the brackets of an IPv6 address: no function that looks it up knows them."""
        host, _, port = self.rendezvous.rpartition(":")
        return (host[1:-1] if host.startswith("[") and host.endswith("]") else host), port

    def find_address(self) -> tuple[str, int]:
        """Where the ranks meet: without a word, at a free port of this machine."""
        host, port = self._host_and_port()
        return (host, int(port)) if port else ("127.0.0.1", free_port())

    @property
    def ranks(self) -> int:
        """Ranks on all machines."""
        return self.gpus * self.nodes

    def environment(self, local_rank: int, address: tuple[str, int]) -> dict[str, str]:
        """What a rank is told, in the words of torchrun."""
        return {
            "RANK": str(self.node_rank * self.gpus + local_rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.gpus),
            "MASTER_ADDR": address[0],
            "MASTER_PORT": str(address[1]),
        }


def check_batch(batch_size: int, ranks: int) -> None:
    """Every rank needs a row of a step."""
    if batch_size < ranks:
        raise RecipeError(
            f"is for all ranks together, and {ranks} ranks need a row each",
            where=f"batch_size = {batch_size}",
            remedy=f"Use --batch-size {ranks} or more, or fewer ranks.",
        )


def launch(
    words: Sequence[str], machines: Machines, *, debug: bool, advice: Callable[[], str] = lambda: GOING_ON
) -> int:
    """Run `penstock WORDS` as this machine's ranks of the run. Returns the exit code of the first that failed.

    `advice` says how the run goes on if a rank has died.
    """
    address = machines.find_address()
    with tempfile.TemporaryDirectory(prefix="penstock-ranks-") as notes:
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", **({"GLOO_SOCKET_IFNAME": "lo"} if machines.nodes == 1 else {})}
        processes: list[subprocess.Popen[bytes]] = []
        first_rank = machines.node_rank * machines.gpus
        with _passing_signals_to(processes) as heard:
            for local_rank in range(machines.gpus):
                variables = machines.environment(local_rank, address)
                environment = {**quiet, **os.environ, **variables, ERRORS: notes, LAUNCHER: str(os.getpid())}
                processes.append(_start(words, environment, Path(notes), shown=variables["RANK"] == "0" or debug))
            codes = _wait_for(processes)
        agreed = any(mark_of(Path(notes), first_rank + index, AGREED).exists() for index in range(machines.gpus))
        if any(codes) and not agreed:  # what they started has nobody to end it
            _kill(processes)
        insisted = len(heard) > 1
        exit_code = _report(codes, Path(notes), words, advice, first_rank=first_rank, insisted=insisted)
        if machines.nodes > 1:
            _tell_other_machines(codes, Path(notes), machines, address)
        return exit_code


def _start(words: Sequence[str], environment: dict[str, str], notes: Path, *, shown: bool) -> subprocess.Popen[bytes]:
    """A rank in a session of its own: a Ctrl-C in the terminal reaches the launcher, which passes it on once."""
    command = [sys.executable, "-m", "penstock", *words]
    if shown:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    terminal = os.dup(2)
    try:
        with open(notes / f"{environment['RANK']}.output", "wb") as output:
            return subprocess.Popen(
                command,
                env={**environment, TERMINAL: str(terminal)},
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=[terminal],
            )
    finally:
        os.close(terminal)


@contextmanager
def _passing_signals_to(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """To all that run. A rank that waits inside of a library hears none: after the second one it is killed.

    Gives the signals that came.
    """
    heard: list[int] = []

    def handle(number: int, _: object) -> None:
        heard.append(number)
        if number == signal.SIGHUP:
            leave_terminal()
        running = [process for process in processes if process.returncode is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        if len(heard) == 2:
            timer = Timer(INSISTING_SECONDS, _kill, (running,))
            timer.daemon = True
            timer.start()

    with handling(handle, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        yield heard


def _wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes, 0 for a rank that had to be ended: when one fails, the others would wait for it for ever."""
    with ThreadPoolExecutor(len(processes), "penstock-rank") as pool:
        running: set[Future[int]] = {pool.submit(process.wait) for process in processes}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            if any(future.result() for future in done):
                _, running = wait(running, timeout=GRACE_SECONDS)
                break
        waiting = [process for process in processes if process.returncode is None]
        _kill(waiting)  # SIGTERM would ask it to finish a step that never ends
        codes = [process.wait() for process in processes]
        pairs = zip(processes, codes, strict=True)
        return [0 if process in waiting and code == -signal.SIGKILL else code for process, code in pairs]


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """With all that they started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _tell_other_machines(codes: Sequence[int], notes: Path, machines: Machines, address: tuple[str, int]) -> None:
    """Ranks there wait for one that ended here, perhaps without a chance to say so itself."""
    first_rank = machines.node_rank * machines.gpus
    ended = [
        (code, first_rank + index)
        for index, code in enumerate(codes)
        if code not in (0, RankLost.exit_code) and not mark_of(notes, first_rank + index, AGREED).exists()
    ]
    if not ended:
        return
    code, rank = _first_of(ended, notes)
    note = error_of(notes, rank)
    text = f"rank {rank} " + (f"failed: {_first_line(note)}" if note.exists() else _how(code))
    met = any(mark_of(notes, first_rank + index, MET).exists() for index in range(len(codes)))
    if not met:
        print(f"penstock: telling the other machines, for up to {TELLING_SECONDS:.0f} s", file=sys.stderr)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # or a store that is gone fills the screen below our message
    with suppress(Exception, KeyboardInterrupt):  # rank 0 may be the one that was killed, and nobody is there to hear
        if machines.node_rank == 0 and not met:  # rank 0 has not opened their store, or took it along
            announce_for(TELLING_SECONDS, text, address, range(machines.gpus, machines.ranks))
        else:
            _wait_until_open(address, 0.0 if met else TELLING_SECONDS)  # rank 0 may be later than those of this machine
            announce(meeting_store(address, seconds=5.0), text)


def _wait_until_open(address: tuple[str, int], seconds: float) -> None:
    """Until somebody listens there; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _report(
    codes: Sequence[int],
    notes: Path,
    words: Sequence[str],
    advice: Callable[[], str] = lambda: GOING_ON,
    *,
    first_rank: int,
    insisted: bool = False,
) -> int:
    """Show the error of the rank that failed first, and give its exit code. `insisted`: after a second signal."""
    failed = [(code, first_rank + index) for index, code in enumerate(codes) if code]
    if not failed:
        return 0
    code, rank = _first_of(failed, notes)
    note, output = error_of(notes, rank), notes / f"{rank}.output"
    if note.exists():
        message = note.read_text(encoding="utf-8")
    else:
        why = f"It did not end within {INSISTING_SECONDS:.0f} s of the second signal. "
        why = why if insisted else "The kernel does that when host memory is full. "
        hint = why if code == -signal.SIGKILL else ""
        said = output.read_text(encoding="utf-8", errors="replace").strip() if output.exists() else ""
        lines = [*said.splitlines()[-10:], f"{hint}{advice()}"]
        message = _how(code) + "".join(f"\n  {line}" for line in lines)
    exit_code = 128 - code if code < 0 else code
    tell(f"rank {rank}: {message}", exit_code, words)
    return exit_code


def _first_of(failed: Sequence[tuple[int, int]], notes: Path) -> tuple[int, int]:
    """Exit code and rank of the one that the others failed because of.

    One that lost another fails too, perhaps earlier than the other is seen to have ended; or a library ends it with a
    signal, and it says nothing. So one that says why comes before one that does not.
    """

    def order(one: tuple[int, int]) -> tuple[bool, bool, bool, float]:
        code, rank = one
        note = error_of(notes, rank)
        wrote = note.exists()
        return code == RankLost.exit_code, code == 1, not wrote, note.stat().st_mtime if wrote else 0.0

    return min(failed, key=order)


def _first_line(note: Path) -> str:
    return note.read_text(encoding="utf-8").partition("\n")[0]
