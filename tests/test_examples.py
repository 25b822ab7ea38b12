"""The examples run as they are, and do what they say."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {
    "llama-8b_1gpu": "",
    "qwen3-14b_1gpu": ",head_dim=8",
    "phi-4_1gpu": ",pad_token_id=0",
    "gpt-oss-20b_1gpu": ",head_dim=8,num_local_experts=4,num_experts_per_tok=2",
    "seed-oss-36b_2gpu": ",head_dim=8",
    "qwen3-30b-a3b_2gpu": ",head_dim=8,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16",
    "llama-70b_4gpu": "",
}
"""The launch scripts, and what beside TINY makes their models small."""
TINY = "num_hidden_layers=1,hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2"
DEMO = Path(penstock.__file__).parent / "demo" / "model"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ClippingAdamW(torch.optim.AdamW):
    """torch's own, with the clipping that the Trainer of the example leaves to the optimizer."""

    def __init__(self, model, lr, max_grad_norm, micro_batches=1):
        super().__init__(model.parameters(), lr=lr, weight_decay=0.01)
        self.max_grad_norm = max_grad_norm

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.max_grad_norm)
        return super().step(closure)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("trainer", 8), ("sft_trainer", 12)])
def test_a_trainer_with_our_optimizer_learns_as_with_torchs(name, steps, tmp_path, monkeypatch):
    example = load(name)
    ours = example.main(str(DEMO), str(tmp_path / "ours"))
    monkeypatch.setattr(penstock, "OffloadAdamW", ClippingAdamW)
    theirs = example.main(str(DEMO), str(tmp_path / "theirs"))
    assert len(ours) == steps
    assert min(ours) < 0.5 * ours[0]
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.fixture
def scripts(tmp_path):
    """The launch scripts in a directory of their own, since they write beside themselves."""
    for path in EXAMPLES.glob("*.sh"):
        shutil.copy(path, tmp_path)
    return tmp_path


def launch(scripts, name, *words, ranks="1", engine="penstock", extra=()):
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    source = str(Path(penstock.__file__).parents[1])
    # Operations that DeepSpeed builds are built with the ninja beside the interpreter.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shape = f"{TINY},vocab_size=5000{SCRIPTS[name]}"
    args = ["--init", "random", "--shape", shape, "--tokenizer", "demo", "--data", "demo", "--data-percent", "10"]
    args += ["--max-length", "64", "--max-steps", "2", "--dtype", "fp32", "--device", "cpu", *extra]
    environment |= {"EXTRA_ARGS": " ".join(args), "PYTHON": sys.executable, "GPUS": ranks, "ENGINE": engine}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "PATH": path}
    command = ["bash", str(scripts / f"finetune_{name}.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_there_is_a_launch_script_for_every_large_preset():
    found = {path.stem.removeprefix("finetune_") for path in EXAMPLES.glob("finetune_*.sh")}
    assert found == set(SCRIPTS)
    for path in EXAMPLES.glob("finetune_*.sh"):
        assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.stem)
def test_launch_scripts_are_bash(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_a_launch_script_without_a_mode_says_what_it_wants(scripts):
    result = launch(scripts, "qwen3-14b_1gpu")
    assert result.returncode == 2
    assert "usage: bash finetune_qwen3-14b_1gpu.sh superoffload|zerooffload [BATCH_SIZE]" in result.stderr


@pytest.mark.slow
def test_a_dry_run_writes_nothing_but_its_log(scripts):
    result = launch(scripts, "qwen3-14b_1gpu", "superoffload", "8", extra=["--dry-run"])
    assert result.returncode == 0, result.stdout
    assert "batch_size: 8" in result.stdout
    assert "mode: superoffload" in result.stdout
    assert (scripts / "qwen3-14b_superoffload_output.log").read_text() == result.stdout
    assert not (scripts / "qwen3-14b_superoffload_output").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_launch_script_trains_to_the_end(scripts, name):
    result = launch(scripts, name, "superoffload", "2")
    assert result.returncode == 0, result.stdout
    run = scripts / f"{name.rsplit('_', 1)[0]}_superoffload_output"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler, which DeepSpeed's CPUAdam needs")
def test_a_launch_script_with_deepspeed_on_two_ranks(scripts):
    result = launch(scripts, "seed-oss-36b_2gpu", "zerooffload", "2", ranks="2", engine="deepspeed")
    assert result.returncode == 0, result.stdout
    run = scripts / "seed-oss-36b_zerooffload_output"
    config = json.loads((run / "deepspeed.json").read_text())
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "model" / "config.json").exists()
