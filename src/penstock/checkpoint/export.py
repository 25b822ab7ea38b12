"""A Hugging Face directory that any other program can load, checked before it is called done.

It is written beside its final place, loaded again, compared with the model in memory (every weight to the bit, the
logits, the end token), and only then renamed: a directory that is there is one that works.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from penstock.checkpoint.run_dir import find_model, run_recipe
from penstock.errors import CheckpointError, DoesNotFit, OutputError
from penstock.model.attention import stock_attention

PROBE = "Water flows through the penstock and turns the turbine."


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    shard_size: str = "5GB",
    trust_remote_code: bool = False,
) -> None:
    """Write model and tokenizer to `directory`, which must not exist yet."""
    if directory.exists():
        raise OutputError("there is something already", where=str(directory), remedy="Name another directory.")
    written = directory.with_name(f"{directory.name}.unchecked")
    shutil.rmtree(written, ignore_errors=True)  # of an export that was cut off
    with stock_attention(model):
        try:
            written.mkdir(parents=True)
            model.save_pretrained(written, max_shard_size=shard_size)
            tokenizer.save_pretrained(written)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(written, ignore_errors=True)
            raise DoesNotFit(f"cannot write the model: {error}", where=str(directory)) from error
        _compare(model, tokenizer, written, trust_remote_code)  # if it fails, what was trained is still in `written`
    written.rename(directory)


def export_run(run: Path, directory: Path, *, shard_size: str) -> None:
    """Write the final model of a run to another directory, in shards of another size."""
    source, trust = find_model(run), run_recipe(run).trust_remote_code
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=trust)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    export(model, tokenizer, directory, shard_size=shard_size, trust_remote_code=trust)


def _compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, written: Path, trust_remote_code: bool = False
) -> None:
    """Load `written` again, beside the model or on the host where the GPU has no room, and compare the two."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        num_bytes = sum(p.numel() * p.itemsize for p in model.parameters())
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(device)[0] < 1.1 * num_bytes + 2**30:
            device = torch.device("cpu")
    again = AutoModelForCausalLM.from_pretrained(
        written, dtype=model.dtype, device_map={"": device}, trust_remote_code=trust_remote_code
    )
    weights = dict(model.named_parameters())
    for name, weight in again.named_parameters():
        if not torch.equal(weight, weights[name].to(device)):
            raise CheckpointError("the exported weight differs from the trained one", where=f"{written}: {name}")
    tokenizer_again = AutoTokenizer.from_pretrained(written, trust_remote_code=trust_remote_code)
    ends, ends_again = (m.generation_config.eos_token_id for m in (model, again))
    if tokenizer_again.eos_token_id != tokenizer.eos_token_id or ends_again != ends:
        raise CheckpointError("the exported end token differs", where=str(written))
    ids = torch.tensor([tokenizer(PROBE)["input_ids"]])
    expected, got = _logits(model, ids), _logits(again, ids)
    # Same weights, same code. On one device only the order of additions is left; host and GPU also round differently.
    tolerance = 2**-8 if device == next(model.parameters()).device else 2**-4
    if not torch.allclose(expected, got, rtol=0, atol=float(expected.abs().max()) * tolerance):
        difference = float((expected - got).abs().max())
        raise CheckpointError(f"logits of the exported model differ by {difference:.3g}", where=str(written))


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    was_training = model.training
    model.eval()
    logits: Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()
    model.train(was_training)
    return logits
