"""Nothing is ever lost: a run that is killed, stopped or runs out of disk at any instant ends with the same bits."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from fault_runs import (
    COUNT,
    KILL_AFTER,
    KILL_BEFORE,
    NO_SPACE,
    RUN,
    TERMINATE,
    TERMINATE_TWICE,
    checkpoints,
    digests,
    rows,
)

from penstock.checkpoint.resume import is_whole
from penstock.checkpoint.run_dir import run_recipe

STEPS = ["--max-steps", "6", "--save-every", "2", "--keep", "2"]


@pytest.fixture(scope="module")
def whole_run(server, tmp_path_factory):
    """A run that nobody disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    ended = server.train(run, *STEPS)
    assert ended.code == 0, ended.text
    return run


@pytest.fixture(scope="module")
def half_run(server, tmp_path_factory):
    """The same, killed in step 5: checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("half") / "run"
    ended = server.train(run, *STEPS, fault=at_row(run, 5, KILL_AFTER))
    assert ended.code == -signal.SIGKILL, ended.text
    assert [path.name for path in checkpoints(run)] == ["step-00000002", "step-00000004"]
    return run


@pytest.fixture
def run(half_run, tmp_path):
    shutil.copytree(half_run, tmp_path / "run")
    return tmp_path / "run"


def at_row(run, number, action, saved=0):
    """A fault when row `number` is written to metrics.jsonl, of which `saved` are restored at once.

    The first call there removes the old file, the second, after a resume, writes what is restored.
    """
    return [str(run / "metrics.jsonl"), 1 + bool(saved) + number - saved, action]


def assert_same_end(run, whole_run):
    assert (run / "model/model.safetensors").read_bytes() == (whole_run / "model/model.safetensors").read_bytes()
    assert digests(checkpoints(run)[-1]) == digests(checkpoints(whole_run)[-1])
    assert rows(run) == rows(whole_run)
    assert [row["step"] for row in rows(run)] == list(range(1, len(rows(run)) + 1))


def resume(server, run, *flags, **options):
    return server.train(run, *STEPS, "--resume", *flags, **options)


STREAMED = ["--weights", "streamed", "--inputs", "parked", "--micro-batch-size", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "kills"), [([], 20), (STREAMED, 10)], ids=["resident", "streamed"])
def test_kills_at_random_steps_change_no_bit(server, tmp_path, more, kills):
    flags = ["--max-steps", str(3 * kills), "--save-every", "3", "--validation", "0.1", "--eval-every", "10", "--dtype"]
    flags += ["bf16", *more]
    assert server.train(tmp_path / "whole", *flags).code == 0
    run, draw, at_most = tmp_path / "run", random.Random(0), 0
    for _ in range(kills):
        saved = int(checkpoints(run)[-1].name.removeprefix("step-")) if checkpoints(run) else 0
        assert saved >= at_most, "never back"
        at_most, more = saved, draw.randint(1, 5)
        fault = at_row(run, saved + more, draw.choice([KILL_BEFORE, KILL_AFTER]), saved)
        ended = server.train(run, *flags, "--resume", fault=fault)
        assert ended.code == -signal.SIGKILL, ended.text
    assert 0 < at_most < 3 * kills, "kills came before, between and after saves"
    ended = server.train(run, *flags, "--resume")
    assert ended.code == 0, ended.text
    assert_same_end(run, tmp_path / "whole")
    assert rows(run, "eval.jsonl") == rows(tmp_path / "whole", "eval.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("action", [KILL_BEFORE, KILL_AFTER], ids=["before the call", "after it or in the midst"])
def test_a_kill_at_any_call_of_a_save_leaves_the_old_or_the_new(server, half_run, whole_run, tmp_path, action):
    known = {path.name: digests(path) for path in [*checkpoints(half_run), *checkpoints(whole_run)]}
    shutil.copytree(half_run, tmp_path / "run")
    counted = resume(server, tmp_path / "run", fault=[str(tmp_path / "run/checkpoints"), 0, COUNT])
    assert counted.code == 0, counted.text
    struck = []
    for nth in range(1, counted.calls + 1):
        run = tmp_path / f"run-{nth}"
        shutil.copytree(half_run, run)
        ended = resume(server, run, fault=[str(run / "checkpoints"), nth, action])
        assert ended.code == -signal.SIGKILL, ended.text
        struck += [line.removeprefix("struck at ") for line in ended.text.splitlines() if line.startswith("struck")]
        left = checkpoints(run)
        assert left[-1].name in ("step-00000004", "step-00000006")
        assert all(is_whole(path) and digests(path) == known[path.name] for path in left), (nth, ended.text)
        if nth % 7 == 0 or nth > counted.calls - 4:
            again = resume(server, run)
            assert again.code == 0, again.text
            assert_same_end(run, whole_run)
            assert not list((run / "checkpoints").glob(".*")), "debris is cleared away"
        shutil.rmtree(run)
    assert len(struck) == counted.calls > 40
    assert {"write", "fsync", "rename", "mkdir", "unlinkat"} <= set(struck), "unlinkat: pruning"
    assert counted.trace.count("rename") == 2, "the new one in, the old one out"
    before = counted.trace[: counted.trace.index("rename")]  # threads write: no two runs have the same order
    assert before.count("fsync") == 7, "five files, the manifest and their directory: a kill does not show what is lost"
    assert counted.trace.count("fsync") == 9, "after each rename the parent"


EVERY = 9
"""Of the calls of a whole run, every so many-th is tried here; all of them were, once, with 1."""


@pytest.mark.slow
def test_a_kill_at_any_call_of_a_whole_run_can_be_resumed(server, whole_run, tmp_path):
    counted = server.train(tmp_path / "run", *STEPS, "--resume", fault=[str(tmp_path / "run"), 0, COUNT])
    assert counted.code == 0, counted.text
    assert_same_end(tmp_path / "run", whole_run)
    draw = random.Random(0)
    for nth in range(1, counted.calls + 1, EVERY):
        run = tmp_path / f"run-{nth}"
        ended = server.train(run, *STEPS, "--resume", fault=[str(run), nth, draw.choice([KILL_BEFORE, KILL_AFTER])])
        assert ended.code == -signal.SIGKILL, ended.text
        again = resume(server, run)
        assert again.code == 0, (nth, ended.text, again.text)
        assert_same_end(run, whole_run)
        shutil.rmtree(run)


@pytest.mark.parametrize("nth", [1, *(pytest.param(nth, marks=pytest.mark.slow) for nth in (10, 30)), -1])
def test_a_full_disk_stops_the_run_and_the_old_checkpoint_stays(server, run, whole_run, tmp_path, nth):
    if nth < 0:  # the last write of all, the manifest's
        shutil.copytree(run, tmp_path / "counted")
        nth = (
            resume(server, tmp_path / "counted", fault=[str(tmp_path / "counted/checkpoints/.saving"), 0, COUNT]).calls
            - 2
        )
    ended = resume(server, run, fault=[str(run / "checkpoints/.saving"), nth, NO_SPACE])
    assert ended.code == 3, ended.text
    assert "the run can no longer be written (No space left on device)" in ended.text
    assert "step-00000004 is whole: --resume goes on from it" in ended.text
    assert "Traceback" not in ended.text
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000002", "step-00000004"]
    assert resume(server, run).code == 0
    assert_same_end(run, whole_run)


def test_a_full_disk_between_saves_is_said_too(server, run, whole_run):
    ended = resume(server, run, fault=at_row(run, 5, NO_SPACE, saved=4))
    assert (ended.code, "Free space on the disk" in ended.text) == (3, True), ended.text
    assert resume(server, run).code == 0
    assert_same_end(run, whole_run)


@pytest.mark.parametrize(
    "file",
    [
        ".penstock-",
        "metrics.jsonl",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("recipe.yaml", "ranks.json", "facts/environment.json")
        ),
    ],
)
def test_a_disk_that_is_full_when_a_run_goes_on_costs_nothing(server, run, whole_run, file):
    nth = 2 if file == ".penstock-" else 1  # the first tries whether the directory can be written at all
    ended = resume(server, run, fault=[str(run / file), nth, NO_SPACE])
    assert ended.code == 3, ended.text
    assert "the run can no longer be written (No space left on device)" in ended.text
    assert "step-00000004 is whole: --resume goes on from it" in ended.text
    assert run_recipe(run).save_every == 2, "it is whole"
    assert not list(run.glob(".penstock-*"))
    assert resume(server, run).code == 0
    assert_same_end(run, whole_run)


def test_a_disk_that_is_full_when_a_run_begins_leaves_nothing(server, tmp_path):
    ended = server.train(tmp_path / "run", *STEPS, fault=[str(tmp_path / "run/.penstock-"), 1, NO_SPACE])
    assert (ended.code, "Free space on the disk. No checkpoint was saved before." in ended.text) == (3, True), (
        ended.text
    )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_when_all_is_written_costs_the_summary_only(server, tmp_path, whole_run):
    ended = server.train(tmp_path / "run", *STEPS, fault=[str(tmp_path / "run/facts/summary.json"), 1, NO_SPACE])
    assert (ended.code, "WARNING: the report will lack some facts" in ended.text) == (0, True), ended.text
    assert_same_end(tmp_path / "run", whole_run)


@pytest.mark.parametrize("file_bytes", [10_000, 200_000])
def test_a_limit_on_file_size_is_not_a_full_disk(server, run, whole_run, file_bytes):
    ended = resume(server, run, file_bytes=file_bytes)
    assert ended.code == 3, ended.text
    found = {10_000: "a file may have 10,000 bytes here", 200_000: "the run can no longer be written (File too large)"}
    assert found[file_bytes] in ended.text
    assert "`ulimit -f` shows the limit" in ended.text
    assert "Free space" not in ended.text
    assert resume(server, run).code == 0
    assert_same_end(run, whole_run)


AT_STEP = """
import os, signal
from penstock.engine.native import NativeEngine
accumulate, steps = NativeEngine.accumulate, []
def stopped(self, *args, **kwargs):
    accumulate(self, *args, **kwargs)
    steps.append(1)
    if len(steps) == 3:
        os.kill(os.getpid(), signal.{name})
