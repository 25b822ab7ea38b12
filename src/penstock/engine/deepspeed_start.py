"""DeepSpeed's package made ready for one rank: what it cannot do here, its process group, its silence."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import MutableMapping
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.distributed as dist

from penstock.engine.deepspeed_config import deepspeed_json
from penstock.engine.ranks import World
from penstock.errors import RecipeError
from penstock.machine.ports import free_port
from penstock.recipe.recipe import Recipe


def can_save(recipe: Recipe) -> bool:
    """Whether all state can be reached: SuperOffload's moments cannot, nor weights on NVMe."""
    return recipe.engine != "deepspeed" or (recipe.mode == "zerooffload" and recipe.param_offload != "nvme")


def check_deepspeed(recipe: Recipe, device: torch.device, world: World, *, resume: bool) -> str:
    """Refuse before anything is loaded what this engine cannot do here; returns what must be known beforehand."""
    if recipe.engine != "deepspeed":
        return ""
    if importlib.util.find_spec("deepspeed") is None:
        remedy = (
            "pip install 'penstock-train[deepspeed]' (in a checkout: pip install -c constraints.txt '.[deepspeed]'), "
            "or use --engine penstock."
        )
        raise RecipeError("the package deepspeed is not installed", where="engine = 'deepspeed'", remedy=remedy)
    if recipe.mode == "superoffload" and device.type != "cuda":
        remedy = "Use --mode zerooffload, or --engine penstock."
        raise RecipeError("DeepSpeed runs it on CUDA GPUs only", where="mode = 'superoffload'", remedy=remedy)
    deepspeed_json(recipe, world)
    if can_save(recipe):
        return ""
    cause = "SuperOffload keeps Adam's moments in a worker process"
    cause = cause if recipe.mode == "superoffload" else "the weights are on NVMe"
    what = f"DeepSpeed cannot save this run, since {cause}: only the final model is written, and nothing can be resumed"
    remedy = "--engine penstock saves; so does --mode zerooffload without --param-offload nvme."
    if resume:
        raise RecipeError(what, where="--resume", remedy=f"Leave --resume out. {remedy}")
    if recipe.save_every:
        raise RecipeError(what, where="save_every", remedy=f"Leave --save-every out. {remedy}")
    return f"{what}. {remedy}"


def start_deepspeed(device: torch.device, world: World) -> Any:
    """The imported package with its process group, speaking only when something is wrong."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read once, on import
    complete_environment(os.environ, world, device)
    if not dist.is_initialized():  # several ranks have met already; one alone needs a group too
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with redirect_stdout(sys.stderr):  # standard output is for one JSON object, and DeepSpeed tells it what it builds
        import deepspeed

        level = logging.getLogger("penstock").getEffectiveLevel()  # of --log-level, or warnings
        deepspeed.utils.logger.setLevel(level)
        for handler in deepspeed.utils.logger.handlers:
            handler.setLevel(level)
            handler.setStream(sys.stderr)
        if (found := deepspeed.accelerator.get_accelerator().device_name()) != device.type:
            what = f"DeepSpeed has settled on {found}, and the run is on {device.type}"
            remedy = f"Set the environment variable DS_ACCELERATOR={device.type}."
            raise RecipeError(what, where="environment", remedy=remedy)
        without_shared_memory(deepspeed)
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    return deepspeed


def without_shared_memory(deepspeed: Any) -> None:
    """Do not let it compile for a minute, on a CPU, an all-reduce that inference alone uses."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def load_device(recipe: Recipe, device: torch.device, world: World) -> torch.device:
    """Where weights are loaded to: the host, if the GPU will not hold all of them."""
    cut = world.many or recipe.param_offload != "none"
    return torch.device("cpu") if recipe.engine == "deepspeed" and cut else device


def complete_environment(environment: MutableMapping[str, str], world: World, device: torch.device) -> None:
    """What DeepSpeed looks for in it. One rank alone meets nobody: any free port of the loopback will do."""
    if not world.many:
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = "127.0.0.1", str(free_port())
    own = {"RANK": world.rank, "WORLD_SIZE": world.size}
    # DeepSpeed takes the local rank for the number of the GPU, which it is not where SLURM shows each task its own.
    local_rank = world.local_rank if device.index is None else device.index
    own |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": world.local_size}
    environment.update({name: str(value) for name, value in own.items()})
