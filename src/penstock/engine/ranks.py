"""The processes of one run: who this one is, how they find each other, and what they must agree on.

A run with one process has no process group at all; everything here is then what it looks like. With more, whoever
started them says so in the environment: our own launcher (`launch.py`), torchrun and DeepSpeed's launcher in torch's
variables, srun in its own. Tensors on GPUs go through NCCL; a second group on the host (gloo) carries what the hosts
must agree on without waiting for their GPUs, and checkpoints.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config as inductor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from penstock.errors import Diverged, Interrupted, RankLost, RecipeError, UserError, counted
from penstock.machine.hardware import near_cores, shares_of_cores, usable_cores
from penstock.machine.launched import AGREED, MET, leave_mark, say_here
from penstock.machine.lost import GONE, Watch, first_line, lost_connection
from penstock.update.norm import sum_over

T = TypeVar("T")
PATIENCE = timedelta(hours=2)
"""How long a rank waits for another: one may read 140 GB of weights or a data set meanwhile. A rank that died is
noticed by its closed connection or its silence, not by this."""
MEETING_SECONDS = 600.0
"""How long ranks wait for each other at the start: someone may still have to type the command on another machine."""
TELL_SECONDS = 10.0
"""After so long a wait it is said what for."""
STORE_SECONDS = 20.0
"""For a connection to a store whose port answers. Nothing hears a signal meanwhile."""
CONNECTING = timedelta(minutes=2)
"""For connections among ranks that have all come. They take seconds; nothing hears a signal meanwhile."""
PARTING_SECONDS = 60.0
"""How long a rank whose numbers are not finite waits for the others to find the same. Trackers have half of it."""
POLL_SECONDS = 0.05
"""Between looks for the others. A wait inside the store was rejected: it hears no signal, and warns when it ends."""
SHARE_GPU = "PENSTOCK_SHARE_GPU"
"""With 1, ranks may share a GPU. For tests: they only take each other's time, and NCCL must be able to (below)."""
SHARING_NCCL = (2, 30)
HAS_JOINED = Event()
"""Set once this process has known other ranks: then it must not end as others do (`cli.run`)."""


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    @property
    def many(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    @property
    def times(self) -> str:
        """How many devices, in words before the name of one."""
        return f"{self.size} x " if self.many else ""

    def share(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, on all ranks. Only rank 0 calls it; what it refuses is refused by all."""
        if not self.many:
            return make()
        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = make()
            except UserError as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        shared, refusal = box
        if refusal is not None:
            raise refusal
        return shared  # type: ignore[no-any-return]

    def gather(self, mine: T) -> list[T]:
        """What every rank has, on all ranks."""
        everyone = [mine] * self.size
        if self.many:
            dist.all_gather_object(everyone, mine)
        return everyone

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first rank of each machine before its others, which then find what that one has cached."""
        if self.many and self.local_rank:
            self.largest(0)
        yield
        if self.many and not self.local_rank:
            self.largest(0)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers. The hosts wait for each other here, their GPUs do not."""
        if not self.many:
            return number
        mine = torch.tensor([number])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return int(mine)

    def total(self, value: Tensor) -> Tensor:
        """The sum of a number over the ranks, on its device."""
        return sum_over(dist.group.WORLD if self.many else None, value)

    def pick(self, device: torch.device) -> torch.device:
        """The device of this rank."""
        if device.type != "cuda" or not self.many:
            return device
        if torch.cuda.device_count() == 1 and "SLURM_LOCALID" in os.environ and "RANK" not in os.environ:
            return torch.device("cuda", 0)  # SLURM may show each task its own GPU and no other
        count = torch.cuda.device_count()
        if self.local_size <= count:
            return torch.device("cuda", self.local_rank)
        if count and os.environ.get(SHARE_GPU) == "1":
            check_gpus_can_be_shared(os.environ)
            return torch.device("cuda", self.local_rank % count)
        raise RecipeError(
            f"{self.local_size} ranks on this machine, and torch sees {counted(count, 'GPU')}",
            where="--gpus",
            remedy="Lower --gpus, or use --device cpu.",
        )


def check_gpus_can_be_shared(environment: Mapping[str, str]) -> None:
    """Refuse where NCCL would: it lets ranks share a GPU from 2.30 on, when it is told to."""
    version = loaded_nccl()
    if version >= SHARING_NCCL and environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    found = ".".join(map(str, version)) if version else "the NCCL that torch brings"
    found += "" if version < SHARING_NCCL else " without that variable"
    raise RecipeError(
        f"ranks can share a GPU with NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1 only; here is {found}",
        where=f"{SHARE_GPU}=1",
        remedy="It is for tests: see CONTRIBUTING.md. A run needs a GPU for each rank.",
    )


def loaded_nccl() -> tuple[int, ...]:
    """Version of an NCCL that was preloaded in place of torch's, which other libraries cannot see; else nothing."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))
    except AttributeError:
        return ()
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


ALONE = World()
"""A run with one process."""


def find_world(environment: Mapping[str, str] = os.environ) -> World:
    """What the environment says: torch's variables (our launcher, torchrun, deepspeed), or those of a SLURM step."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
        if names[-1] not in environment and "LOCAL_SIZE" in environment:
            names[-1] = "LOCAL_SIZE"  # DeepSpeed's own word
    elif _number(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # set by srun: a batch script alone is no step
        names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
    else:
        return ALONE
    missing = [name for name in names if name not in environment]
    if missing:
        remedy = "Start it with torchrun, deepspeed, srun, or penstock train --gpus N."
        raise RecipeError(f"{names[0]} is set and {missing[0]} is not", where="environment", remedy=remedy)
    return World(*(_number(environment[name]) for name in names))


def _number(text: str) -> int:
    """A number of the environment. SLURM writes tasks a node as 4, or as 4(x2) for two machines alike."""
    digits = text.split("(")[0].split(",")[0]
    if not digits.isdigit():
        remedy = "A launcher sets it: start with torchrun, srun, or penstock train --gpus N."
        raise RecipeError(f"{text!r} is not a number", where="environment", remedy=remedy)
    return int(digits)


def first_machine(environment: Mapping[str, str]) -> str:
    """Where rank 0 of a SLURM step is: the first of its machines, which are written as `node[01-04,07],other`.

    `SLURM_LAUNCH_NODE_IPADDR` was rejected: it is where srun was called, and that may be a login node.
    """
    machines = environment.get("SLURM_STEP_NODELIST", "")
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1" or not machines:
        return "127.0.0.1"
    parts = re.match(r"([^,\[]*)(?:\[([^],-]+)[^]]*\])?([^,\[]*)", machines)
    assert parts is not None, "it matches the empty string"
    return "".join(part or "" for part in parts.groups())


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
        meeting.wait_for_all(watch)
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
        keeps = self._world.first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
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
        self._place = f"{self._address[0]}:{self._address[1]}"
        return True

    def _answers(self) -> bool:
        """Whether anyone listens. torch would wait itself, and write a page of warnings."""
        try:
            socket.create_connection(self._address, timeout=1.0).close()
        except OSError:
            return False
        return True

    def wait_for_all(self, watch: Watch) -> None:
        """Until every rank has come. One that failed on its way, or whose launcher says so, ends the wait."""
        watch.check_numbers()
        watch.tell("here")
        while missing := watch.absent("here"):
            self._wait(missing)
        leave_mark(MET)

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


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 3`, `ranks 4 to 7`."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, ranks))}"


def _connect(world: World, device: torch.device, store: TCPStore) -> None:
    """Make the process group of ranks that have met."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=CONNECTING)
    except RuntimeError as error:
        if lost_connection(error) and "refused" not in str(error):
            raise  # one of them is gone, and somebody will say which
        raise RankLost(
            f"they cannot connect to each other: {first_line(error)}",
            where="the ranks have met",
            remedy="Name the network interface that the machines share in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        ) from error
    _set_pg_timeout(PATIENCE)


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


def bind(world: World, device: torch.device) -> list[int]:
    """Keep this rank to its share of the cores near its device, and with them to their memory. Returns the cores.

    Ranks near the same cores split them, so that no CPU update takes the cores of another's. With fewer cores than
    ranks nothing is bound. A process alone keeps to the cores near its GPU.
    """
    near = near_cores(device)
    if not world.many and near == usable_cores():
        return near
    own = _own_share(world, near)
    if own:
        os.sched_setaffinity(0, own)
    torch.set_num_threads(max(1, len(own)))
    return usable_cores()


def _own_share(world: World, near: list[int]) -> list[int]:
    """This rank's cores: ranks of one machine tell each other what is near them."""
    if not world.many:
        return near
    machine = world.rank - world.local_rank  # its first rank
    everyone = world.gather((machine, near))
    here = [rank for rank, (other, _) in enumerate(everyone) if other == machine]
    return shares_of_cores([everyone[rank][1] for rank in here])[here.index(world.rank)]
