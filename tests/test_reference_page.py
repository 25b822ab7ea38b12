"""The page about moving from the SuperOffload example: nothing of the example is missing, and its figures are real."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import penstock
from penstock.command.cli import main
from penstock.machine.known import find_machine
from penstock.model.flops import reference_flops_per_token
from penstock.plan.report import make_plan
from penstock.recipe.presets import ARCHITECTURES, PRESETS

ROOT = Path(__file__).parents[1]
JSON = Path(__file__).parent / "reference"
FLAGS = {
    "model_name",
    "lr",
    "batch_size",
    "output_dir",
    "attn_implementation",
    "leaf_module",
    "activation_checkpointing",
    "num_train_epochs",
    "max_length",
    "weight_decay",
    "warmup",
    "local_rank",
    "seed",
    "deterministic",
    "log_interval",
    "log_level",
    "warmup_steps",
    "bench_steps",
    "save_checkpoint",
    "use_wandb",
    "wandb_project",
    "wandb_run_name",
    "wandb_tags",
    "dataset_name",
    "dataset_percentage",
    "deepspeed_config",
    "num_gpus",
    "bind_cores_to_rank",
}
"""Of the example's `finetune_zero3.py`, of DeepSpeed's configuration arguments, and of the launch lines."""
KEYS = {
    "train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "enabled",
    "zero_optimization",
    "stage",
    "overlap_comm",
    "reduce_bucket_size",
    "sub_group_size",
    "offload_optimizer",
    "device",
    "pin_memory",
    "ratio",
    "super_offload",
    "cpuadam_cores_perc",
    "wall_clock_breakdown",
}
TOLD = {
    "train/loss",
    "train/epoch",
    "train/learning_rate",
    "perf/step_time_ms",
    "perf/tokens_per_second",
    "perf/tflops",
}
STEPS = {"requirements.txt", "MODEL_NAME", "BENCH_STEPS", "SAVE_CHECKPOINT", "_config.json", "_output/", "MPAM", "NUMA"}


def page_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_page_has_every_flag_key_file_and_step():
    page = page_of("docs/from-deepspeed.md")
    rows = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    for flag in FLAGS:
        assert f"--{flag}`" in rows or f"--{flag} " in rows, flag
    for word in (*KEYS, *STEPS):
        assert word in rows, word
    for word in TOLD:
        assert f"`{word}`" in page, word
    keys = set(re.findall(r'"(\w+)":', "".join(path.read_text() for path in JSON.glob("*.json"))))
    assert keys == KEYS, "all of the files' keys are looked for"


def test_its_flags_of_ours_exist(capsys):
    page = page_of("docs/from-deepspeed.md")
    shown = ""
    for command in ("train", "bench", "export", "plan", "doctor"):
        assert main([command, "--help"]) == 0
        shown += capsys.readouterr().out
    ours = {flag for line in page.splitlines() if line.startswith("|") for flag in re.findall(r"--[a-z0-9-]+", line)}
    theirs = {f"--{flag}" for flag in FLAGS}
    theirs |= {"--" + flag.split("_")[0] for flag in FLAGS}  # as far as the search above reads them
    assert {flag for flag in ours - theirs if flag not in shown} == set()


def test_its_figures_are_those_of_the_plan_and_of_the_results(llama_8b):
    page, readme = page_of("docs/from-deepspeed.md"), page_of("README.md")
    plans = [
        make_plan(replace(PRESETS["llama-8b"], mode=mode), find_machine("gh200"))
        for mode in ("superoffload", "zerooffload")
    ]
    fast, plain = ((plan.seconds.step, plan.tflops) for plan in plans)
    ratio = f"{plain[0] / fast[0]:.2f}"
    assert f"| {fast[0]:.3f} s, {fast[1]:.0f} TFLOP/s | {plain[0]:.3f} s, {plain[1]:.0f} TFLOP/s | {ratio} |" in page
    assert f"{fast[1]:.0f} planned on a GH200, {ratio} times" in readme
    results = ROOT / "benchmarks" / "results" / "2026-11-16-h200" / "modes" / "rows.jsonl"
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    cells = []
    for mode in ("superoffload", "zerooffload"):
        (row,) = (row for row in rows if row["mode"] == mode)
        reference = reference_flops_per_token(llama_8b, 4096, "none") * 4 * 4096 / row["step_s"] / 1e12
        assert row["reference_tflops"] == pytest.approx(reference, rel=1e-3)
        cells.append(
            f"{row['step_s']:.3f} s, {row['model_tflops']:.0f} TFLOP/s ({reference:.0f} by the example's formula)"
        )
        cells.append(row["step_s"])
    fast_cell, fast_s, plain_cell, plain_s = cells
    ratio = f"{plain_s / fast_s:.2f}"
    assert f"| {fast_cell} | {plain_cell} | {ratio} |" in page
    (row,) = (row for row in rows if row["mode"] == "superoffload")
    assert f"{row['model_tflops']:.0f} measured on an H200, {ratio} times" in readme


@pytest.fixture(scope="module")
def llama_8b():
    architecture = ARCHITECTURES[PRESETS["llama-8b"].model]
    config = AutoConfig.for_model(architecture.model_type, **architecture.config_values())
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_both_papers_and_we_can_be_cited():
    cff = yaml.safe_load(page_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= set(cff)
    assert cff["version"] == penstock.__version__
    page = page_of("docs/from-deepspeed.md").replace("\n  ", " ")
    for reference in cff["references"]:
        assert {"type", "title", "authors"} <= set(reference)
        assert reference["title"] in page
        assert reference["url"] in page
