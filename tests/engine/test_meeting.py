"""How ranks wait for each other, meet, and leave together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from penstock.engine import meeting as meeting_module
from penstock.engine.meeting import Meeting, _all_have_ended, _connect
from penstock.engine.ranks import World
from penstock.errors import Diverged, RankLost, RecipeError
from penstock.machine import lost
from penstock.machine.launched import TERMINAL
from penstock.machine.ports import free_port


@pytest.fixture
def address():
    """Where nobody listens yet."""
    return "127.0.0.1", free_port()


def test_a_rank_says_for_whom_it_waits_and_at_last_gives_up(address, monkeypatch, tmp_path):
    """Also where a launcher hides its output: the launcher's standard error is given to it."""
    monkeypatch.setattr(meeting_module, "TELL_SECONDS", 0.1)
    monkeypatch.setattr(meeting_module, "MEETING_SECONDS", 0.5)
    with open(tmp_path / "said", "wb") as said:
        monkeypatch.setenv(TERMINAL, str(said.fileno()))
        with pytest.raises(RankLost, match=r"have not met: rank 0 did not come to 127\.0\.0\.1:\d+ within") as caught:
            Meeting(World(2, 4, 0, 2), address).open_store()
        with pytest.raises(RankLost):
            Meeting(World(3, 4, 1, 2), address).open_store()
    assert (tmp_path / "said").read_text() == f"penstock: waiting for 1 rank at 127.0.0.1:{address[1]}: rank 0\n"
    assert "--rendezvous" in caught.value.remedy


def test_a_name_that_is_not_known_is_said(monkeypatch):
    """Not refused at once: in a cluster it becomes known with its machine."""

    def unknown(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(meeting_module.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(meeting_module, "MEETING_SECONDS", 0.2)
    for rank in range(2):
        with pytest.raises(RankLost, match=r"rank 0 did not come to gpu7 \(a name that is not known here\) within"):
            Meeting(World(rank, 2, 0, 1), ("gpu7", 29500)).open_store()


def test_an_ipv6_address_is_shown_as_it_is_written(monkeypatch):
    monkeypatch.setattr(meeting_module, "MEETING_SECONDS", 0.2)
    with pytest.raises(RankLost, match=r"rank 0 did not come to \[::1\]:29500 within"):
        Meeting(World(1, 2, 0, 1), ("::1", 29500)).open_store()


def nccl_error(kind, last):
    """As torch words it."""
    where = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94"
    return torch.distributed.DistBackendError(f"{where}, {kind}, NCCL version 2.28.9\nnccl: ...\nLast error:\n{last}")


GONE_OR_NETWORK = "remote process exited or there was a network error"


@pytest.fixture
def nccl_says(monkeypatch):
    """`nccl_says(error)`: of a group that is made, the first collective fails so."""

    def patch(error):
        def all_reduce(_):
            raise error

        monkeypatch.setattr(meeting_module.dist, "init_process_group", lambda *_, **__: None)
        monkeypatch.setattr(meeting_module.dist, "all_reduce", all_reduce)
        monkeypatch.setattr(meeting_module, "_set_pg_timeout", lambda _: None)
        monkeypatch.setattr(meeting_module.torch, "ones", lambda *_, device: None)

    return patch


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("internal error", "Bootstrap : no socket interface found"),
        ("unhandled system error", "socketPollConnect: connect returned No route to host"),
        (GONE_OR_NETWORK, "connect to 172.17.0.1<4> returned Connection refused, exceeded error retry count after 35"),
        (GONE_OR_NETWORK, "connect to 10.0.0.1<4> returned Connection timed out, exceeded error retry count after 35"),
    ],
)
def test_gpus_that_cannot_reach_each_other_are_told_of_the_interface(nccl_says, kind, last):
    nccl_says(nccl_error(kind, last))
    with pytest.raises(RankLost, match="have met: they cannot connect to each other: ") as caught:
        _connect(World(1, 2, 0, 1), torch.device("cuda"), None)
    assert last in str(caught.value)
    assert "NCCL_SOCKET_IFNAME" in caught.value.remedy


