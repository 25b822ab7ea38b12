"""The Hugging Face directory of a model of which every rank has its rows (FSDP2).

The ranks send rank 0 one parameter after another, which writes them in files of a few GB; that and one parameter is all
that it holds. The check is made in rows too: every rank loads its rows of what was written and compares them to the
bit, then both models see the same text. `save_pretrained` was rejected, since it wants the whole model on one rank.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from penstock.checkpoint.export import (
    UNCHECKED,
    compare_logits,
    end_tokens_of,
    make_place,
    make_readable,
    not_written,
    write_code,
)
from penstock.checkpoint.sums import write_sums
from penstock.checkpoint.tensors import receive_blocks, send_tensors
from penstock.engine.fsdp import load_for_ranks
from penstock.engine.ranks import World
from penstock.errors import CheckpointError
from penstock.machine.gpu_memory import gpu_room
from penstock.model.attention import stock_attention
from penstock.model.decoder import find_decoder
from penstock.model.load import Say, model_class
from penstock.offload.dtensors import local
from penstock.offload.saved_tensors import SavedTensor, weight_tensors
from penstock.recipe.recipe import Recipe

FILE_BYTES = 4 * 10**9
"""Bytes of a file, all of which are in memory while it is written."""


def export_from_ranks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, recipe: Recipe, world: World, say: Say
) -> None:
    """Write model and tokenizer to `directory`, which must not exist yet. All ranks take part."""
    written = directory.with_name(f"{directory.name}.unchecked")
    parameters = weight_tensors(model)
    with stock_attention(model):
        if world.first:
            _write(model, tokenizer, directory, written, parameters)
        else:
            send_tensors(parameters)
        world.largest(0)  # the files are there
        if world.largest(int(not written.is_dir())):  # on another machine, whose disk is not this one's
            say(
                f"  WARNING: not every machine sees {directory}, so that it was written and not compared with the model"
            )
        else:
            _compare(model, tokenizer, written, recipe, world)
    if world.first:
        written.rename(directory)


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    written: Path,
    parameters: list[SavedTensor],
) -> None:
    make_place(directory, written)
    try:
        config = model.config
        # FSDP2 makes the model's class one of its own, in front of what it was.
        kind = next(k for k in type(model).__mro__[1:] if k is not FSDPModule)
        config.architectures = [kind.__name__]
        write_code(kind, config, written)
        config.save_pretrained(written)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(written)
        tokenizer.save_pretrained(written)
        _write_weights(written, _renamed(model, parameters))
        make_readable(written)
        write_sums(written)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(written, ignore_errors=True)
        raise not_written(directory, error) from error


def _renamed(model: PreTrainedModel, parameters: list[SavedTensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as checkpoints of this architecture have it: under its old names, experts one by one."""
    for parameter in parameters:
        yield from revert_weight_conversion(model, {parameter.name: _gathered(parameter)}).items()


def _gathered(tensor: SavedTensor) -> Tensor:
    """The whole of a tensor of which every rank has its rows, on the host of rank 0."""
    landing = torch.empty(tensor.num_bytes, dtype=torch.uint8)
    at = 0
    for piece in tensor.pieces:
        landing[at : at + piece.nbytes].copy_(piece.view(torch.uint8))
        at += piece.nbytes
    for rank, num_bytes in enumerate(tensor.bytes_by_rank):
        for block in receive_blocks(rank, num_bytes) if rank else ():
            landing[at : at + len(block)].copy_(torch.frombuffer(block, dtype=torch.uint8))
            at += len(block)
    return landing.view(tensor.dtype).view(tensor.shape)


def _write_weights(written: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Files of FILE_BYTES, and an index if there are several. How many is known at the end, so they are named then."""
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def write() -> None:
        files.append(list(held))
        save_file(held, written / f"{len(files)}.part", metadata={"format": "pt"})
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > FILE_BYTES:
            write()
        held[name] = tensor.contiguous()
        total += tensor.nbytes
    write()
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {tensor: file for file, tensors in zip(names, files, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (written / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    for number, name in enumerate(names, start=1):
        (written / f"{number}.part").rename(written / name)


def _compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, written: Path, recipe: Recipe, world: World
) -> None:
    """Load what was written, each rank its rows, and compare weights, end token and logits."""
    asked = replace(recipe, model=str(written), revision=None, init="pretrained", shape=None)
    asked = replace(asked, weights="resident", order="auto", inputs="auto", tile="auto")
    own = next(model.parameters()).device
    device = own if _has_room(model, own, world) else torch.device("cpu")
    with world.in_turn():  # a model's own code is copied into a cache, which another rank must not read meanwhile
        model_class(asked, model.config)
        tokenizer_again = AutoTokenizer.from_pretrained(written, trust_remote_code=recipe.trust_remote_code)
    again = load_for_ranks(asked, model.config, device, world.size, lambda _: None).model
    weights = dict(model.named_parameters())
    for name, weight in again.named_parameters():
        if not torch.equal(local(weight), local(weights[name]).to(device)):
            what = "the exported weight differs from the trained one"
            raise CheckpointError(what, where=f"{written}: {name}", remedy=UNCHECKED)
    if tokenizer_again.eos_token_id != tokenizer.eos_token_id or end_tokens_of(again) != end_tokens_of(model):
        raise CheckpointError("the exported end token differs", where=str(written), remedy=UNCHECKED)
    # As in `export.py`: host and GPU round differently.
    compare_logits(model, again, tokenizer, written, tolerance=2**-8 if device == own else 2**-4)


def _has_room(model: PreTrainedModel, device: torch.device, world: World) -> bool:
    """Whether every rank has room for its rows once more, and for the largest unit as a whole."""
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()
    rows = sum(local(p).nbytes for p in model.parameters())
    whole = max(sum(p.numel() * p.itemsize for p in unit.parameters) for unit in find_decoder(model).units)
    return not world.largest(int(gpu_room(device)[0] < 1.1 * rows + 2 * whole + 2**30))
