"""What ranks hear of each other: who failed, who is silent, who has come."""

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from penstock.errors import RankLost, RecipeError
from penstock.machine import lost
from penstock.machine.launched import ERRORS

CLOSED = RuntimeError("gloo: Connection closed by peer")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 2], "ranks 1, 2"), ([1, 3, 4], "ranks 1, 3, 4"), ([4, 5, 6], "ranks 4 to 6")],
)
def test_ranks_are_named(ranks, text):
    assert lost.named(ranks) == text


@pytest.fixture
def address():
    """Where ranks meet."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", store.port
    del store


@pytest.fixture
def store():
    """Where ranks meet, in a process of its own, as it may freeze."""
    code = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
    command = [sys.executable, "-c", f"{code}; print(s.port, flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.address = "127.0.0.1", int(process.stdout.readline())
        yield process
        process.kill()


@pytest.fixture
def left(monkeypatch):
    """Ranks that were ended, with what they said. Looks are quick."""
    found = set()
    monkeypatch.setattr(lost, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(lost, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(lost, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(lost, "leave", lambda error, rank: found.add((rank, str(error).splitlines()[0])))
    return found


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_watch_tells_and_hears(address, left):
    first, second, third = (lost.Watch(address, rank, 4) for rank in range(3))
    third.end(None)
    first.end(ValueError("no such thing\nand more"))
    with pytest.raises(RankLost, match="rank 0 failed: no such thing"):
        lost.Watch(address, 3, 4).end(CLOSED)
    wait_until(lambda: left)
    second.end(None)
    ((rank, message),) = left
    assert (rank, "rank 0 failed: no such thing" in message) == (1, True), "the one that had ended hears nothing"


def test_a_rank_that_waits_for_word_takes_nobody_for_silent(address, left, monkeypatch):
    """It asks more often than it looks: what it counted as silence was over before the word came."""
    monkeypatch.setattr(lost, "SIGN_LOOKS", 20)
    first, second = (lost.Watch(address, rank, 2) for rank in range(2))
    wait_until(lambda: second._looks)
    second.end(None)
    with pytest.raises(RankLost, match="rank 1 has given no sign of life since a connection was closed"):
        first.end(CLOSED)


@pytest.mark.parametrize("keeper", ["rank 0", "torchrun"])
@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_neither_ends_nor_counts_on_is_the_one_that_is_gone(address, left, monkeypatch, keeper, dead):
    """As where torchrun or srun started them, and no launcher of ours says who was killed. All hear of it at once."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(keeper == "torchrun"))
    monkeypatch.setattr(lost, "SILENT_SECONDS", 60.0)
    monkeypatch.setattr(lost, "GRACE_SECONDS", 1.0)  # the second ends after the first, from which it has heard by then
    watches = [lost.Watch(address, rank, 4) for rank in range(4)]
    wait_until(lambda: all(watch._looks for watch in watches))
    watches[dead].end(None)
    first, second, busy = (watch for rank, watch in enumerate(watches) if rank != dead)
    began = time.monotonic()
    for watch in (first, second):
        with pytest.raises(RankLost, match=f"rank {dead} has given no sign of life since a connection was closed"):
            watch.end(CLOSED)
    assert time.monotonic() - began < 10
    wait_until(lambda: left)
    busy.end(None)
    ((rank, message),) = left
    assert (rank, f"rank {dead} has given no sign of life since" in message) == (busy._rank, True)


def test_of_several_silent_ranks_some_may_be_compiling(address, left, monkeypatch):
    monkeypatch.setattr(lost, "SILENT_SECONDS", 60.0)
    monkeypatch.setattr(lost, "WORD_SECONDS", 2.0)
    watches = [lost.Watch(address, rank, 3) for rank in range(3)]
    wait_until(lambda: all(watch._looks for watch in watches))
    for watch in watches[1:]:
        watch.end(None)
    compiled = threading.Timer(1.0, lambda: watches[2].tell("ending"))
    compiled.start()
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 has given no sign of life since"):
        watches[0].end(CLOSED)
    assert time.monotonic() - began >= 1.0, "it had to show that it lives"


def test_nobody_is_named_where_all_live(address, left, monkeypatch):
    """As where only the network failed: nobody is left then who could say more."""
    monkeypatch.setattr(lost, "SIGN_LOOKS", 40)
    first, second = (lost.Watch(address, rank, 2) for rank in range(2))
    wait_until(lambda: second._looks)
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        for ending in [pool.submit(watch.end, CLOSED) for watch in (first, second)]:
            with pytest.raises(RankLost, match="the run has lost a rank: a connection was closed"):
                ending.result()
    assert time.monotonic() - began < 10


def test_a_rank_of_our_launcher_waits_for_its_word(address, left, monkeypatch, tmp_path):
    """It knows more than a counter: by which signal a rank was killed."""
    monkeypatch.setenv(ERRORS, str(tmp_path))
    first, second = (lost.Watch(address, rank, 2) for rank in range(2))
    wait_until(lambda: second._looks)
    second.end(None)
    word = threading.Timer(1.0, lambda: lost.announce(lost.meeting_store(address), "rank 1 was killed by SIGKILL"))
    word.start()
    with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL"):
        first.end(CLOSED)