NativeEngine.accumulate = stopped
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_in_mid_step_finishes_it_and_saves(server, tmp_path, whole_run, name):
    run = tmp_path / "run"
    ended = server.train(run, "--max-steps", "6", "--keep", "2", code=AT_STEP.format(name=name))
    assert ended.code == 128 + getattr(signal, name), ended.text
    assert f"{name}: the run stops after this step and is saved" in ended.text, "at once: a step may take minutes"
    assert f"step 3 of 6: stopped by {name}" in ended.text
    assert "--resume" in ended.text
    assert "Traceback" not in ended.text
    assert [path.name for path in checkpoints(run)] == ["step-00000003"]
    assert not (run / "model").exists()
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert server.train(run, "--max-steps", "6", "--keep", "2", "--resume").code == 0
    assert_same_end(run, whole_run)


WHILE_RANKS_AGREE = """
import os, signal
from penstock.engine.ranks import World
largest, calls = World.largest, []
def interrupted(self, number):
    agreed = largest(self, number)
    calls.append(number)
    if len(calls) == 3:  # of the data, and after two steps
        os.kill(os.getpid(), signal.SIGTERM)
    return agreed
World.largest = interrupted
"""


def test_a_signal_that_comes_while_ranks_agree_is_not_lost(server, tmp_path):
    """They agreed on none; the next step sees it."""
    ended = server.train(tmp_path / "run", "--max-steps", "6", "--keep", "2", code=WHILE_RANKS_AGREE)
    assert ended.code == 143, ended.text
    assert "step 3 of 6: stopped by SIGTERM" in ended.text
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000003"]


