"""`penstock train --gpus 2` as a user types it: ranks start, agree, fail and end together."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest
from torch.distributed import TCPStore

from penstock.command.cli import main
from penstock.engine import meeting as meeting_module
from penstock.engine.meeting import Meeting
from penstock.engine.ranks import World
from penstock.errors import RankLost, RecipeError
from penstock.machine import launch as launch_module
from penstock.machine import lost
from penstock.machine.launch import Machines, _report, _tell_other_machines, launch
from penstock.machine.launched import AGREED, MET
from penstock.machine.ports import free_port

DEVICE = "cuda" if os.environ.get("PENSTOCK_SHARE_GPU") == "1" else "cpu"
TINY = "num_hidden_layers=1,hidden_size=16,intermediate_size=16,num_attention_heads=2,num_key_value_heads=1,head_dim=8"
RUN = [
    "train", "demo", "--init", "random", "--shape", TINY, "--prompt", "None", "--data-percent", "20", "--dtype", "fp32",
    "--max-length", "64", "--batch-size", "4", "--device", DEVICE,
]  # fmt: skip


STARTED = []


def start(*words, **options):
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    STARTED.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A test that failed leaves no ranks behind: they save and end when their launcher is gone."""
    yield
    for process in STARTED:
        process.kill()
        process.communicate()
    STARTED.clear()


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_for_rows(run, count, process):
    deadline = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or len(rows(run)) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "the ranks did not begin"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus": 0}, "at least 1"),
        ({"nodes": 2}, "2 machines must find each other"),
        ({"nodes": 2, "rendezvous": "10.0.0.1"}, "2 machines must find each other"),
        ({"nodes": 2, "rendezvous": "10.0.0.1:29500", "node_rank": 2}, "there are 2 machines"),
        ({"nodes": 2, "rendezvous": "10.0.0.1:0"}, "2 machines must find each other"),
        ({"nodes": 2, "rendezvous": "[]:29500"}, "2 machines must find each other"),
        ({"nodes": 2, "rendezvous": "[::1:29500"}, "2 machines must find each other"),
        ({"nodes": 2, "rendezvous": "10.0.0.1:²"}, "2 machines must find each other"),
        ({"gpus": 2, "rendezvous": "localhost"}, r"'localhost': is not an address and a port\n.*one machine"),
        ({"rendezvous": "10.0.0.1:99999"}, "is not an address and a port"),
        ({"node_rank": 1}, r"there is 1 machine\n.*--nodes"),
    ],
)
def test_machines_that_cannot_be_are_refused(values, message):
    with pytest.raises(RecipeError, match=message):
        Machines(**values)


def test_ranks_of_several_machines_count_on():
    machines = Machines(gpus=2, nodes=3, node_rank=1, rendezvous="10.0.0.1:29500")
    told = machines.environment(1, ("10.0.0.1", 29500))
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("3", "6", "1", "2")


@pytest.mark.parametrize(
    ("rendezvous", "host"),
    [("[::1]:29500", "::1"), ("gpu7:29500", "gpu7"), ("10.0.0.1:29500", "10.0.0.1"), ("::1:29500", "::1")],
)
def test_an_address_is_looked_up_without_brackets(rendezvous, host):
    machines = Machines(nodes=2, rendezvous=rendezvous)
    assert machines.find_address() == (host, 29500)
    assert machines.environment(0, machines.find_address())["MASTER_ADDR"] == host
    assert socket.getaddrinfo(*Machines(nodes=2, rendezvous="[::1]:29500").find_address())


@pytest.fixture
def port():
    """Which nobody listens at yet."""
    return free_port()


