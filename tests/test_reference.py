"""What the SuperOffload example of DeepSpeedExamples documents, done here: its JSON, its launch lines, its outputs.

`reference/superoffload.json` is the configuration as the example's documents print it, `reference/zerooffload.json` the
same after the documented way back. SuperOffload itself needs CUDA: on a CPU its JSON is checked up to the refusal.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock
from penstock.command.cli import main
from penstock.engine.deepspeed_config import LEAF_MODULES, deepspeed_json, settled
from penstock.engine.deepspeed_start import check_deepspeed
from penstock.engine.ranks import World
from penstock.recipe.presets import PRESETS

EXAMPLES = Path(__file__).parents[1] / "examples"
JSON = Path(__file__).parent / "reference"
SCRIPTS = {
    "llama-8b_1gpu": {"ratio": 0.8, "shape": ""},
    "qwen3-14b_1gpu": {"shape": ",head_dim=8"},
    "phi-4_1gpu": {"shape": ",pad_token_id=0"},
    "gpt-oss-20b_1gpu": {"bucket": 8e8, "length": 8192, "leaf": "GptOssExperts",
                         "shape": ",head_dim=8,num_local_experts=4,num_experts_per_tok=2"},
    "seed-oss-36b_2gpu": {"shape": ",head_dim=8"},
    "qwen3-30b-a3b_2gpu": {"leaf": "Qwen3MoeSparseMoeBlock",
                           "shape": ",head_dim=8,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16"},
    "llama-70b_4gpu": {"shape": ""},
}  # fmt: skip
"""The example's seven launch scripts, in what they differ; and what makes their models small here."""
TINY = "num_hidden_layers=1,hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2"
INSTALLED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not INSTALLED, reason="deepspeed is not installed")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="DeepSpeed's CPUAdam needs a C++ compiler")