def test_without_checkpoints_a_signal_leaves_the_model(server, tmp_path):
    ended = server.train(tmp_path / "run", "--max-steps", "6", "--keep", "0", code=AT_STEP.format(name="SIGTERM"))
    assert ended.code == 143, ended.text
    assert "the model as it was then is in" in ended.text
    assert (tmp_path / "run/model/model.safetensors").exists()
    assert not (tmp_path / "run/checkpoints").exists()
    again = server.train(tmp_path / "run", "--max-steps", "6", "--keep", "0", "--resume")
    assert (again.code, "left no checkpoint" in again.text) == (5, True), again.text


def test_a_signal_during_a_save_ends_the_run_after_it(server, tmp_path, whole_run):
    run = tmp_path / "run"
    ended = server.train(run, *STEPS, fault=[str(run / "checkpoints"), 20, TERMINATE])
    assert ended.code == 143, ended.text
    assert "step 2 of 6: stopped by SIGTERM" in ended.text
    assert [path.name for path in checkpoints(run)] == ["step-00000002"]
    assert is_whole(checkpoints(run)[0])
    assert resume(server, run).code == 0
    assert_same_end(run, whole_run)


def test_a_second_signal_ends_the_run_at_once(server, run, whole_run):
    ended = resume(server, run, fault=[str(run / "checkpoints"), 10, TERMINATE_TWICE])
    assert ended.code == 143, ended.text
    assert "stopped by" not in ended.text
    assert "ended at once by SIGTERM; nothing was saved since" in ended.text
    assert [path.name for path in checkpoints(run)] == ["step-00000002", "step-00000004"]
    assert resume(server, run).code == 0
    assert_same_end(run, whole_run)


