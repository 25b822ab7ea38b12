"""One peer's step, in the process that `peers.py` starts: `python -m penstock.bench.peer_process SPEC`.

The model is Hugging Face's own code, as these systems are used: its attention, its loss, its gradient checkpointing.
Only where DeepSpeed keeps parameters in host memory does it compute the loss in tiles, by a function of its own: the
logits of two rows of 4,096 tokens and their gradients alone fill 13 GB, and the peer would run out of a GPU of 16 GB.
Prints one JSON line a step, and one with the result or the error. Nothing runs on import, since DeepSpeed's worker
processes import this module again.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.bench.peers import Peer
from penstock.bench.timing import median_seconds
from penstock.engine.deepspeed_start import without_shared_memory
from penstock.engine.weights import load_to_stream
from penstock.machine.gpu_memory import limit_gpu, most_driver_bytes
from penstock.machine.hardware import make_repeatable, pick_device
from penstock.machine.ports import free_port
from penstock.model.load import load_config, load_model
from penstock.recipe.recipe import Recipe, with_values

Step = Callable[[], object]
TILE_BYTES = 2**30
"""Of fp32 logits in a tile."""


def main(spec_path: str) -> None:
    """Measure, print, and leave at once: a peer's own threads and workers must not keep the process."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    peer = Peer(**spec["peer"])
    recipe = with_values(Recipe(init="random"), spec["recipe"], where=spec_path)
    try:
        _print(peer, **measure(peer, recipe, spec["steps"], spec["others_bytes"]))
    except ModuleNotFoundError as error:
        _print(peer, missing=(error.name or str(error)).split(".")[0])
    except Exception as error:  # whatever a peer raises is its result
        memory = "out of memory" in str(error).lower() or isinstance(error, torch.OutOfMemoryError)
        first = (str(error).strip().splitlines() or [""])[0]
        text = "out of GPU memory" if memory else f"{type(error).__name__}: {first}"
        _print(peer, error=text, **_memory(spec["others_bytes"]))
        traceback.print_exc()  # for the log
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def measure(peer: Peer, recipe: Recipe, steps: int, others_bytes: int) -> dict[str, Any]:
    """The median step and what it took."""
    importlib.import_module(peer.name)  # before gigabytes of weights are made for nothing
    device = pick_device(recipe.device)
    make_repeatable(recipe)
    if recipe.batch_size % recipe.rows_at_once:
        raise ValueError(f"batch {recipe.batch_size} is not a multiple of the micro-batch {recipe.rows_at_once}")
    limit_gpu(device, recipe.gpu_memory, others_bytes)
    model = _model(recipe, peer, device)
    step = {"deepspeed": _deepspeed, "torchao": _torchao, "flashoptim": _flashoptim}[peer.name](model, recipe, peer)
    done = 0

    def counted() -> None:
        nonlocal done
        step()
        done += 1
        _print(peer, steps_done=done)

    seconds = median_seconds(counted, device, steps)
    return {"step_s": seconds, "versions": _versions(peer.name), **_memory(others_bytes)}