def preset_of(script):
    name, _, gpus = script.rpartition("_")
    return PRESETS[name], int(gpus.removesuffix("gpu"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_generated_configuration_is_that_of_the_script(script):
    recipe, gpus = preset_of(script)
    facts = SCRIPTS[script]
    recipe = replace(recipe, engine="deepspeed", dtype="bf16", max_grad_norm=0.0)
    found = deepspeed_json(recipe, World(0, gpus, 0, gpus))
    expected = json.loads((JSON / "superoffload.json").read_text())
    zero = expected["zero_optimization"]
    zero["reduce_bucket_size"] = zero["sub_group_size"] = facts.get("bucket", 4e8)
    zero["offload_optimizer"]["ratio"] = facts.get("ratio", 0.9)
    ours = {"train_micro_batch_size_per_gpu": 4 // gpus, "gradient_clipping": 0.0, "wall_clock_breakdown": False}
    assert found == {**expected, **ours}
    assert recipe.max_length == facts.get("length", 4096)
    assert facts.get("leaf", LEAF_MODULES[0]) in LEAF_MODULES


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
@pytest.mark.parametrize("mode", ["superoffload", "zerooffload"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_its_json_is_taken_as_it_is_with_default_flags(script, mode, dtype):
    recipe, gpus = preset_of(script)
    path = JSON / f"{mode}.json"
    recipe = replace(recipe, engine="deepspeed", dtype=dtype, deepspeed_config=str(path))
    world = World(0, gpus, 0, gpus)
    decided = settled(recipe)
    assert (decided.mode, decided.dtype) == (mode, "bf16")
    found = deepspeed_json(recipe, world)
    ours = {"train_micro_batch_size_per_gpu": 4 // gpus, "gradient_clipping": 1.0}
    assert found == {**json.loads(path.read_text()), **ours}, "what the file says, and nothing but it"
    if INSTALLED:
        warning = check_deepspeed(decided, torch.device("cuda"), world, resume=False)
        assert ("only the final model is written" in warning) == (mode == "superoffload")


@pytest.fixture
def scripts(tmp_path):
    """The launch scripts in a directory of their own, since they write beside themselves."""
    for path in EXAMPLES.glob("*.sh"):
        shutil.copy(path, tmp_path)
    return tmp_path


def tiny(script, *extra):
    shape = f"{TINY},vocab_size=5000{SCRIPTS[script]['shape']}"
    args = ["--init", "random", "--shape", shape, "--tokenizer", "demo", "--data", "demo", "--data-percent", "10"]
    return [*args, "--max-length", "64", "--max-steps", "2", "--device", "cpu", *extra]


def start(scripts, words, extra, **environment):
    """`bash WORDS` in the scripts' directory, with more flags, in a session of its own."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    # Operations that DeepSpeed builds are built with the ninja beside the interpreter.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"EXTRA_ARGS": " ".join(extra), "PYTHON": sys.executable, "PATH": path, "OMP_NUM_THREADS": "1"}
    own |= {"PYTHONPATH": str(Path(penstock.__file__).parents[1]), **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["bash", *words]
    return subprocess.Popen(command, cwd=scripts, env={**inherited, **own}, start_new_session=True, **pipes)


def bash(scripts, *words, extra=(), code=0, **environment):
    process = start(scripts, words, extra, **environment)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == code, printed
    return printed


@pytest.fixture
def command_of(scripts):
    """`command_of(*words)`: the words that a launch script gives to `penstock`, and the file that it logs to."""
    program, given = scripts / "python", scripts / "given"
    program.write_text(f"""#!/usr/bin/env bash
if [[ $1 == -c ]]; then exec {sys.executable} "$@"; fi
printf '%s\\n' "$@" > {given}
""")
    program.chmod(0o755)

    def find(*words, extra=(), **environment):
        before = set(scripts.glob("*.log"))
        bash(scripts, *words, extra=extra, PYTHON=str(program), **environment)
        (log,) = set(scripts.glob("*.log")) - before
        module, name, *rest = given.read_text().splitlines()
        assert (module, name) == ("-m", "penstock")
        return rest, log

    return find


@pytest.mark.parametrize("mode", ["superoffload", "zerooffload"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_launch_line_makes_a_dry_run(scripts, script, mode, command_of, capsys):
    """With the script's own number of GPUs."""
    words, log = command_of(f"finetune_{script}.sh", mode, "8", extra=tiny(script, "--dry-run"))
    name, gpus = script.rsplit("_", 1)
    assert words[words.index("--gpus") + 1] == gpus.removesuffix("gpu")
    assert log == scripts / f"{name}_{mode}_output.log"
    assert main(words) == 0
    printed = capsys.readouterr().out
    for line in (f"name: {name}-{mode}", f"mode: {mode}", "batch_size: 8", f"output_dir: {log.with_suffix('')}"):
        assert f"{line}\n" in printed
    assert "Would train" in printed
    assert not log.with_suffix("").exists()


@needs_deepspeed
@pytest.mark.parametrize("name", ["superoffload", "zerooffload"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_launch_line_makes_a_dry_run_with_deepspeed_and_its_json(script, name, command_of, capsys):
    """On a CPU SuperOffload gets as far as the refusal, whatever mode the script was started in."""
    extra = tiny(script, "--dry-run", "--deepspeed-config", str(JSON / f"{name}.json"))
    words, _ = command_of(f"finetune_{script}.sh", "superoffload", extra=extra, ENGINE="deepspeed")
    code = main(words)
    printed = capsys.readouterr()
    if name == "superoffload":
        assert code == 2
        assert "mode = 'superoffload': DeepSpeed runs it on CUDA GPUs only" in printed.err
    else:
        assert code == 0, printed.err
        ratio = ", offload_ratio = 0.9" if "ratio" in SCRIPTS[script] else ""
        assert f"{JSON / 'zerooffload.json'} decides: dtype = bf16, mode = zerooffload{ratio}\n" in printed.out


def test_a_script_in_mode_zerooffload_keeps_all_state_on_the_host(command_of):
    """As the example's own: it gives a ratio to SuperOffload only."""
    words, _ = command_of("finetune_llama-8b_1gpu.sh", "zerooffload", ENGINE="deepspeed")
    assert words[words.index("--offload-ratio") + 1] == "1"
    words, _ = command_of("finetune_llama-8b_1gpu.sh", "superoffload", ENGINE="deepspeed")
    assert "--offload-ratio" not in words, "the preset's"


def test_any_model_and_any_recipe_can_be_launched_with_a_clean_name(scripts, command_of, capsys, monkeypatch):
    """The example says: copy a script, and change the name of the model and of the outputs."""
    model = scripts / "models" / "My-Model-8B"
    shutil.copytree(Path(penstock.__file__).parent / "demo" / "model", model)
    small = ["--data", "demo", "--max-length", "64", "--max-steps", "1", "--device", "cpu", "--dry-run"]
    words, log = command_of("finetune.sh", str(model), "1", "superoffload", "2", extra=small)
    assert log.name == "My-Model-8B_superoffload_output.log"
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert f"  name: My-Model-8B-superoffload\n  output_dir: {log.with_suffix('')}\n" in printed
    for line in (f"model: {model}", "lr: 1.0e-05", "batch_size: 2", "epochs: 1.0"):
        assert f"{line}\n" in printed
    assert "--offload-ratio" not in words, "DeepSpeed's"
    words, _ = command_of("finetune.sh", "Qwen/Qwen3-4B", "1", "superoffload", ENGINE="deepspeed")
    assert words[words.index("--offload-ratio") + 1] == "0.9"
    words, log = command_of("finetune.sh", "Qwen/Qwen3-8B", "1", "superoffload")
    assert (words[words.index("--model") + 1], log.name) == ("Qwen/Qwen3-8B", "Qwen3-8B_superoffload_output.log")

    (scripts / "mine.yaml").write_text(f"model: {model}\ndata: demo\nlr: 3.0e-5\n")
    words, log = command_of("finetune.sh", "mine.yaml", "1", "zerooffload", extra=small)
    monkeypatch.chdir(scripts)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert f"  name: mine-zerooffload\n  output_dir: {scripts / 'mine_zerooffload_output'}\n" in printed
    assert "lr: 3.0e-05\n" in printed


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_launch_line_trains_to_the_end(script, command_of):
    words, log = command_of(f"finetune_{script}.sh", "superoffload", extra=tiny(script), GPUS="1")
    assert main(words) == 0
    run = log.with_suffix("")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "model" / "config.json").exists()


@pytest.mark.slow
@needs_deepspeed
@needs_compiler
def test_the_documented_way_back_runs_on_two_ranks(scripts):
    """From the launch line of the other mode: the file decides."""
    extra = tiny("seed-oss-36b_2gpu", "--deepspeed-config", str(JSON / "zerooffload.json"))
    words = ("finetune_seed-oss-36b_2gpu.sh", "superoffload")
    printed = bash(scripts, *words, extra=extra, ENGINE="deepspeed")
    assert f"{JSON / 'zerooffload.json'} decides: dtype = bf16, mode = zerooffload\n" in printed
    run = scripts / "seed-oss-36b_superoffload_output"
    config = json.loads((run / "deepspeed.json").read_text())
    asked = json.loads((JSON / "zerooffload.json").read_text())
    assert config == {**asked, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "model" / "config.json").exists()
    assert len(list((run / "checkpoints").iterdir())) == 1, "ZeRO-Offload is saved"


@pytest.mark.slow
def test_the_log_of_a_run_outlives_what_comes_after_it(scripts):
    extra, words = tiny("llama-8b_1gpu"), ("finetune_llama-8b_1gpu.sh", "superoffload")
    first = bash(scripts, *words, extra=extra)
    assert (scripts / "llama-8b_superoffload_output" / "model" / "config.json").exists()
    assert "step 2/2" in first
    refused = bash(scripts, *words, extra=extra, code=2)
    assert "holds a run already" in refused
    dry = bash(scripts, *words, extra=[*extra, "--resume", "--dry-run"])
    log = scripts / "llama-8b_superoffload_output.log"
    assert log.read_text() == first + refused + dry


@pytest.mark.slow
def test_ctrl_c_is_answered_in_the_terminal_and_in_the_log(scripts):
    words = ("finetune_llama-8b_1gpu.sh", "superoffload")
    endless = ["--max-steps", "5000", "--epochs", "5000"]
    process = start(scripts, words, [*tiny("llama-8b_1gpu"), *endless])
    run = scripts / "llama-8b_superoffload_output"
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < deadline, "no step within two minutes"
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to bash, tee and the run
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped by SIGINT; saved in" in printed
    assert "--resume goes on" in printed
    assert run.with_name(f"{run.name}.log").read_text() == printed
