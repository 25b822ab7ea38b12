"""What is refused before anything is loaded, and what a rank is given before DeepSpeed starts."""

import dataclasses
import importlib.util

import pytest
import torch

from penstock.engine.deepspeed_start import (
    can_save,
    check_deepspeed,
    complete_environment,
    load_device,
)
from penstock.engine.ranks import ALONE, World
from penstock.errors import RecipeError
from penstock.recipe.recipe import Recipe

SUPER, ZERO = Recipe(engine="deepspeed"), Recipe(engine="deepspeed", mode="zerooffload")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
installed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def test_our_own_engine_asks_for_nothing():
    assert check_deepspeed(Recipe(), CPU, ALONE, resume=True) == ""
    assert can_save(Recipe())


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'penstock-train\[deepspeed\]'"):
        check_deepspeed(ZERO, CPU, ALONE, resume=False)


@installed
def test_superoffload_needs_cuda_and_names_two_ways_out():
    with pytest.raises(RecipeError, match=r"CUDA GPUs only\n.*--mode zerooffload, or --engine penstock"):
        check_deepspeed(SUPER, CPU, ALONE, resume=False)
    assert check_deepspeed(ZERO, CPU, ALONE, resume=False) == ""


@installed
def test_a_run_that_cannot_be_saved_says_so_first_and_refuses_to_resume():
    warning = check_deepspeed(SUPER, CUDA, ALONE, resume=False)
    assert "only the final model is written" in warning
    assert "--engine penstock" in warning
    with pytest.raises(RecipeError, match="Leave --resume out"):
        check_deepspeed(SUPER, CUDA, ALONE, resume=True)
    on_disk = dataclasses.replace(ZERO, param_offload="nvme", nvme_path="/disk")
    assert "NVMe" in check_deepspeed(on_disk, CUDA, ALONE, resume=False)


def test_one_rank_alone_meets_itself_on_the_loopback():
    environment = {}
    complete_environment(environment, ALONE, CPU)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert int(environment["MASTER_PORT"]) > 1024
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")


def test_several_ranks_take_the_environments_meeting_place():
    environment = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4"}
    complete_environment(environment, World(3, 4, 1, 2), CPU)
    assert environment["MASTER_ADDR"] == "10.0.0.1"
    assert (environment["RANK"], environment["LOCAL_RANK"]) == ("3", "1")


def test_the_local_rank_is_the_gpu_where_slurm_shows_each_task_its_own():
    environment = {}
    complete_environment(environment, World(1, 2, 1, 2), torch.device("cuda", 0))
    assert environment["LOCAL_RANK"] == "0"


def test_weights_that_are_cut_are_loaded_on_the_host():
    two = World(0, 2, 0, 2)
    assert load_device(ZERO, CUDA, ALONE) == CUDA
    assert load_device(dataclasses.replace(ZERO, param_offload="cpu"), CUDA, ALONE) == CPU
    assert load_device(ZERO, CUDA, two) == CPU
    assert load_device(Recipe(), CUDA, two) == CUDA
