"""How the ranks of a run meet, and how they part.

Whoever started them says where (`ranks.py`). While they wait for each other they hear signals, and say for whom; one
that is lost ends the others (`machine/lost.py`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event

import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from penstock.engine.ranks import PATIENCE, World, check_gpus_differ, first_machine, gpu_of
from penstock.errors import Diverged, Interrupted, RankLost, RecipeError, UserError, counted
from penstock.machine.launched import AGREED, MET, leave_mark, say_here
from penstock.machine.lost import GONE, Watch, first_line, launcher_keeps_store, lost_connection, named

MEETING_SECONDS = 600.0
"""How long ranks wait for each other at the start: someone may still have to type the command on another machine."""
TELL_SECONDS = 10.0
"""After so long a wait it is said what for."""
STORE_SECONDS = 20.0
"""For a connection to a store whose port answers. Nothing hears a signal meanwhile."""
CONNECTING = timedelta(minutes=2)
"""For connections among ranks that have all come. They take seconds; nothing hears a signal meanwhile."""
UNREACHABLE_WORDS = ("refused", "timed out", "No route to host", "unreachable", "error retry count")
"""Of a connection that could not be made. NCCL says `remote process exited or there was a network error` of both."""
GPU_WORDS = ("CUDA", "cuda error", "out of memory")
"""What fails for want of no network."""
PARTING_SECONDS = 60.0
"""How long a rank whose numbers are not finite waits for the others to find the same. Trackers have half of it."""
POLL_SECONDS = 0.05
"""Between looks for the others. A wait inside the store was rejected: it hears no signal, and warns when it ends."""
HAS_JOINED = Event()
"""Set once this process has known other ranks: then it must not end as others do (`cli.run`)."""


@contextmanager
def joined(world: World, device: torch.device) -> Iterator[None]:
    """The ranks know each other inside.

    They leave together where all end alike: done, told to stop, or with numbers that are not finite. The first rank may
    still be writing then, and ending the group, or a launcher's patience, would end it. A rank that leaves by any other
    error does not wait for the others.
    """
    if not world.many:
        yield
        return
    os.environ.setdefault("MASTER_ADDR", first_machine(os.environ))
    os.environ.setdefault("MASTER_PORT", str(29_500 + int(os.environ.get("SLURM_JOB_ID", "0")) % 1_000))
    # By default torch ends a process with SIGABRT when NCCL reports that another rank is gone, before `Watch` can say
    # which. With 0 it only writes that down; the kernel goes on waiting, so nothing is computed from what is missing.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")  # nor for a fault of its own, which has a message
    # Inductor's own launcher keeps the interpreter's lock while it waits in a full queue: `Watch` would starve.
    if hasattr(inductor, "use_static_cuda_launcher"):
        inductor.use_static_cuda_launcher = False
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or every rank would make a context on the first GPU
    HAS_JOINED.set()
    address, agreed = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), False
    meeting = Meeting(world, address)
    store = meeting.open_store()
    try:
        watch = Watch(address, world.rank, world.size)
    except dist.DistError as error:
        remedy = "Its machine shows why. Start the command again, on every machine."
        raise RankLost(GONE, where="the ranks have not met", remedy=remedy) from error
    try:
        meeting.wait_for_all(watch, gpu_of(device))
        _connect(world, device, store)
        try:
            yield
        except (Interrupted, Diverged) as error:
            agreed = _all_have_ended(watch, error)
            raise
        agreed = _all_have_ended(watch, None)
    except (Exception, KeyboardInterrupt) as error:
        watch.end(None if agreed else error)
        if agreed:
            leave_mark(AGREED)
            _leave_in_order(world, watch)
        raise
    watch.end(None)
    _leave_in_order(world, watch)
    with suppress(RuntimeError):  # all work is done
        dist.destroy_process_group()


class Meeting:
    """How ranks find each other. Its waits are short and return to Python: inside of torch's no signal is heard."""

    def __init__(self, world: World, address: tuple[str, int]) -> None:
        self._world, self._address = world, address
        self._place, self._began, self._told = "", time.monotonic(), False

    def open_store(self) -> TCPStore:
        """The store through which ranks meet: rank 0 keeps it, unless torchrun has one (as torch's `env://`)."""
        keeps = self._world.first and not launcher_keeps_store()
        while not self._is_known() or not (keeps or self._answers()):
            self._wait([0])
        try:
            store = TCPStore(
                *self._address,
                world_size=self._world.size,
                is_master=keeps,
                timeout=timedelta(seconds=STORE_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
        except RuntimeError as error:
            what = f"rank 0 cannot be reached there: {first_line(error)}"
            remedy = "Name an address of the first machine, and a port there that no other program uses."
            raise RecipeError(what, where=self._place, remedy=remedy) from error
        store.set_timeout(PATIENCE)
        return store

    def _is_known(self) -> bool:
        """Whether this machine knows the name. In a cluster it may, once the other one is up."""
        try:
            socket.getaddrinfo(*self._address)
        except OSError:
            self._place = f"{self._address[0]} (a name that is not known here)"
            return False
        host, port = self._address
        self._place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return True

    def _answers(self) -> bool:
        """Whether anyone listens. torch would wait itself, and write a page of warnings."""
        try:
            socket.create_connection(self._address, timeout=1.0).close()
        except OSError:
            return False
        return True

    def wait_for_all(self, watch: Watch, gpu: str = "") -> None:
        """Until every rank has come. One that failed on its way, or whose launcher says so, ends the wait."""
        watch.check_numbers()
        watch.tell("here", gpu)
        while missing := watch.absent("here"):
            self._wait(missing)
        leave_mark(MET)
        check_gpus_differ(watch.told("here"))

    def _wait(self, missing: Sequence[int]) -> None:
        """A moment; after a while say for whom, and at last refuse."""
        waited = time.monotonic() - self._began
        if waited > MEETING_SECONDS:
            raise RankLost(
                f"{named(missing)} did not come to {self._place} within {MEETING_SECONDS:.0f} s",
                where="the ranks have not met",
                remedy="Start the command on every machine, with the same --gpus, --nodes and --rendezvous; see that "
                "each can reach that address and port.",
            )
        if waited > TELL_SECONDS and not self._told:
            self._told = True
            if self._world.local_rank == 0:  # others of this machine wait for the same
                say_here(f"waiting for {counted(len(missing), 'rank')} at {self._place}: {named(missing)}")
        time.sleep(POLL_SECONDS)


def _connect(world: World, device: torch.device, store: TCPStore) -> None:
    """Make the process group of ranks that have met, and its connections."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=CONNECTING)
        _set_pg_timeout(PATIENCE)
        if device.type == "cuda":
            _connect_gpus(device)
    except RuntimeError as error:
        if any(word in str(error) for word in GPU_WORDS):
            raise
        if lost_connection(error) and not any(word in str(error) for word in UNREACHABLE_WORDS):
            raise  # one of them is gone, and somebody will say which
        # NCCL says it below `Last error:`; what comes first only names a line of torch.
        reason = str(error).rpartition("Last error:")[2].strip() or first_line(error)
        raise _not_connected(reason.splitlines()[0]) from error


def _connect_gpus(device: torch.device) -> None:
    """NCCL connects in its first collective. What cannot be reached without an error keeps that waiting for ever."""
    dist.all_reduce(torch.ones(1, device=device))
    done, began = torch.cuda.current_stream(device).record_event(), time.monotonic()
    while not done.query():
        if time.monotonic() - began > CONNECTING.total_seconds():
            raise _not_connected(f"the first collective did not end within {CONNECTING.total_seconds():.0f} s")
        time.sleep(POLL_SECONDS)


def _not_connected(reason: str) -> RankLost:
    """Ranks that found each other through the store, and not on the network that they work through."""
    return RankLost(
        f"they cannot connect to each other: {reason}",
        where="the ranks have met",
        remedy="Name the network interface that the machines share in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    )


def _all_have_ended(watch: Watch, error: UserError | None) -> bool:
    """Wait until every rank has come to its end. Whether all did so alike.

    Ranks are told to stop, and are done, after the same step. Numbers that are not finite are mostly found by all of
    them, and sometimes by the one that writes the model.
    """
    own = first_line(error) if isinstance(error, Diverged) else ""
    limit = PARTING_SECONDS if own else PATIENCE.total_seconds()
    deadline = time.monotonic() + limit
    watch.tell("end", own)
    while watch.absent("end"):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    failed = [(rank, text) for rank, text in enumerate(watch.told("end")) if text]
    if failed and not own:
        rank, text = failed[0]
        raise watch.loss(f"rank {rank} failed: {text}")
    return True


def _leave_in_order(world: World, watch: Watch) -> None:
    """Rank 0 keeps the store: it leaves after the others have read there that all have ended."""
    deadline = time.monotonic() + TELL_SECONDS
    with suppress(RankLost, RuntimeError):  # who is gone by now has done its work
        watch.tell("left")
        while world.first and watch.absent("left") and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
