"""One peer's step, in the process that `peers.py` starts: `python -m penstock.bench.peer_process SPEC`.

The model is Hugging Face's own code, as these systems are used: its attention, its loss, its gradient checkpointing.
Prints one JSON line a step, and one with the result or the error. Nothing runs on import, since DeepSpeed's worker
processes import this module again.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock.bench.peers import Peer
from penstock.bench.timing import median_seconds
from penstock.machine.hardware import pick_device
from penstock.model.load import load_config, load_model
from penstock.recipe.recipe import Recipe, with_values

Step = Callable[[], object]


def main(spec_path: str) -> None:
    """Measure, print, and leave at once: a peer's own threads and workers must not keep the process."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    peer = Peer(**spec["peer"])
    recipe = with_values(Recipe(init="random"), spec["recipe"], where=spec_path)
    try:
        _print(peer, **measure(peer, recipe, spec["steps"]))
    except ModuleNotFoundError as error:
        _print(peer, missing=(error.name or str(error)).split(".")[0])
    except Exception as error:  # whatever a peer raises is its result
        memory = "out of memory" in str(error).lower() or isinstance(error, torch.OutOfMemoryError)
        first = (str(error).strip().splitlines() or [""])[0]
        _print(peer, error="out of GPU memory" if memory else f"{type(error).__name__}: {first}", **_memory())
        traceback.print_exc()  # for the log
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def measure(peer: Peer, recipe: Recipe, steps: int) -> dict[str, Any]:
    """The median step and what it took."""
    importlib.import_module(peer.name)  # before gigabytes of weights are made for nothing
    device = pick_device(recipe.device)
    if recipe.batch_size % recipe.rows_at_once:
        raise ValueError(f"batch {recipe.batch_size} is not a multiple of the micro-batch {recipe.rows_at_once}")
    model = _model(recipe, device)
    step = {"deepspeed": _deepspeed, "torchao": _torchao, "flashoptim": _flashoptim}[peer.name](model, recipe, peer)
    done = 0

    def counted() -> None:
        nonlocal done
        step()
        done += 1
        _print(peer, steps_done=done)

    seconds = median_seconds(counted, device, steps)
    return {"step_s": seconds, "versions": _versions(peer.name), **_memory()}


def _model(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """Built by our loader, so that class, seed and the absence of dropout are those of our own rows; always in bf16."""
    recipe = dataclasses.replace(recipe, dtype="bf16")
    model = load_model(recipe, load_config(recipe), device, lambda text: print(text, file=sys.stderr))
    model.config.use_cache = False
    if recipe.recompute != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def _micro_batches(model: PreTrainedModel, recipe: Recipe) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    vocab_size = model.config.get_text_config().vocab_size
    shape = (recipe.rows_at_once, recipe.max_length)
    return [torch.randint(vocab_size, shape, device=device) for _ in range(recipe.batch_size // recipe.rows_at_once)]


def _deepspeed(model: PreTrainedModel, recipe: Recipe, peer: Peer) -> Step:
    """ZeRO-3 with the reference's configuration, and the ratio asked for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update(alone)
    os.environ.setdefault("DS_ACCELERATOR", next(model.parameters()).device.type)
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

    optimizer = DeepSpeedCPUAdam(
        model.parameters(), lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(recipe, peer))
    engine.train()
    batches = _micro_batches(model, recipe)

    def step() -> None:
        for ids in batches:  # DeepSpeed knows by its count which of them is the last
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

    return step


def deepspeed_config(recipe: Recipe, peer: Peer) -> dict[str, Any]:
    """The reference example's JSON (training/DeepSpeed-SuperOffload), with this recipe's batch and clipping."""
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True, "ratio": peer.ratio}
    if peer.mode == "superoffload":
        offload |= {"super_offload": True, "cpuadam_cores_perc": 0.9}
    return {
        "train_batch_size": recipe.batch_size,
        "train_micro_batch_size_per_gpu": recipe.rows_at_once,
        "gradient_accumulation_steps": recipe.batch_size // recipe.rows_at_once,
        "gradient_clipping": recipe.max_grad_norm,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": int(4e8),
            "sub_group_size": int(4e8),
            "offload_optimizer": offload,
        },
        "wall_clock_breakdown": False,
    }


def _torchao(model: PreTrainedModel, recipe: Recipe, peer: Peer) -> Step:
    """bf16 weights and moments, fused AdamW on the CPU. It cannot clip by the global norm."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found, unused-ignore]

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **_adamw(recipe))
    return _plain_step(model, optimizer, recipe, clip=0.0)


def _flashoptim(model: PreTrainedModel, recipe: Recipe, peer: Peer) -> Step:
    """All on the GPU: a 24-bit master and 8-bit moments."""
    from flashoptim import FlashAdamW  # type: ignore[import-not-found, unused-ignore]

    return _plain_step(model, FlashAdamW(model.parameters(), **_adamw(recipe)), recipe, clip=recipe.max_grad_norm)


def _adamw(recipe: Recipe) -> dict[str, Any]:
    return {"lr": recipe.lr, "betas": recipe.betas, "eps": recipe.eps, "weight_decay": recipe.weight_decay}


def _plain_step(model: PreTrainedModel, optimizer: Any, recipe: Recipe, *, clip: float) -> Step:
    batches = _micro_batches(model, recipe)

    def step() -> None:
        for ids in batches:
            (model(input_ids=ids, labels=ids).loss / len(batches)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _memory() -> dict[str, int]:
    return {"gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0}


def _versions(name: str) -> str:
    found = []
    for package in (name, "torch", "transformers"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(package)
    return ", ".join(found)


def _print(peer: Peer, **values: object) -> None:
    # A new line first: DeepSpeed's own output does not always end with one.
    print("\n" + json.dumps({"peer": peer.name, **values}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
