"""Weights of checkpoints that DeepSpeed wrote, in its three forms."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import penstock
from penstock.checkpoint.places import deepspeed_form
from penstock.command.cli import main
from penstock.recipe.presets import ARCHITECTURES

DEMO = Path(penstock.__file__).parent / "demo" / "model"
WRITER = Path(__file__).parent / "deepspeed_checkpoint.py"
slow_and_needs_deepspeed = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler, which DeepSpeed's CPUAdam needs"),
]


@pytest.fixture(scope="module")
def written(once):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def write(directory):
        directory.mkdir(exist_ok=True)
        command = [sys.executable, "-W", "ignore", WRITER, DEMO, directory]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return ""

    return once("deepspeed-checkpoint", write)[0]


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=slow_and_needs_deepspeed) for form in ("zero", "universal", "bin")],
)
def test_weights_are_the_masters_to_the_bit_and_the_model_can_be_trained(written, form, tmp_path, capsys):
    words = ["export", str(written / form), "--model", str(DEMO), "--to", str(tmp_path / "model")]
    if form == "zero":
        assert main(words) == 2
        assert "can run any code" in capsys.readouterr().err
        words.append("--trust-pickle")
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model_dir": str(tmp_path / "model")}
    found, masters = load_file(tmp_path / "model" / "model.safetensors"), torch.load(written / "masters.pt")
    assert set(found) == set(masters)
    assert all(torch.equal(found[name], master) for name, master in masters.items())
    before = load_file(DEMO / "model.safetensors")
    assert any(not torch.equal(found[name], before[name].float()) for name in found), "the step has changed them"
    run = ["train", "demo", "--model", str(tmp_path / "model"), "--tokenizer", str(DEMO), "--max-steps", "1"]
    assert main([*run, "--dry-run", "--output-dir", str(tmp_path / "run")]) == 0


@pytest.fixture
def consolidated(tmp_path):
    """What `zero_to_fp32.py` writes: weights, and no config."""
    directory = tmp_path / "fp32"
    directory.mkdir()
    weights = {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_consolidated_weights_need_no_deepspeed(consolidated, tmp_path, capsys):
    assert deepspeed_form(consolidated)
    assert main(["export", str(consolidated), "--model", "demo", "--to", str(tmp_path / "model")]) == 0
    assert "Written and checked" in capsys.readouterr().out
    found, stored = load_file(tmp_path / "model" / "model.safetensors"), load_file(consolidated / "model.safetensors")
    assert all(torch.equal(found[name], stored[name]) for name in found)
    ends, theirs = (json.loads((d / "generation_config.json").read_text()) for d in (tmp_path / "model", DEMO))
    assert ends["eos_token_id"] == theirs["eos_token_id"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["FP32"], 2, "does not say of what model(.|\n)*--model"),
        (["RUN", "--model", "demo"], 5, "is no checkpoint of DeepSpeed's(.|\n)*leave --model"),
        (["RUN", "--trust-pickle"], 5, "is no checkpoint of DeepSpeed's"),
        (["ZERO", "--model", "demo"], 2, "can run any code(.|\n)*--trust-pickle"),
        (["UNIVERSAL", "--model", "demo"], 5, "cannot be read(.|\n)*damaged"),
    ],
)
def test_what_is_refused(words, code, message, consolidated, tmp_path, capsys):
    for name in ("RUN", "ZERO/global_step1", "UNIVERSAL/zero/model.norm.weight"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ZERO/latest").write_text("global_step1")
    (tmp_path / "ZERO/global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    (tmp_path / "UNIVERSAL/zero/model.norm.weight/fp32.pt").write_bytes(b"no tensor")
    from penstock.model.load import load_config, load_model
    from penstock.recipe.recipe import Recipe

    recipe = Recipe(init="random")
    for name, _ in load_model(recipe, load_config(recipe), torch.device("cpu"), lambda _: None).named_parameters():
        place = tmp_path / "UNIVERSAL/zero" / name
        place.mkdir(exist_ok=True)
        (place / "fp32.pt").write_bytes(b"no tensor")
    path = consolidated if words[0] == "FP32" else tmp_path / words[0]
    assert main(["export", str(path), *words[1:], "--to", str(tmp_path / "to")]) == code
    import re

    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "to").exists()


def test_a_tag_does_not_lead_out_of_its_directory(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "latest").write_text("../outside")
    assert deepspeed_form(outside)
    assert not deepspeed_form(tmp_path / "checkpoint")


@pytest.mark.parametrize("stored", ["one by one", "together"])
def test_experts_may_be_stored_one_by_one_as_earlier_transformers_did(stored, tmp_path, capsys):
    architecture = ARCHITECTURES["Qwen/Qwen3-30B-A3B"]
    small = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "vocab_size": 4096}
    config = AutoConfig.for_model(architecture.model_type, **(architecture.config_values() | small))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    model.save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / file, base)
    checkpoint.mkdir()
    if stored == "one by one":
        shutil.copy(base / "model.safetensors", checkpoint)
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in load_file(base / "model.safetensors")
    else:
        torch.save(
            {f"module.{name}": p.detach() for name, p in model.named_parameters()}, checkpoint / "pytorch_model.bin"
        )
    words = ["export", str(checkpoint), "--model", str(base), "--to", str(tmp_path / "model")]
    assert main(words) == 0, capsys.readouterr().err
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), model.parameters(), strict=True))


def test_weights_of_another_model_are_refused(consolidated, tmp_path, capsys):
    weights = load_file(consolidated / "model.safetensors")
    weights["more.weight"] = weights.pop("model.norm.weight")
    weights["model.layers.0.input_layernorm.weight"] = torch.ones(3)
    save_file(weights, consolidated / "model.safetensors", metadata={"format": "pt"})
    assert main(["export", str(consolidated), "--model", "demo", "--to", str(tmp_path / "to")]) == 2
    said = capsys.readouterr().err
    for part in (
        "1 missing, such as model.norm.weight",
        "1 unexpected, such as more.weight",
        "1 mismatched",
        "--model",
    ):
        assert part in said
    assert not (tmp_path / "to").exists()