def test_a_rank_that_says_why_it_failed_comes_before_one_that_a_library_ended(tmp_path, capsys):
    """As torch ends ranks with SIGABRT when NCCL tells it that another is gone."""
    (tmp_path / "1.error").write_text("the GPU is out of memory")
    assert _report([-signal.SIGABRT, 3], tmp_path, ["train"], first_rank=0) == 3
    assert "rank 1: the GPU is out of memory" in capsys.readouterr().err
    (tmp_path / "1.error").write_text("the run has lost a rank")
    assert _report([-signal.SIGKILL, 6], tmp_path, ["train"], first_rank=0) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "mark", "note", "heard"),
    [
        (143, AGREED, "stopped by SIGTERM; saved", ""),
        (143, "", "stopped by SIGTERM while no step was under way\nmore", "rank 2 failed: stopped by SIGTERM while no"),
        (4, AGREED, "the gradient was not finite", ""),
        (6, "", "the run has lost a rank", ""),
        (-9, "", "", "rank 2 was killed by SIGKILL"),
        (0, "", "", ""),
    ],
)
def test_a_launcher_tells_other_machines_what_they_do_not_know(tmp_path, port, code, mark, note, heard):
    """Nothing of a rank that left as all had agreed: it would end those that still finish their work."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for word in filter(None, (MET, mark)):
        (tmp_path / f"2.{word}").touch()
    if note:
        (tmp_path / "2.error").write_text(note)
    machines = Machines(gpus=2, nodes=2, node_rank=1, rendezvous=f"127.0.0.1:{port}")
    _tell_other_machines([code, 0], tmp_path, machines, ("127.0.0.1", port))
    found = store.get(lost.KEY).decode() if store.check([lost.KEY]) else ""
    assert found.startswith(heard)
    assert bool(found) == bool(heard)


def test_a_refusal_waits_for_a_first_rank_that_comes_later(tmp_path, port):
    (tmp_path / "1.error").write_text("wandb is not installed\n  pip install wandb")
    machines = Machines(gpus=1, nodes=2, node_rank=1, rendezvous=f"127.0.0.1:{port}")
    teller = threading.Thread(target=_tell_other_machines, args=([2], tmp_path, machines, ("127.0.0.1", port)))
    teller.start()
    time.sleep(1)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    teller.join(20)
    assert store.check([lost.KEY])
    assert store.get(lost.KEY) == b"rank 1 failed: wandb is not installed"


def test_a_refusal_of_the_first_rank_reaches_those_that_wait_for_it(tmp_path, port, monkeypatch):
    """Nobody keeps the store of the ranks then: its launcher does, until the others have come."""
    monkeypatch.setattr(lost, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(launch_module, "TELLING_SECONDS", 60.0)
    monkeypatch.setattr(meeting_module, "MEETING_SECONDS", 10.0)
    (tmp_path / "0.error").write_text("wandb is not installed")
    machines = Machines(gpus=1, nodes=2, node_rank=0, rendezvous=f"127.0.0.1:{port}")
    teller = threading.Thread(target=_tell_other_machines, args=([2], tmp_path, machines, ("127.0.0.1", port)))
    teller.start()
    meeting = Meeting(World(1, 2, 0, 1), ("127.0.0.1", port))
    meeting.open_store()
    watch = lost.Watch(("127.0.0.1", port), 1, 2)
    with pytest.raises(RankLost, match="rank 0 failed: wandb is not installed"):
        meeting.wait_for_all(watch)
    watch.end(None)
    teller.join(20)
    assert not teller.is_alive()


def test_an_error_of_all_ranks_is_shown_once_with_its_code(capfd):
    assert launch(["train", "no-such-preset"], Machines(gpus=2), debug=False) == 2
    out, err = capfd.readouterr()
    assert err.count("no-such-preset: there is no such preset") == 1
    ours = [line for line in err.splitlines() if not line.startswith("[W")]  # torch's own, of stores of other tests
    assert ours[0].startswith("penstock: rank ")
    assert out == ""


def test_a_mistake_is_found_before_any_rank_starts(capsys, tmp_path):
    assert main(["train", "demo", "--gpus", "2", "--nodes", "2"]) == 2
    assert "--rendezvous" in capsys.readouterr().err
    assert main(["train", "demo", "--gpus", "2", "--lr", "-1"]) == 2
    assert main(["train", "demo", "--gpus", "5", "--batch-size", "4", "--dry-run"]) == 2
    assert "5 ranks need a row each" in capsys.readouterr().err
    assert main(["train", "demo", "--gpus", "2", "--dry-run", "--output-dir", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_four_ranks_are_stopped_saved_and_taken_up_by_one(tmp_path):
    """SIGTERM to the launcher: all ranks finish the same step, save and exit 143; the curve goes on on one rank."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    steps = ["--epochs", "20", "--max-steps", "160", "--keep", "1", "--json"]  # enough for the signal to come in time
    assert main([*RUN, *steps, "--output-dir", str(whole)]) == 0
    process = start(*RUN, *steps, "--gpus", "4", "--output-dir", run)
    wait_for_rows(run, 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert err.count(": stopped by SIGTERM") == 1
    assert json.loads((run / "ranks.json").read_text())["ranks"] == 4
    assert 2 <= len(rows(run)) < 160
    (saved,) = (run / "checkpoints").iterdir()
    assert saved.name == f"step-{len(rows(run)):08}"
    assert main([*RUN, *steps, "--output-dir", str(run), "--resume"]) == 0
    ours, theirs = ([row["loss"] for row in rows(path)] for path in (run, whole))
    assert len(ours) == 160
    assert ours[:40] == pytest.approx(theirs[:40], rel=1e-4)  # roundings grow from step to step
    assert json.loads(out)["exit_code"] == 143, "one object is the only thing on standard output"


@pytest.mark.slow
def test_a_run_goes_from_two_ranks_to_one_and_back_to_two(tmp_path):
    """The same rows and the same losses to rounding as on one rank; int8 state and its scales go along."""
    whole, two, one, other = (tmp_path / name for name in ("whole", "two", "one", "other"))
    shape = TINY.replace("hidden_size=16", "hidden_size=512")
    words = ["--shape", shape, "--states", "int8", "--max-steps", "6", "--keep", "3", "--save-every", "2", "--json"]
    assert main([*RUN, *words, "--output-dir", str(whole)]) == 0
    first = start(*RUN, *words, "--gpus", "2", "--output-dir", two)
    _, err = first.communicate(timeout=300)
    assert first.returncode == 0, err
    resume = ["--resume", str(two / "checkpoints" / "step-00000002")]
    assert main([*RUN, *words, "--output-dir", str(one), *resume]) == 0
    resume = ["--resume", one / "checkpoints" / "step-00000004"]
    process = start(*RUN, *words, "--gpus", "2", "--output-dir", other, *resume)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out)["steps"] == 6
    for run in (two, one, other):
        assert [row["tokens"] for row in rows(run)] == [row["tokens"] for row in rows(whole)]
        assert [row["loss"] for row in rows(run)] == pytest.approx([row["loss"] for row in rows(whole)], rel=1e-3)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(other / "model")
    assert sum(p.numel() for p in model.parameters()) > 100_000
    assert not (other / "model.unchecked").exists()
    shown = [line for line in err.splitlines() if line.startswith("Training")]
    assert len(shown) == 1, "only the first rank prints"


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared out")
@pytest.mark.parametrize(("flags", "ranks_on_a_core"), [([], 1), (["--no-bind-cores"], 2)])
def test_ranks_keep_to_their_cores_unless_told_otherwise(tmp_path, flags, ranks_on_a_core):
    process = start(*RUN, "--max-steps", "1", "--keep", "0", "--gpus", "2", "--output-dir", tmp_path / "run", *flags)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    cores = json.loads((tmp_path / "run" / "facts" / "environment.json").read_text())["cores"]
    assert cores == len(os.sched_getaffinity(0)) * ranks_on_a_core // 2


