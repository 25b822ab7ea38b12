"""A Hugging Face directory that any other program can load, checked before it is called done.

It is written beside its final place, loaded again, compared with the model in memory (every weight to the bit, the
logits, the end token), and only then renamed: a directory that is there is one that works.
"""

from __future__ import annotations

import copy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_relative_import_files

from penstock.checkpoint.lock import is_claimed
from penstock.checkpoint.places import CHECKPOINTS, NEWEST, Place, check_free, find_place
from penstock.checkpoint.resume import Saved, TakesCheckpoint, find_saved, verify_saved
from penstock.checkpoint.run_dir import find_model, run_recipe
from penstock.checkpoint.store import Checkpoint, check_links, find, open_checkpoint, read_tensors, verify
from penstock.checkpoint.sums import check_sums, write_sums
from penstock.errors import DISK_IS_FULL, CheckpointError, Diverged, DoesNotFit, OutputError, RecipeError, UserError
from penstock.machine.disk import FILE_LIMIT, file_limit, hits_file_limit
from penstock.machine.gpu_memory import gpu_room
from penstock.machine.known import parse_bytes
from penstock.model.attention import stock_attention
from penstock.model.load import load_config, load_model, load_tokenizer
from penstock.offload.saved_tensors import weight_tensors
from penstock.recipe.recipe import Recipe, with_values

NOTHING_LEFT = "Nothing of it was left behind."
NO_ROOM = f"Free space there, or write it elsewhere: `penstock export RUN --to DIR`. {NOTHING_LEFT}"
SMALLER_FILES = f"`penstock export RUN --to DIR --shard-size 1GB` writes smaller ones. {NOTHING_LEFT}"
UNCHECKED = (
    "What was written is left there, and checkpoints are untouched. Try `penstock export RUN --to DIR`; if it says so "
    "again, please report it with the name of the model."
)
PROBE = "Water flows through the penstock and turns the turbine."


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    file_size: str = "5GB",
    trust_remote_code: bool = False,
) -> None:
    """Write model and tokenizer to `directory`, which must not exist yet."""
    file_bytes = parse_bytes(file_size, "--shard-size")
    written = directory.with_name(f"{directory.name}.unchecked")
    make_place(directory, written)
    with stock_attention(model):
        try:
            write_code(type(model), model.config, written)
            model.save_pretrained(written, max_shard_size=file_bytes)
            tokenizer.save_pretrained(written)
            make_readable(written)
            write_sums(written)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(written, ignore_errors=True)
            raise not_written(directory, error) from error
        _compare(model, tokenizer, written, trust_remote_code)  # if it fails, what was trained is still in `written`
    written.rename(directory)


def make_place(directory: Path, written: Path) -> None:
    """Make `written`, beside `directory`, which must not exist yet."""
    check_free(directory)
    shutil.rmtree(written, ignore_errors=True)  # of an export that was cut off
    try:
        written.mkdir(parents=True)
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", "Write it elsewhere: `penstock export RUN --to DIR`."
        if error.errno in DISK_IS_FULL:
            raise DoesNotFit(what, where=str(directory), remedy=NO_ROOM) from error
        raise OutputError(what, where=str(directory), remedy=remedy) from error


def not_written(directory: Path, error: Exception) -> DoesNotFit:
    """What to say of a model that could not be written, and is removed again as far as it was."""
    remedy = NO_ROOM
    if hits_file_limit(error):
        limit = file_limit()
        helps = limit is None or limit > 2**30
        remedy = f"{FILE_LIMIT} {SMALLER_FILES}" if helps else f"{FILE_LIMIT} {NOTHING_LEFT}"
    return DoesNotFit(f"cannot write the model: {error}", where=str(directory), remedy=remedy)


def make_readable(written: Path) -> None:
    """Give every file the mode that this user's files have: safetensors makes its own so that nobody else can read."""
    mode = (written / "config.json").stat().st_mode
    for path in written.iterdir():
        path.chmod(mode & 0o777)


def write_code(kind: type[PreTrainedModel], config: PreTrainedConfig, directory: Path) -> None:
    """Write the code of a model that brings its own. `save_pretrained` would only for a class that AutoModel found."""
    if not kind.__module__.startswith("transformers_modules"):
        return
    source = sys.modules[kind.__module__].__file__
    assert source is not None, "its code was read from a file"
    for file in (source, *get_relative_import_files(source)):
        shutil.copyfile(file, directory / Path(file).name)
    named = f"{Path(source).stem}.{kind.__name__}"
    config.auto_map = {**(getattr(config, "auto_map", None) or {}), "AutoModelForCausalLM": named}


