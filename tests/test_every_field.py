"""A field of the recipe that changes nothing must not exist: change each one, and see the run change."""

import dataclasses
import json
import shutil

import pytest
import torch

from penstock.machine.hardware import pick_dtype
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import FIELDS
from penstock.report.console import Console
from penstock.run.train import train

# How each field is changed. Where a change only shows beside another setting, that one is set in both runs.
CHANGES = {
    "name": {"name": "other"},
    "output_dir": {},  # set to a second directory below
    "model": {"model": "COPY"},
    "revision": None,
    "tokenizer": {"tokenizer": "COPY"},
    "init": {"init": "random"},
    "shape": {"shape": "num_hidden_layers=1"},
    "rope": {"rope": "linear:2"},
    "trust_remote_code": {"trust_remote_code": True},
    "device": None,
    "dtype": {"dtype": "bf16" if pick_dtype("auto", torch.device("cpu")) == "fp32" else "fp32"},
    "reduce_dtype": None,
    "accumulate_dtype": None,
    "attention": {"attention": "eager"},
    "recompute": {"recompute": "full"},
    "compile": None,
    "mode": {"mode": "zerooffload"},
    "homes": {"homes": "stream=0.5,host=0.5"},
    "weights": {"weights": "streamed"},
    "order": {"order": "layers"},
    "inputs": {"inputs": "parked"},
    "tile": {"tile": "16"},
    "gpu_memory": None,
    "update": {"update": "in-backward"},
    "cpu_adam_cores": {"cpu_adam_cores": 1.0},
    "engine": None,
    "offload_ratio": None,
    "bucket_size": None,
    "param_offload": None,
    "nvme_path": None,
    "matmul": {"matmul": "fp8"},
    "bind_cores": None,
    "leaf_module": None,
    "deepspeed_config": None,
    "data": {"data": "FILE"},
    "data_split": None,
    "data_stream": None,
    "data_format": {"data_format": "text"},
    "columns": {"columns": "instruction=,output="},
    "split_documents": {"split_documents": "length"},
    "data_percent": {"data_percent": 50.0},
    "template": {"template": "alpaca"},
    "end_token": {"end_token": "<|endoftext|>"},
    "train_on_prompt": {"train_on_prompt": True},
    "max_length": {"max_length": 64},
    "too_long": {"too_long": "drop"},
    "packing": {"packing": False},
    "shuffle": {"shuffle": False},
    "validation": {"validation": 0.1},
    "eval_data": {"eval_data": "FILE"},
    "eval_split": None,
    "batch_size": {"batch_size": 3},
    "micro_batch_size": {"micro_batch_size": 1},
    "epochs": {"epochs": 0.1},
    "max_steps": {"max_steps": 2},
    "lr": {"lr": 1e-4},
    "schedule": {"schedule": "linear"},
    "warmup": {"warmup": 0.9},
    "betas": {"betas": (0.5, 0.9)},
    "eps": {"eps": 1e-2},
    "weight_decay": {"weight_decay": 5.0},
    "states": {"states": "int8"},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "skip_limit": None,
    "seed": {"seed": 1},
    "deterministic": {"deterministic": True},
    "eval_every": {"eval_every": 1},
    "log_every": {"log_every": 3},
    "save_every": {"save_every": 1},
    "keep": {"keep": 1},
    "keep_best": {"keep_best": True},
    "patience": {"patience": 1},
    "prompt": {"prompt": "What is the capital of Italy?"},
    "track": None,
    "project": None,
    "tags": None,
}
# bf16 is a hundred times slower on a CPU without it, so that run is tiny.
TINY = "num_hidden_layers=1,hidden_size=16,intermediate_size=16,num_attention_heads=2,num_key_value_heads=1,head_dim=8"
WRECKING = {"lr": 0.3, "warmup": 0.0, "schedule": "constant"}  # the first evaluation is the best
ALSO = {  # settings that both runs share
    "dtype": {"init": "random", "shape": TINY, "data_percent": 3.0, "max_steps": 1},
    "shape": {"init": "random"},
    "update": {"update": "after-norm", "max_grad_norm": 0.0},
    "cpu_adam_cores": {"homes": "host", "cpu_adam_cores": 0.1},
    "data_format": {"data": "BOTH"},
    "columns": {"data": "BOTH"},
    "split_documents": {"data": "BOTH", "data_format": "text", "max_length": 5},
    "end_token": {"template": "alpaca"},
    "too_long": {"max_length": 40},
    "eval_every": {"validation": 0.1},
    "keep": {"save_every": 1},
    "keep_best": {"validation": 0.1, "eval_every": 1, "keep": 1, **WRECKING},
    "patience": {"validation": 0.1, "eval_every": 1, **WRECKING},
    "inputs": {"weights": "streamed"},
    "tile": {"order": "layers"},
    "epochs": {"max_steps": 0, "data_percent": 30.0, "epochs": 0.5},
}
SEEN = {  # where a change shows, if not in the steps or the answer
    "log_every": ["lines"],
    "deterministic": ["deterministic"],
    "trust_remote_code": ["warned"],
    "recompute": ["kept_bytes"],
    "mode": ["state"],
    "homes": ["state"],
    "update": ["state"],
    "weights": ["weights"],
    "order": ["kept_bytes"],
    "inputs": ["weights"],
    "tile": ["kept_bytes"],
    "cpu_adam_cores": ["state"],
    "validation": ["evals"],
    "eval_data": ["evals"],
    "eval_every": ["evals"],
    "save_every": ["saved"],
    "keep": ["saved"],
    "keep_best": ["saved"],
}
ELSEWHERE = {
    "compile": "tests/model/test_compiled.py",
    "revision": "tests/model/test_load.py",
    "data_split": "tests/data/test_source.py",
    "data_stream": "tests/data/test_source.py",
    "eval_split": "tests/data/test_loader.py",
    "device": "tests/machine/test_hardware.py",
    "reduce_dtype": "tests/engine/test_fsdp.py",
    "gpu_memory": "tests/machine/test_gpu_memory.py",
    "accumulate_dtype": "tests/engine/test_native.py",
    "skip_limit": "tests/run/test_progress.py",
    "track": "tests/report/test_trackers.py",
    "project": "tests/report/test_trackers.py",
    "tags": "tests/report/test_trackers.py",
    "engine": "tests/engine/test_deepspeed.py",
    "offload_ratio": "tests/engine/test_deepspeed_config.py",
    "bucket_size": "tests/engine/test_deepspeed_config.py",
    "param_offload": "tests/engine/test_deepspeed_config.py",
    "nvme_path": "tests/engine/test_deepspeed_config.py",
    "bind_cores": "tests/machine/test_launch.py",
    "leaf_module": "tests/engine/test_deepspeed.py",
    "deepspeed_config": "tests/engine/test_deepspeed_config.py",
}