@pytest.mark.parametrize(
    ("code", "insisted", "said"),
    [
        (-signal.SIGKILL, False, "host memory is full"),
        (-signal.SIGKILL, True, "did not end within 10 s of the second signal"),
        (143, True, "ended with exit code 143\n  The same command"),
    ],
)
def test_a_rank_that_was_killed_is_told_why_and_one_that_obeyed_is_not(tmp_path, capsys, code, insisted, said):
    _report([code], tmp_path, ["train"], first_rank=0, insisted=insisted)
    assert said in capsys.readouterr().err


def test_ranks_that_hear_no_signal_are_killed_with_what_they_started_after_the_second(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_module, "INSISTING_SECONDS", 0.2)
    script = f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/child; while true; do sleep 0.1; done"
    deaf = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    try:
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().strip():
            time.sleep(0.02)
        child = int((tmp_path / "child").read_text())
        with launch_module._passing_signals_to([deaf]) as heard:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.6)
            assert deaf.poll() is None, "the first one asks it to save"
            os.kill(os.getpid(), signal.SIGTERM)
            assert deaf.wait(10) == -signal.SIGKILL
        assert heard == [signal.SIGTERM] * 2
        deadline = time.monotonic() + 10
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        launch_module._kill([deaf])


def wait_for_ranks(launcher, count):
    """The processes, once each of them is a new program: before that a signal would find the launcher's handlers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(psutil.Error):
            found = psutil.Process(launcher).children()
            if sum("RANK" in child.environ() for child in found) == count:
                return found
        time.sleep(0.02)
    raise AssertionError("the ranks were not started")


def test_a_terminal_that_is_lost_ends_the_ranks_with_the_code_of_its_signal(tmp_path):
    """What the launcher has to say can be written no more."""
    child, terminal = pty.fork()
    if child == 0:
        words = [*RUN, "--gpus", "2", "--output-dir", str(tmp_path / "run")]
        os.execv(sys.executable, [sys.executable, "-m", "penstock", *words])
    try:
        wait_for_ranks(child, 2)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP


def is_alive(process):
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_ranks_whose_launcher_is_killed_at_once_end(tmp_path):
    """Before they have asked the kernel to tell them."""
    run = tmp_path / "run"
    process = start(*RUN, "--max-steps", "5000", "--epochs", "5000", "--gpus", "2", "--output-dir", run)
    ranks = wait_for_ranks(process.pid, 2)
    process.kill()
    try:
        deadline = time.monotonic() + 60
        while any(is_alive(rank) for rank in ranks):
            assert time.monotonic() < deadline
            assert not (run / "metrics.jsonl").exists(), "they train for nobody"
            time.sleep(0.05)
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()


@pytest.mark.slow
def test_a_killed_rank_ends_all_ranks_with_its_error_once(tmp_path):
    """The first of four; another of two is killed on another machine below."""
    run = tmp_path / "run"
    process = start(*RUN, "--max-steps", "5000", "--epochs", "5000", "--gpus", "4", "--output-dir", run)
    wait_for_rows(run, 2, process)
    children = psutil.Process(process.pid).children()
    by_rank = {child.environ()["RANK"]: child for child in children}
    os.kill(by_rank["0"].pid, signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 128 + signal.SIGKILL
    assert err.count("penstock:") == 1
    assert "rank 0: was killed by SIGKILL" in err
    assert f"There is no checkpoint in {run} yet: the same command with --resume begins again." in err
    assert not any(child.is_running() for child in children)


OUT_OF_MEMORY = """
import os, pathlib, threading, time

