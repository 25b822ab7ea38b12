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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RecipeError, UserError, counted
from penstock.machine.hardware import near_cores, shares_of_cores, usable_cores
from penstock.machine.lost import named
from penstock.update.norm import sum_over

T = TypeVar("T")
PATIENCE = timedelta(hours=2)
"""How long a rank waits for another: one may read 140 GB of weights or a data set meanwhile. A rank that died is
noticed by its closed connection or its silence, not by this."""
SHARE_GPU = "PENSTOCK_SHARE_GPU"
"""With 1, ranks may share a GPU. For tests: they only take each other's time, and NCCL must be able to (below)."""
SHARING_NCCL = (2, 30)


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


def gpu_of(device: torch.device) -> str:
    """What tells this rank's GPU from all others. Nothing on the CPU."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def check_gpus_differ(gpus: Sequence[str]) -> None:
    """Refuse ranks that have the same of these GPUs, unless they can share one. No rank sees it alone under SLURM."""
    ranks_of: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks_of.setdefault(gpu, []).append(rank)
    sharing = next((ranks for gpu, ranks in ranks_of.items() if gpu and len(ranks) > 1), None)
    if sharing and os.environ.get(SHARE_GPU) == "1":
        check_gpus_can_be_shared(os.environ)
    elif sharing:
        raise RecipeError(
            f"{named(sharing)} have the same GPU",
            where="the ranks have met",
            remedy="A run needs a GPU for each rank: under SLURM, as many --gpus-per-node as --ntasks-per-node.",
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
    texts = [environment[name] for name in names]
    if names[-1] == "SLURM_STEP_TASKS_PER_NODE":
        texts[-1] = _tasks_on(environment.get("SLURM_NODEID", "0"), texts[-1])
    return World(*map(_number, texts))


def _tasks_on(node: str, tasks: str) -> str:
    """Tasks on one machine of a SLURM step. `4(x2),3` are those of two machines with four, then of one with three."""
    runs = [run.removesuffix(")").partition("(x") for run in tasks.split(",")]
    counts = [count for count, _, machines in runs for _ in range(_number(machines or "1"))]
    if _number(node) >= len(counts):
        there = counted(len(counts), "machine")
        what = f"SLURM_NODEID is {node}, from 0, and SLURM_STEP_TASKS_PER_NODE, {tasks}, is of {there}"
        raise RecipeError(what, where="environment", remedy="srun sets both: start every rank with the same srun.")
    return counts[_number(node)]


def _number(text: str) -> int:
    """A number of the environment."""
    if not text.isdecimal():
        remedy = "A launcher sets it: start with torchrun, srun, or penstock train --gpus N."
        raise RecipeError(f"{text!r} is not a number", where="environment", remedy=remedy)
    return int(text)


def first_machine(environment: Mapping[str, str]) -> str:
    """Where rank 0 of a SLURM step is: the first of its machines, which are written as `rack[1-2]n[01-04,07],other`.

    `SLURM_LAUNCH_NODE_IPADDR` was rejected: it is where srun was called, and that may be a login node.
    """
    machines = environment.get("SLURM_STEP_NODELIST", "")
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1" or not machines:
        return "127.0.0.1"
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", machines)
    assert first is not None, "it matches the empty string"
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


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
    host = socket.gethostname()  # SLURM may give ranks to machines in turn
    everyone = world.gather((host, near))
    here = [rank for rank, (other, _) in enumerate(everyone) if other == host]
    return shares_of_cores([everyone[rank][1] for rank in here])[here.index(world.rank)]
