"""Peers as processes: whatever a child does comes back as a result, and nothing of it stays behind."""

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from penstock.bench.peer_process import deepspeed_config
from penstock.bench.peers import Peer, PeerResult, judge, peers_of, row_values, run_peer, run_process
from penstock.recipe.presets import PRESETS

RECIPE = dataclasses.replace(PRESETS["demo"], init="random", batch_size=2, max_length=32, device="cpu")
OFFLOADED = Peer("deepspeed", "zerooffload", 1.0, offload_params=True)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def run(tmp_path, code, timeout_s=30.0):
    """A fake peer: any Python, through the runner that real ones go through."""
    ended = run_process([sys.executable, "-c", code], timeout_s=timeout_s, log=tmp_path / "peer.log")
    return ended, judge(ended, "fake", timeout_s)


def gone(pid):
    """Dead, if perhaps not yet buried by whoever inherited it; the kernel may take a moment to deliver the signal."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_result_comes_back_among_other_output(tmp_path):
    code = """
print("{not json"); print('{"other": 1}')
print('{"peer": "fake", "steps_done": 1}')
print('{"peer": "fake", "step_s": 1.5, "gpu_bytes": 7, "driver_bytes": 9, "versions": "fake 1"}')
"""
    _, result = run(tmp_path, code)
    assert (result.step_s, result.gpu_bytes, result.versions, result.error) == (1.5, 7, "fake 1", "")
    assert result.driver_bytes == 9


def test_one_that_hangs_is_killed_with_its_children(tmp_path):
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    start = time.monotonic()
    ended, result = run(tmp_path, code, timeout_s=2.0)
    assert time.monotonic() - start < 20
    assert ended.code is None
    assert result.error == "no step within 2 s"
    pid = int((tmp_path / "peer.log").read_text().split()[0])
    assert gone(pid)


def test_children_of_one_that_ends_are_killed_too(tmp_path):
    code = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
"""
    run(tmp_path, code)
    pid = int((tmp_path / "peer.log").read_text().split()[0])
    assert gone(pid)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed (host memory?)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ("raise SystemExit('no such luck')", "exit 1: no such luck"),
        ("""print('{"peer": "fake", "missing": "hjson"}')""", "not installed: pip install hjson (fake needs it)"),
        ("""print('{"peer": "fake", "error": "out of GPU memory"}')""", "out of GPU memory"),
    ],
)
def test_every_end_has_its_words(tmp_path, code, error):
    _, result = run(tmp_path, code)
    assert (result.step_s, result.error) == (None, error)


def test_a_slow_one_says_how_far_it_came(tmp_path):
    code = """
import time
print('{"peer": "fake", "steps_done": 3}', flush=True)
time.sleep(600)
"""
    assert run(tmp_path, code, timeout_s=2.0)[1].error == "only 3 steps within 2 s"


def test_memory_is_the_peak_of_the_whole_tree(tmp_path):
    code = """
import subprocess, sys
hold = "import time; x = bytearray(100_000_000); x[::4096] = b'x' * len(x[::4096]); time.sleep(2)"
child = subprocess.Popen([sys.executable, "-c", hold])
exec(hold)
child.wait()
"""
    ended, _ = run(tmp_path, code)
    assert 200e6 < ended.host_bytes < 400e6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(tmp_path, number):
    """Ctrl-C and a job's time limit reach only us, since a peer has a session of its own."""
    log = tmp_path / "peer.log"
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    outer = f"""
from pathlib import Path
from penstock.bench.peers import run_process
run_process([{sys.executable!r}, "-c", {code!r}], timeout_s=600, log=Path({str(log)!r}))
"""
    parent = subprocess.Popen([sys.executable, "-c", outer], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(log.read_text())
    os.kill(parent.pid, number)
    assert parent.wait(30) != 0
    assert gone(pid)


@pytest.mark.parametrize("name", ["deepspeed", "torchao", "flashoptim"])
def test_a_peer_that_is_not_installed_is_told_how(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    result = run_peer(Peer(name), RECIPE, steps=1, timeout_s=60, log=tmp_path / "peer.log")
    assert result.error == f"not installed: pip install {name}"


# A package named like a peer, with its API over plain AdamW, to run the real child on a CPU.
STAND_IN = """
import torch
class FlashAdamW(torch.optim.AdamW):
    def __init__(self, params, **settings):
        {body}
        super().__init__(params, **settings)
"""


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("pass", ""),
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "out of GPU memory"),
        ("import hjson_", "pip install hjson_ (flashoptim needs it)"),
    ],
    ids=["fine", "memory", "dependency"],
)
@pytest.mark.slow
def test_the_child_itself(tmp_path, monkeypatch, body, error):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "flashoptim.py").write_text(STAND_IN.format(body=body))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    log = tmp_path / "peer.log"
    shape = "num_hidden_layers=1,hidden_size=32,intermediate_size=32,num_attention_heads=2,num_key_value_heads=1"
    recipe = dataclasses.replace(RECIPE, shape=shape, micro_batch_size=1, max_length=16)
    result = run_peer(Peer("flashoptim"), recipe, steps=1, timeout_s=120, log=log)
    assert error in result.error
    assert bool(result.error) == bool(error)
    assert (result.step_s is None) == bool(error)
    assert log.exists() == bool(error), "what it printed is kept where it failed"
    assert not list(tmp_path.glob("*.json"))
    if not error:
        assert f"torch {torch.__version__.split('+')[0]}" in result.versions
        assert result.host_bytes > 50e6