def _model(recipe: Recipe, peer: Peer, device: torch.device) -> PreTrainedModel:
    """Built by our loader, so that class, seed and the absence of dropout are those of our own rows; always in bf16.

    In host memory, if it shall not have to fit the GPU.
    """
    recipe = dataclasses.replace(recipe, dtype="bf16")
    load = load_to_stream if peer.offload_params else load_model
    model = load(recipe, load_config(recipe), device, lambda text: print(text, file=sys.stderr))
    model.config.use_cache = False
    if recipe.recompute != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def _micro_batches(model: PreTrainedModel, recipe: Recipe) -> list[torch.Tensor]:
    device = pick_device(recipe.device)
    vocab_size = model.config.get_text_config().vocab_size
    shape = (recipe.rows_at_once, recipe.max_length)
    return [torch.randint(vocab_size, shape, device=device) for _ in range(recipe.batch_size // recipe.rows_at_once)]


def _deepspeed(model: PreTrainedModel, recipe: Recipe, peer: Peer) -> Step:
    """ZeRO-3 with the reference's configuration and the ratio asked for, or with parameters in host memory."""
    device = pick_device(recipe.device)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update({**address, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

    without_shared_memory(deepspeed)
    config = deepspeed_config(recipe, peer)
    if peer.offload_params:
        # Parameter by parameter into pinned memory: `initialize` would put the whole model on the GPU first.
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.bfloat16)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
    optimizer = DeepSpeedCPUAdam(
        model.parameters(), lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay
    )
    batches = _micro_batches(model, recipe)
    tiled = peer.offload_params and not _is_tied(model)
    module = _TiledLoss(model, len(batches)) if tiled else model
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.train()

    def step() -> None:
        for ids in batches:  # DeepSpeed knows by its count which of them is the last
            if tiled:
                engine.backward(engine(ids), scale_wrt_gas=False)
            else:
                engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

    return step


class _TiledLoss(nn.Module):
    """The causal loss by DeepSpeed's `TiledFusedLogitsLoss`, which never has more than one tile of the logits.

    Its tiles go backward inside forward, when nobody has scaled the loss yet: so the share of a micro-batch is applied
    here, and not by DeepSpeed.
    """

    def __init__(self, model: PreTrainedModel, num_micro_batches: int) -> None:
        super().__init__()
        self.model, self._num_micro_batches = model, num_micro_batches

    def forward(self, input_ids: Tensor) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # type: ignore[import-not-found, unused-ignore]
            TiledFusedLogitsLoss,
        )

        head: Any = self.model.get_output_embeddings()
        hidden = self.model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        targets = nn.functional.pad(input_ids[:, 1:], (0, 1), value=-100)
        num_trained = input_ids.shape[0] * (input_ids.shape[1] - 1) * self._num_micro_batches
        num_tiles = math.ceil(4 * input_ids.numel() * head.out_features / TILE_BYTES)

        def loss_of_tile(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(head(hidden).float(), targets, reduction="sum") / num_trained

        loss: Tensor = TiledFusedLogitsLoss.apply(
            loss_of_tile, head, hidden, targets, None, num_tiles, list(head.parameters()), "sum"
        )
        return loss


def _is_tied(model: PreTrainedModel) -> bool:
    """Then tiles cannot be: the head's gradient would be taken before that of the embedding is added to it."""
    return bool(model.config.get_text_config().tie_word_embeddings)


def deepspeed_config(recipe: Recipe, peer: Peer) -> dict[str, Any]:
    """The reference example's JSON (training/DeepSpeed-SuperOffload), with this recipe's batch and clipping.

    With parameters in host memory, what decides how they come and go is DeepSpeed's documented default.
    """
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True, "ratio": peer.ratio}
    if peer.mode == "superoffload":
        offload |= {"super_offload": True, "cpuadam_cores_perc": 0.9}
    zero: dict[str, Any] = {"overlap_comm": False}
    if peer.offload_params:
        zero = {
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,  # or every parameter is fetched in the stream that computes
            "contiguous_gradients": True,
            "stage3_prefetch_bucket_size": int(5e7),
            "stage3_param_persistence_threshold": int(1e5),
            "stage3_max_live_parameters": int(1e9),
            "stage3_max_reuse_distance": int(1e9),
        }
    return {
        "train_batch_size": recipe.batch_size,
        "train_micro_batch_size_per_gpu": recipe.rows_at_once,
        "gradient_accumulation_steps": recipe.batch_size // recipe.rows_at_once,
        "gradient_clipping": recipe.max_grad_norm,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": int(4e8),
            "sub_group_size": int(4e8),
            "offload_optimizer": offload,
            **zero,
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


def _memory(others_bytes: int) -> dict[str, int]:
    if not torch.cuda.is_available():
        return {"gpu_bytes": 0, "driver_bytes": 0}
    taken = most_driver_bytes(torch.device("cuda")) - others_bytes
    return {"gpu_bytes": torch.cuda.max_memory_allocated(), "driver_bytes": taken}


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