@pytest.mark.parametrize(
    "error",
    [
        nccl_error(GONE_OR_NETWORK, "socketProgress: Connection closed by remote peer gpu7<47861>"),
        nccl_error("unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "Cuda failure 'out of memory'"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
    ],
)
def test_what_fails_for_another_reason_while_gpus_connect_stays_what_it_is(nccl_says, error):
    nccl_says(error)
    with pytest.raises(type(error)) as caught:
        _connect(World(1, 2, 0, 1), torch.device("cuda"), None)
    assert caught.value is error


def test_gpus_that_wait_for_each_other_without_an_error_are_not_waited_for_long(nccl_says, monkeypatch):
    nccl_says(None)
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False))
    monkeypatch.setattr(meeting_module.dist, "all_reduce", lambda _: None)
    monkeypatch.setattr(meeting_module.torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(meeting_module, "CONNECTING", timedelta(seconds=0.2))
    with pytest.raises(RankLost, match="the first collective did not end within"):
        _connect(World(1, 2, 0, 1), torch.device("cuda"), None)


def test_ranks_that_have_the_same_gpu_are_refused_once_they_have_met(watches, address, monkeypatch):
    """Each alone sees one GPU, as SLURM shows it to a task."""
    monkeypatch.delenv("PENSTOCK_SHARE_GPU", raising=False)
    with ThreadPoolExecutor() as pool:
        waits = [
            pool.submit(Meeting(World(rank, 2, rank, 2), address).wait_for_all, watch, "host7 GPU-1")
            for rank, watch in enumerate(watches)
        ]
        for wait in waits:
            with pytest.raises(RecipeError, match=r"the ranks have met: ranks 0, 1 have the same GPU\n"):
                wait.result()


def test_a_disk_that_is_slow_is_waited_for(ranks):
    """Longer than connecting may take."""
    assert ranks("slow_disk", 2) == [b"\x07" * 1000, None]


def test_a_rank_that_failed_on_its_way_ends_the_wait_of_the_others(address, monkeypatch):
    """Here its launcher says so, since it was refused before it could meet anybody."""
    monkeypatch.setattr(lost, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(lost, "leave", lambda error, rank: None)
    monkeypatch.setattr(meeting_module, "MEETING_SECONDS", 10.0)
    meeting = Meeting(World(0, 2, 0, 1), address)
    store = meeting.open_store()
    watch = lost.Watch(address, 0, 2)
    told = threading.Timer(0.3, lambda: lost.announce(store, "rank 1 failed: wandb is not installed"))
    told.start()
    with pytest.raises(RankLost, match="rank 1 failed: wandb is not installed"):
        meeting.wait_for_all(watch)
    watch.end(None)


def test_all_ranks_are_guests_where_torchrun_keeps_the_store(address, monkeypatch):
    with socket.socket() as other:
        other.bind(address)
        other.listen()
        with pytest.raises(RecipeError, match="rank 0 cannot be reached there"):
            Meeting(World(0, 2, 0, 2), address).open_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = TCPStore(*address, is_master=True, wait_for_workers=False)
    Meeting(World(0, 2, 0, 2), address).open_store().set("found", "yes")
    assert agent.get("found") == b"yes"


RANK = """
import os, signal, time, torch
from penstock.engine import meeting
from penstock.engine.ranks import find_world
from penstock.errors import Interrupted
from penstock.machine import lost

def end(number, _):
    raise KeyboardInterrupt(number)

signal.signal(signal.SIGTERM, end)
lost.LOOK_SECONDS = lost.GRACE_SECONDS = 0.2
meeting.TELL_SECONDS = 0.5
world = find_world()
try:
    with meeting.joined(world, torch.device("cpu")):
        {body}
except KeyboardInterrupt as error:
    print("stopped", flush=True)
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0], flush=True)
print("left", time.time(), flush=True)
os._exit(0)
"""


def start_ranks(body, address, tmp_path, ranks=(0, 1), size=2):
    (tmp_path / "rank.py").write_text(RANK.replace("{body}", body))
    told = {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    told |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, tmp_path / "rank.py"],
            env={**os.environ, **told, **quiet, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]


def said_by(processes):
    try:
        return [process.communicate(timeout=60)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_a_signal_ends_a_rank_that_waits_for_others(address, tmp_path):
    (process,) = start_ranks("pass", address, tmp_path, ranks=[0])
    assert process.stderr.readline() == f"penstock: waiting for 1 rank at 127.0.0.1:{address[1]}: rank 1\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    ((first, _),) = said_by([process])
    assert first == "stopped"
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_ranks_that_are_told_to_stop_leave_together(address, tmp_path):
    """The first rank finishes its trackers meanwhile; a launcher would end it once another has left."""
    body = """
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "or torch ends a rank before it can say anything"
        try:
            raise Interrupted("told to", signal_number=15)
        finally:
            time.sleep(2.0 * world.first)
            print("finished", time.time(), flush=True)"""
    first, second = said_by(start_ranks(body.strip(), address, tmp_path))
    assert first[1] == second[1] == "Interrupted told to"
    finished, left = float(first[0].split()[1]), float(second[2].split()[1])
    assert left > finished


@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["rank 0", "torchrun"])
def test_without_our_launcher_ranks_learn_which_of_them_was_killed(address, tmp_path, monkeypatch, keeper):
    """torchrun's variables, and nobody who tells: the connections of the killed one are closed, and that is all.

    One whose own stay open is ended while it waits, and writes to its standard error.
    """
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(keeper == "torchrun"))
    agent = TCPStore(*address, is_master=True, wait_for_workers=False) if keeper == "torchrun" else None
    body = """
        print("met", flush=True)
        while True:
            torch.distributed.all_reduce(torch.ones(1))"""
    processes = start_ranks(body.strip(), address, tmp_path, ranks=range(3), size=3)
    for process in processes:
        assert process.stdout.readline() == "met\n", process.stderr.read()
    processes[1].kill()
    killed = time.monotonic()
    try:
        first, _, third = ("".join(process.communicate(timeout=60)) for process in processes)
    finally:
        for process in processes:
            process.kill()
    del agent
    assert time.monotonic() - killed < 30
    for said in (first, third):
        assert "the run has lost a rank: rank 1 has given no sign of life since a connection was closed" in said


@pytest.fixture
def watches(address, monkeypatch):
    """Of two ranks that have met."""
    monkeypatch.setattr(lost, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(lost, "leave", lambda error, rank: None)
    store = Meeting(World(0, 2, 0, 2), address).open_store()
    both = [lost.Watch(address, rank, 2) for rank in range(2)]
    yield both
    for watch in both:
        watch.end(None)
    del store


def test_ranks_that_all_find_numbers_that_are_not_finite_wait_for_each_other(watches):
    with ThreadPoolExecutor() as pool:
        second = pool.submit(_all_have_ended, watches[1], Diverged("not finite"))
        time.sleep(0.5)
        assert not second.done()
        assert _all_have_ended(watches[0], Diverged("not finite"))
        assert second.result()


def test_a_rank_hears_at_its_end_that_another_found_numbers_that_are_not_finite(watches):
    with ThreadPoolExecutor() as pool:
        first = pool.submit(_all_have_ended, watches[0], Diverged("not finite", where="step 3"))
        with pytest.raises(RankLost, match="rank 0 failed: step 3: not finite"):
            _all_have_ended(watches[1], None)
        first.result()


def test_a_rank_that_alone_finds_them_in_the_middle_waits_a_while_only(watches, monkeypatch):
    monkeypatch.setattr(meeting_module, "PARTING_SECONDS", 0.2)
    began = time.monotonic()
    assert not _all_have_ended(watches[0], Diverged("not finite"))
    assert time.monotonic() - began < 10