def take():
    while not pathlib.Path(os.environ["NOW"]).exists():
        time.sleep(0.05)
    import torch
    from penstock.engine.native import NativeEngine

    def fail(*_):
        torch.empty(2**50, device=os.environ["ON"])

    NativeEngine.begin = lambda engine, lr: engine.packed.decoder.layers[0].register_full_backward_hook(fail)

if os.environ.get("RANK") == "1":
    threading.Thread(target=take, daemon=True).start()
"""


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_ends_all_with_its_message(tmp_path):
    """From the moment that the file NOW is there, backward of rank 1 wants more memory than any machine has."""
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "NOW": str(tmp_path / "now"), "ON": DEVICE, "PYTHONPATH": path}
    run = tmp_path / "run"
    words = ["--max-steps", "5000", "--epochs", "5000", "--gpus", "4", "--output-dir", run]
    process = start(*RUN, *words, env=environment)
    wait_for_rows(run, 2, process)
    (tmp_path / "now").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert err.count("penstock:") == 1
    assert "penstock: rank 1: " in err
    assert "out of memory" in err


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_on_one_machine_ends_those_of_the_other(tmp_path, port, killed):
    """Two machines, as far as one can be two: a launcher each, which sees its own ranks only."""
    run = tmp_path / "run"
    words = ["--max-steps", "5000", "--epochs", "5000", "--output-dir", run, "--nodes", "2", "--json"]
    words += ["--rendezvous", f"127.0.0.1:{port}", "--node-rank"]
    machines = [start(*RUN, *words, n, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}) for n in range(2)]
    wait_for_rows(run, 2, machines[0])
    (rank,) = psutil.Process(machines[killed].pid).children()
    rank.kill()
    at = time.monotonic()
    said = [machine.communicate(timeout=60)[1] for machine in machines]
    assert time.monotonic() - at < 60
    codes = [machine.returncode for machine in machines]
    assert (codes[killed], codes[1 - killed]) == (128 + signal.SIGKILL, 6), said
    heard = "rank 0 is gone" if killed == 0 else "rank 1 was killed by SIGKILL"
    assert f"penstock: rank {1 - killed}: the run has lost a rank: {heard}" in said[1 - killed]
    assert "with --resume goes on" in said[1 - killed]


@pytest.mark.slow
def test_a_machine_that_is_refused_ends_the_wait_of_the_other(tmp_path, port):
    """Its ranks fail before they have met anybody: here for want of a tracker."""
    words = ["--max-steps", "2", "--output-dir", tmp_path / "run", "--nodes", "2"]
    words += ["--rendezvous", f"127.0.0.1:{port}", "--node-rank"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    first = start(*RUN, *words, 0, env=environment)
    second = start(*RUN, *words, 1, "--track", "wandb", env=environment)
    refused = second.communicate(timeout=100)[1]
    _, said = first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (6, 2), (said, refused)
    assert "penstock: rank 0: the run has lost a rank: rank 1 failed: " in said
    assert "wandb" in said


SLOW_TRACKER = """
import os, time
class Settings:
    def __init__(self, **_): pass
class Run:
    def log(self, *_, **__): pass
    def finish(self):
        time.sleep(8)
        open(os.environ["FINISHED"], "w").close()
def init(**_): return Run()
"""


@pytest.mark.slow
def test_a_first_rank_that_finishes_its_trackers_is_not_ended_by_one_that_has_none(tmp_path):
    (tmp_path / "wandb.py").write_text(SLOW_TRACKER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "FINISHED": str(tmp_path / "finished")}
    run = tmp_path / "run"
    words = ["--max-steps", "5000", "--epochs", "5000", "--gpus", "2", "--output-dir", run, "--track", "wandb"]
    process = start(*RUN, *words, env=environment)
    wait_for_rows(run, 2, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert (tmp_path / "finished").exists()
    assert not (run / "lock").exists()