def test_ranks_of_different_runs_are_refused(address, left):
    watches = [lost.Watch(address, *numbers) for numbers in ((0, 4), (1, 2), (0, 4))]
    watches[0].check_numbers()
    with pytest.raises(RecipeError, match=r"counts 2 ranks, and the first to come counts 4\n.*same --gpus and --nodes"):
        watches[1].check_numbers()
    with pytest.raises(RecipeError, match=r"rank 0 is there already\n.*its own --node-rank"):
        watches[2].check_numbers()
    for watch in watches:
        watch.end(None)


def test_a_rank_that_was_stopped_says_so(address, left):
    lost.Watch(address, 0, 2).end(KeyboardInterrupt(signal.SIGTERM))
    with pytest.raises(RankLost, match="rank 0 was stopped by SIGTERM"):
        lost.Watch(address, 1, 2).end(CLOSED)


def test_a_watch_waits_for_no_store_that_is_frozen(store, monkeypatch):
    monkeypatch.setattr(lost, "LOOK_SECONDS", 0.2)
    watch = lost.Watch(store.address, 1, 2)
    store.send_signal(signal.SIGSTOP)
    time.sleep(1)
    began = time.monotonic()
    watch.end(ValueError("its own"))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("keeper", "fallen"), [("rank 0", 2), ("torchrun", 0)])
def test_a_rank_that_falls_silent_ends_all(address, left, monkeypatch, keeper, fallen):
    """As where its machine froze: its connections stay open, and nobody there can say anything.

    The store answers on: it is in the process of the first rank, or in torchrun's.
    """
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(keeper == "torchrun"))
    silent = lost.Watch(address, fallen, 3)
    wait_until(lambda: silent._looks)
    silent.end(None)
    others = [lost.Watch(address, rank, 3) for rank in range(3) if rank != fallen]
    wait_until(lambda: len(left) == 2)
    for watch in others:
        watch.end(None)
    assert {rank for rank, _ in left} == {watch._rank for watch in others}
    said = f"the run has lost a rank: rank {fallen} has given no sign of life for"
    assert all(said in message for _, message in left)


def test_ranks_that_live_or_have_not_come_yet_are_not_silent(address, left):
    watches = [lost.Watch(address, rank, 3) for rank in (0, 1)]
    time.sleep(4 * lost.SILENT_SECONDS)
    for watch in watches:
        watch.end(None)
    assert not left


def test_a_first_rank_that_falls_silent_ends_the_others(store, left):
    """The store is in its process, and a question to it is never answered."""
    watch = lost.Watch(store.address, 1, 2)
    wait_until(lambda: watch._looks)
    store.send_signal(signal.SIGSTOP)
    wait_until(lambda: left)
    watch.end(None)
    ((rank, message),) = left
    assert (rank, "rank 0 has given no sign of life" in message) == (1, True)


def test_silence_is_counted_in_looks_so_that_a_run_may_be_stopped_and_go_on(monkeypatch):
    monkeypatch.setattr(lost, "LOOK_SECONDS", 2.0)
    monkeypatch.setattr(lost, "SILENT_SECONDS", 6.0)
    pulses = lost.Pulses()
    assert [pulses.silent(1, count) for count in (0, 0, 0, 0, 0)] == [False] * 5, "it has not come yet"
    assert [pulses.silent(1, count) for count in (1, 2, 2, 2, 3)] == [False] * 5
    assert [pulses.silent(1, 3) for _ in range(4)] == [False, False, True, True]
    assert not pulses.silent(1, 4)


def test_ranks_wait_for_each_other_and_for_none_that_is_lost(address, left):
    first, second = (lost.Watch(address, rank, 2) for rank in range(2))
    assert first.absent("here") == [0, 1]
    first.tell("here")
    assert second.absent("here") == [1]
    second.tell("here", "with a word")
    assert (first.absent("here"), second.absent("here")) == ([], [])
    assert first.told("here") == ["", "with a word"]
    assert second.absent("end") == [0, 1]
    first.end(ValueError("no such thing"))
    wait_until(lambda: second._heard)
    with pytest.raises(RankLost, match="rank 0 failed: no such thing"):
        second.absent("end")
    second.end(None)


def test_a_store_that_is_gone_is_a_lost_rank(store, left):
    watch = lost.Watch(store.address, 1, 2)
    wait_until(lambda: watch._looks)
    store.kill()
    store.wait()
    with pytest.raises(RankLost, match="rank 0 is gone"):
        watch.absent("end")
    watch.end(None)


def test_a_launcher_tells_in_place_of_a_first_rank_that_is_gone(left):
    """And stays no longer than all others need to read it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()
    thread = threading.Thread(target=lost.announce_for, args=(60.0, "rank 0 failed: no tracker", address, [1]))
    thread.start()
    watch = lost.Watch(address, 1, 2)
    watch.tell("here")
    thread.join(20)
    assert not thread.is_alive()
    wait_until(lambda: watch._heard)
    watch.end(None)
    assert watch._heard == "rank 0 failed: no tracker"
