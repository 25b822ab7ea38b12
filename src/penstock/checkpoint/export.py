"""A Hugging Face directory that any other program can load, checked before it is called done.

It is written beside its final place, loaded again, compared with the model in memory (every weight to the bit, the
logits, the end token), and only then renamed: a directory that is there is one that works.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from penstock.checkpoint.run_dir import find_model
from penstock.errors import CheckpointError, DoesNotFit, OutputError
from penstock.model.attention import stock_attention

PROBE = "Water flows through the penstock and turns the turbine."


def export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, *, shard_size: str = "5GB"
) -> None:
    """Write model and tokenizer to `directory`, which must not exist yet."""
    if directory.exists():
        raise OutputError("there is something already", where=str(directory), remedy="Name another directory.")
    written = directory.with_name(f".{directory.name}.{os.getpid()}")
    written.mkdir(parents=True)
    try:
        with stock_attention(model):
            model.save_pretrained(written, max_shard_size=shard_size)
            tokenizer.save_pretrained(written)
            _compare(model, tokenizer, written)
        written.rename(directory)
    except OSError as error:
        raise DoesNotFit(f"cannot write the model: {error}", where=str(directory)) from error
    finally:
        shutil.rmtree(written, ignore_errors=True)


def export_run(run: Path, directory: Path, *, shard_size: str) -> None:
    """Write the final model of a run to another directory, in shards of another size."""
    source = find_model(run)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    export(model, AutoTokenizer.from_pretrained(source), directory, shard_size=shard_size)


def _compare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, written: Path) -> None:
    """Load `written` again and compare it with what is in memory."""
    device = next(model.parameters()).device
    again = AutoModelForCausalLM.from_pretrained(written, dtype=model.dtype, device_map={"": device})
    weights = dict(model.named_parameters())
    for name, weight in again.named_parameters():
        if not torch.equal(weight, weights[name]):
            raise CheckpointError("the exported weight differs from the trained one", where=f"{written}: {name}")
    tokenizer_again = AutoTokenizer.from_pretrained(written)
    ends, ends_again = (m.generation_config.eos_token_id for m in (model, again))
    if tokenizer_again.eos_token_id != tokenizer.eos_token_id or ends_again != ends:
        raise CheckpointError("the exported end token differs", where=str(written))
    ids = torch.tensor([tokenizer(PROBE)["input_ids"]], device=device)
    expected, got = _logits(model, ids), _logits(again, ids)
    # Same weights, same code: what is left is the order of additions, far under one bf16 rounding of the largest logit.
    if not torch.allclose(expected, got, rtol=0, atol=float(expected.abs().max()) * 2**-8):
        difference = float((expected - got).abs().max())
        raise CheckpointError(f"logits of the exported model differ by {difference:.3g}", where=str(written))


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    was_training = model.training
    model.eval()
    logits: Tensor = model(input_ids=ids, use_cache=False).logits.float()
    model.train(was_training)
    return logits