NAN_GRADIENT = """
from penstock.engine.native import NativeEngine
init = NativeEngine.__init__
def poisoned(self, model, *args):
    init(self, model, *args)
    backwards = []
    def hook(gradient):
        backwards.append(1)
        return gradient * float("nan") if len(backwards) == 3 else gradient
    model.model.layers[0].mlp.up_proj.weight.register_hook(hook)
NativeEngine.__init__ = poisoned
"""


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported(server, tmp_path):
    flags = ["--max-steps", "4", "--save-every", "1", "--keep", "9"]
    ended = server.train(tmp_path / "run", *flags, code=NAN_GRADIENT)
    assert ended.code == 0, ended.text
    assert "skipped: gradient not finite" in ended.text
    assert [row["skipped"] for row in rows(tmp_path / "run")] == [False, False, True, False]
    one, two, three, four = map(digests, checkpoints(tmp_path / "run"))
    assert one != two == three != four, "weights, state and step count"
    resumed = server.train(tmp_path / "other", *flags, "--resume", tmp_path / "run/checkpoints/step-00000003")
    assert resumed.code == 0, resumed.text
    assert rows(tmp_path / "other") == rows(tmp_path / "run"), "null stays null"
    assert digests(checkpoints(tmp_path / "other")[-1]) == four


DEAD_THREAD = """
import threading
from penstock.update.host_threads import HostThreads
begin, calls = HostThreads.begin, []
def dies(*args):
    assert threading.current_thread() is not threading.main_thread()
    calls.append(1)
    if len(calls) > 5 * 38:  # the demo has 38 parameters, each a chunk
        raise MemoryError("a thread is gone")
    return begin(*args)
HostThreads.begin = dies
"""


def test_a_worker_thread_that_dies_ends_the_run_with_its_error(server, tmp_path):
    start = time.monotonic()
    flags = ["--homes", "host", "--max-steps", "1000", "--save-every", "2"]
    ended = server.train(tmp_path / "run", *flags, code=DEAD_THREAD)
    assert ended.code == 3, ended.text
    assert "the host is out of memory: a thread is gone" in ended.text
    assert time.monotonic() - start < 20
    assert checkpoints(tmp_path / "run")
    assert all(is_whole(path) for path in checkpoints(tmp_path / "run"))


SECRETS = {
    "HF_TOKEN": "hf_sEcReTsEcReT", "WANDB_API_KEY": "wandb-0123456789", "AWS_SECRET_ACCESS_KEY": "aws/+secret",
}  # fmt: skip


def test_secrets_of_the_environment_are_in_no_file_and_no_line(server, tmp_path):
    ended = server.train(tmp_path / "run", *STEPS, "--trust-remote-code", env=SECRETS)
    assert ended.code == 0, ended.text
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in SECRETS.values():
        assert secret not in ended.text
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_two_runs_in_one_directory(server, tmp_path):
    run = tmp_path / "run"
    first = server.start(*RUN, "--output-dir", run, "--epochs", "5000", "--max-steps", "5000")
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    holder = json.loads((run / "lock").read_text())
    assert holder["pid"] == first
    for flags in ([], ["--resume"], ["--overwrite"]):
        second = server.train(run, *flags)
        assert second.code == 2, second.text
        assert f"a run is going on there: process {first} on {holder['host']}" in second.text
    os.kill(first, signal.SIGKILL)
    assert server.wait(first).code == -signal.SIGKILL
    assert (run / "lock").exists(), "a stale lock"
    assert server.train(run, *STEPS, "--overwrite").code == 0
    assert not (run / "lock").exists()


def test_a_run_that_cannot_begin_leaves_nothing(server, tmp_path):
    ended = server.train(tmp_path / "deep/er/run", "--data", tmp_path / "none.jsonl")
    assert ended.code == 2, ended.text
    assert list(tmp_path.iterdir()) == []


def test_a_linked_output_directory(server, tmp_path, whole_run):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk")
    assert server.train(link, *STEPS, fault=at_row(tmp_path / "disk", 5, KILL_AFTER)).code < 0
    assert resume(server, link).code == 0
    assert link.is_symlink()
    assert_same_end(Path(tmp_path / "disk"), whole_run)