def mend_generation(model: PreTrainedModel, say: Callable[[str], None]) -> None:
    """Make the generation config one that transformers agrees to save: some old models have one that it only reads.

    Found out when the model is exported, this would cost the training. Leaving the file out was rejected: the model
    would not know where to end.
    """
    config = model.generation_config
    if config is None or _can_be_saved(config):
        return
    mended = copy.deepcopy(config)
    if isinstance(mended.pad_token_id, int) and mended.pad_token_id < 0:
        mended.pad_token_id = None
    sampling = copy.deepcopy(mended)
    sampling.do_sample = True  # who sets a temperature means it
    tokens = {name: getattr(mended, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    found = next(c for c in (mended, sampling, GenerationConfig(**tokens)) if _can_be_saved(c))
    what = "do_sample is set" if found is sampling else "no pad token" if found is mended else "only its tokens"
    say(f"  transformers would not save the model's generation config: mended ({what})")
    model.generation_config = found


def _can_be_saved(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except (TypeError, ValueError):
        return False
    return True


def export_from(path: Path, directory: Path, *, file_size: str, say: Callable[[str], None]) -> None:
    """Write the model of a run, a checkpoint or a Hugging Face directory to another one, in files of another size."""

    def command(other: Path) -> str:
        return shlex.join(["penstock", "export", str(other), "--to", str(directory)])

    opened = open_model(find_place(path), say, command)
    mend_generation(opened.model, say)
    trust = opened.recipe.trust_remote_code
    export(opened.model, opened.tokenizer, directory, file_size=file_size, trust_remote_code=trust)


@dataclass(frozen=True)
class Opened:
    """A model that was trained, its tokenizer, and how it was trained as far as that is known."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe


def open_model(
    place: Place, say: Callable[[str], None], command: TakesCheckpoint, device: torch.device | None = None
) -> Opened:
    """The final model of a run, or its newest if it did not end; that of a checkpoint; or one that lies there.

    `command` is what is advised with another checkpoint, if this one is damaged.
    """
    path, saved = place.path, None
    recipe = run_recipe(path) if place.kind == "run" else Recipe(model=str(path))
    if place.kind == "run" and not (path / "model").exists():
        saved = find_saved(path, NEWEST, command)
        if saved:
            state = "is still going on" if is_claimed(path) else "did not end"
            say(f"The run {state}: taking the model of step {saved.step:,}, its newest checkpoint")
    elif place.kind == "checkpoint":
        saved = find_saved(path, str(path), command)
        recipe = with_values(Recipe(), dict(saved.recipe) if saved else {}, where=str(path))
    if saved:
        with _not_removed(saved.checkpoint.path):
            verify_saved(saved, say, command)
            model = saved_model(saved, recipe, say)
        if device is not None:
            torch.nn.Module.to(model, device)
        return Opened(model, load_tokenizer(recipe), recipe)
    source = path if place.kind == "model" else find_model(path)
    where = {} if device is None else {"device_map": {"": device}}
    trust = {"trust_remote_code": recipe.trust_remote_code}
    check_sums(source, say, _write_again(place, source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **trust)
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **where, **trust)
    except Exception as error:  # transformers and tokenizers raise many kinds for a bad file
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        told = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        what = f"the exported model cannot be loaded: {told}"
        raise CheckpointError(what, where=str(source), remedy=_write_again(place, source)) from error
    return Opened(model, tokenizer, recipe)


def _write_again(place: Place, source: Path) -> str:
    if place.kind == "model":
        return "Write it again, or name a run or a checkpoint."
    run, model = shlex.quote(str(place.path)), shlex.quote(str(source))
    return f"Remove {source}; `penstock export {run} --to {model}` makes it from the newest checkpoint."


@contextmanager
def _not_removed(path: Path) -> Iterator[None]:
    """A run that is still going on removes older checkpoints, perhaps the one that is being read."""
    try:
        yield
    except (OSError, EOFError, UserError):
        if path.exists():
            raise
        what = "was removed while it was read: a run that is going on keeps only its newest ones"
        remedy = f"Give the command again with {path.parents[1]}: it takes the newest one."
        raise CheckpointError(what, where=str(path), remedy=remedy) from None


def saved_model(saved: Saved, recipe: Recipe, say: Callable[[str], None]) -> PreTrainedModel:
    """The model of a checkpoint whose bytes were checked, on the host."""
    config = load_config(recipe)
    model = load_model(replace(recipe, init="random"), config, torch.device("cpu"), say)  # made to be written over
    model.generation_config = GenerationConfig.from_dict(dict(saved.generation))
    read_tensors(saved.checkpoint, "weights", weight_tensors(model), say)
    return model


@dataclass(frozen=True)
class Verified:
    """What was found to be whole."""

    checkpoints: list[Checkpoint]
    model: Path | None
    """None where there is none, or where it has no checksums."""


def verify_all(path: Path, say: Callable[[str], None]) -> Verified:
    """Check a checkpoint, a model, or all that a run has of both. Damage is an error, after all were looked at."""
    place = find_place(path)
    model = {"run": path / "model", "model": path}.get(place.kind)
    whole, damaged = list[Checkpoint](), list[CheckpointError]()
    if model is not None:
        try:
            model = model if check_sums(model, say, _write_again(place, model)) else None
        except CheckpointError as error:
            say(f"  damaged: {error.where}")
            damaged.append(error)
    if place.kind == "model":
        if damaged:
            raise damaged[0]
        if model is None:
            remedy = "Name a run or a checkpoint, or a model that Penstock wrote."
            raise RecipeError("is a model without checksums", where=f"--verify {path}", remedy=remedy)
        return Verified([], model)
    check_links(place.path / CHECKPOINTS)
    for path in [place.path] if place.kind == "checkpoint" else find(place.path / CHECKPOINTS):
        try:
            with _not_removed(path):
                checkpoint = open_checkpoint(path)
                say(f"Checking {checkpoint.path}: {checkpoint.num_bytes / 1e9:,.2f} GB")
                verify(checkpoint, say)
            whole.append(checkpoint)
        except CheckpointError as error:
            if place.kind == "run" and not path.exists():
                say(f"  {error.where}: {error.what}")
                continue
            say(f"  damaged: {error.where}")
            damaged.append(error)
    if damaged:
        told = f" Whole: {', '.join(str(found.path) for found in whole) or 'none'}."
        raise CheckpointError(damaged[0].what, where=damaged[0].where, remedy=damaged[0].remedy + told)
    return Verified(whole, model)


def _compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, written: Path, trust_remote_code: bool = False
) -> None:
    """Load `written` again, beside the model or on the host where the GPU has no room, and compare the two."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        num_bytes = sum(p.numel() * p.itemsize for p in model.parameters())
        torch.cuda.empty_cache()
        if gpu_room(device)[0] < 1.1 * num_bytes + 2**30:
            device = torch.device("cpu")
    again = AutoModelForCausalLM.from_pretrained(
        written,
        dtype=model.dtype,
        device_map={"": device},
        attn_implementation=model.config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    weights = dict(model.named_parameters())
    for name, weight in again.named_parameters():
        if not torch.equal(weight, weights[name].to(device)):
            what = "the exported weight differs from the trained one"
            raise CheckpointError(what, where=f"{written}: {name}", remedy=UNCHECKED)
    tokenizer_again = AutoTokenizer.from_pretrained(written, trust_remote_code=trust_remote_code)
    if tokenizer_again.eos_token_id != tokenizer.eos_token_id or end_tokens_of(again) != end_tokens_of(model):
        raise CheckpointError("the exported end token differs", where=str(written), remedy=UNCHECKED)
    # Same weights, same code. On one device only the order of additions is left; host and GPU also round differently.
    compare_logits(
        model, again, tokenizer, written, tolerance=2**-8 if device == next(model.parameters()).device else 2**-4
    )


def compare_logits(
    model: PreTrainedModel,
    again: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    written: Path,
    *,
    tolerance: float = 2**-8,
) -> None:
    """Refuse a model that was loaded from `written` and answers otherwise, and one whose numbers are no numbers."""
    ids = torch.tensor([tokenizer(PROBE)["input_ids"]])
    expected, got = logits_of(model, ids), logits_of(again, ids)
    if not expected.isfinite().all():
        remedy = "Its weights are left there. Go on from an older checkpoint with a lower --lr or --weight-decay."
        raise Diverged("what the model computes is not finite", where=str(written), remedy=remedy)
    if not torch.allclose(expected, got, rtol=0, atol=float(expected.abs().max()) * tolerance):
        difference = float((expected - got).abs().max())
        what = f"logits of the exported model differ by {difference:.3g}"
        raise CheckpointError(what, where=str(written), remedy=UNCHECKED)


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits in fp32 on the host, without dropout."""
    was_training = model.training
    model.eval()
    logits: Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()
    model.train(was_training)
    return logits


def end_tokens_of(model: PreTrainedModel) -> object:
    """The tokens at which generation stops."""
    return model.generation_config.eos_token_id if model.generation_config is not None else None