def test_every_field_is_changed_here_or_elsewhere():
    assert set(CHANGES) == set(FIELDS)
    assert {name for name, change in CHANGES.items() if change is None} == set(ELSEWHERE)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A copy of the demo model with other weights and another chat template; a data file; rows with two forms."""
    from importlib.resources import files

    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("places")
    copy, both, file = root / "copy", root / "both.jsonl", root / "file.jsonl"
    shutil.copytree(str(files("penstock.demo") / "model"), copy)
    weights = load_file(copy / "model.safetensors")
    save_file({k: v * 1.01 for k, v in weights.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    for path in (copy / "tokenizer_config.json", copy / "chat_template.jinja"):
        if path.exists():
            path.write_text(path.read_text().replace("message['role'] + ", "message['role'] + ' says' + "))
    rows = [{"instruction": f"Say {i}.", "input": "", "output": f"{i} it is."} for i in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both.write_text("".join(json.dumps({**row, "text": row["output"]}) + "\n" for row in rows))
    return {"COPY": str(copy), "FILE": str(file), "BOTH": str(both)}


def run(values, directory, places):
    values = {k: places.get(v, v) if isinstance(v, str) else v for k, v in values.items()}
    base = dataclasses.replace(PRESETS["demo"], batch_size=2, max_length=128, max_steps=4, warmup=0.3, prompt=None)
    recipe = dataclasses.replace(base, **{"output_dir": str(directory), **values})
    console, kept_bytes = Console(), 0

    def keep(tensor):
        nonlocal kept_bytes
        kept_bytes += tensor.nbytes
        return tensor

    with console.rich.capture() as capture, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        summary = train(recipe, console)
    rows = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = recipe.run_dir / "eval.jsonl"
    kept = ("step", "loss", "lr", "grad_norm", "tokens", "trained_tokens")
    return {
        "rows": [[row[k] for k in kept] for row in rows],
        "evals": evals.read_text() if evals.exists() else "",
        "answer": summary.answer and dataclasses.asdict(summary.answer),
        "lines": sum(line.startswith("step") for line in capture.get().splitlines()),
        "warned": "--trust-remote-code" in capture.get(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "run_dir": str(recipe.run_dir),
        "kept_bytes": kept_bytes,
        "state": [line for line in capture.get().splitlines() if "optimizer state" in line],
        "weights": [line for line in capture.get().splitlines() if "stream: " in line or "parked" in line],
        "saved": sorted(path.name for path in (recipe.run_dir / "checkpoints").iterdir()),
    }


@pytest.fixture(scope="module")
def baseline(tmp_path_factory, places):
    results = {}

    def get(also):
        key = json.dumps(also, sort_keys=True)
        if key not in results:
            results[key] = run(also, tmp_path_factory.mktemp("base") / "run", places)
        return results[key]

    return get


@pytest.mark.parametrize("field", [name for name, change in CHANGES.items() if change is not None])
@pytest.mark.slow
def test_changing_the_field_changes_the_run(field, tmp_path, places, baseline, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        before = baseline(ALSO.get(field, {}))
        directory = "" if field == "name" else tmp_path / "run"
        after = run({**ALSO.get(field, {}), **CHANGES[field]}, directory, places)
    finally:
        torch.use_deterministic_algorithms(False)
    if field in ("name", "output_dir"):
        assert after["run_dir"] != before["run_dir"]
        if field == "name":
            assert after["run_dir"] == "runs/other"
        return
    assert any(after[name] != before[name] for name in SEEN.get(field, ["rows", "answer"])), f"{field} changed nothing"


@pytest.mark.parametrize("field", ["recompute", "mode", "homes", "weights", "order", "inputs"])
@pytest.mark.slow
def test_these_change_no_number(field, tmp_path, places, baseline):
    after = run({**ALSO.get(field, {}), **CHANGES[field]}, tmp_path / "run", places)
    assert after["rows"] == baseline({})["rows"]