def test_deepspeed_runs_in_every_mode_and_ratio_the_others_once():
    found = peers_of(["deepspeed", "torchao"], ["superoffload", "zerooffload"], [0.3, 0.8])
    assert [peer.label for peer in found] == [
        "deepspeed superoffload ratio 0.3",
        "deepspeed superoffload ratio 0.8",
        "deepspeed zerooffload ratio 0.3",
        "deepspeed zerooffload ratio 0.8",
        "torchao",
    ]


def test_deepspeed_gets_the_reference_configuration_with_this_recipe():
    recipe = dataclasses.replace(RECIPE, batch_size=4, micro_batch_size=2, max_grad_norm=0.5)
    config = deepspeed_config(recipe, Peer("deepspeed", "superoffload", 0.3))
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (4, 2)
    assert config["gradient_clipping"] == 0.5
    offload = config["zero_optimization"]["offload_optimizer"]
    assert (offload["ratio"], offload["super_offload"], offload["cpuadam_cores_perc"]) == (0.3, True, 0.9)
    plain = deepspeed_config(recipe, Peer("deepspeed", "zerooffload", 1.0))["zero_optimization"]["offload_optimizer"]
    assert "super_offload" not in plain


def test_with_parameters_on_the_cpu_deepspeed_has_one_setting():
    found = peers_of(["deepspeed", "torchao"], ["superoffload", "zerooffload"], [0.3, 0.8], offload_params=True)
    assert found == [OFFLOADED, Peer("torchao")]
    assert found[0].label == "deepspeed zerooffload parameters on the CPU"


def test_a_row_says_where_the_parameters_lie_and_that_nothing_is_compiled():
    recipe = dataclasses.replace(RECIPE, recompute="full", order="layers", inputs="parked", compile=True)
    found = row_values(OFFLOADED, recipe, PeerResult(step_s=1.0, driver_bytes=5))
    assert (found["weights"], found["setting"], found["driver_bytes"]) == ("streamed", "parameters on the CPU", 5)
    assert (found["order"], found["inputs"], found["compiled"]) == ("rows", "", False)
    assert row_values(Peer("deepspeed", "zerooffload", 0.3), recipe, PeerResult())["weights"] == "resident"


def python(code, *words):
    """DeepSpeed patches torch for the rest of its process, so it never runs inside pytest's."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@needs_deepspeed
@pytest.mark.slow
def test_deepspeed_accepts_both_offloads():
    config = deepspeed_config(dataclasses.replace(RECIPE, batch_size=4, micro_batch_size=2), OFFLOADED)
    code = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
zero = DeepSpeedConfig(json.loads(sys.argv[1])).zero_config
keys = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
keys += ("overlap_comm", "contiguous_gradients")
default = type(zero)(stage=3)
print(json.dumps([
    zero.stage, zero.offload_param.device, zero.offload_param.pin_memory, zero.offload_optimizer.device,
    zero.offload_optimizer.pin_memory, zero.offload_optimizer.ratio, zero.offload_optimizer.super_offload,
    all(getattr(zero, key) == getattr(default, key) for key in keys)
]))
"""
    assert json.loads(python(code, json.dumps(config))) == [3, "cpu", True, "cpu", True, 1.0, False, True]


@needs_deepspeed
@pytest.mark.slow
def test_a_loss_in_tiles_has_the_gradients_of_hugging_faces():
    code = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from penstock.bench import peer_process
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 50}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
ids = torch.randint(50, (2, 9))
loss = model(input_ids=ids, labels=ids).loss / 3
loss.backward()
gradients = [p.grad for p in model.parameters()]
model.zero_grad()
peer_process.TILE_BYTES = 4 * 50 * 5  # 18 tokens in tiles of 5, the last one of 3
tiled = peer_process._TiledLoss(model, 3)(ids)
tiled.backward()
torch.testing.assert_close(tiled, loss)
for p, gradient in zip(model.parameters(), gradients, strict=True):
    torch.testing.assert_close(p.grad, gradient)
print("same")
"""
    assert python(code) == "same"


@needs_deepspeed
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler, which DeepSpeed's CPUAdam needs")
@pytest.mark.slow
def test_deepspeed_makes_steps_with_parameters_on_the_cpu(tmp_path, monkeypatch):
    """Of the whole benchmark, on the CPU: its operations are built once, where the engine's tests keep them too."""
    from penstock.bench.run import Asked, bench

    kind = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    built = Path.home() / ".cache" / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}_{kind}"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR", str(built)))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # of ninja
    shape = "num_hidden_layers=2,hidden_size=32,intermediate_size=48,vocab_size=300,num_attention_heads=4"
    recipe = dataclasses.replace(
        PRESETS["llama-8b"], init="random", shape=shape + ",num_key_value_heads=2,head_dim=16", dtype="fp32",
        device="cpu", batch_size=4, micro_batch_size=2, max_length=16, weights="streamed", recompute="auto",
    )  # fmt: skip
    asked = Asked(steps=2, updates=("after-norm",), against=("deepspeed",), timeout_s=1200)
    *_, ours, peer = bench(recipe, asked, to=str(tmp_path), say=lambda _: None).rows
    assert (ours.system, peer.system, peer.error) == ("penstock", "deepspeed", "")
    assert peer.step_s > 0
    assert (peer.mode, peer.weights, peer.setting) == ("zerooffload", "streamed", "parameters on the CPU")
    assert (peer.batch, peer.micro_batch, peer.recompute, peer.clip) == (4, 2, "full", True)
    assert "deepspeed" in peer.versions
