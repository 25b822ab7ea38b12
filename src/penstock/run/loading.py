"""What a run has once its weights are loaded: a model, and the engine that will train it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.checkpoint.export import mend_generation
from penstock.checkpoint.fingerprint import model_fingerprint
from penstock.checkpoint.resume import Identity, Saved, check_same_model
from penstock.engine import Engine
from penstock.engine.deepspeed import DeepSpeedEngine
from penstock.engine.deepspeed_start import load_device
from penstock.engine.fsdp import load_for_ranks
from penstock.engine.native import NativeEngine
from penstock.engine.ranks import ALONE, World
from penstock.engine.weights import load_to_stream, streams
from penstock.machine.hardware import describe
from penstock.model.flops import Flops, count_flops
from penstock.model.load import load_model
from penstock.report.console import Console
from penstock.run.ending import memory_advice
from penstock.run.generate import answer
from penstock.run.preparation import Run, Start, check_disk


@dataclass(frozen=True)
class Loaded:
    """An engine with its model, about to begin or to go on."""

    engine: Engine
    identity: Identity
    """What every checkpoint will say of the run."""
    flops: Flops


def load_engine(start: Start, console: Console, world: World, *, resume_anyway: bool) -> Loaded:
    """Load the model, see that it is the checkpoint's, ask it the prompt, and give it to an engine. All ranks do."""
    run, recipe, saved = start.run, start.run.recipe, start.saved
    with console.phase(f"Loading {recipe.model}") as loading, memory_advice(recipe, world.size):
        model, remainders = load(run, console, world)
        loading.num_bytes = sum(p.nbytes for p in model.parameters())
        stop_at(model, end_tokens(run))
        mend_generation(model, console.say)
        fingerprint = model_fingerprint(model, values=recipe.init == "pretrained", remainders=remainders)
        if saved:
            check_same_model(saved, fingerprint, anyway=resume_anyway)
        num_params = sum(p.numel() for p in model.parameters())
        console.say(f"  {num_params / 1e6:,.1f} M parameters on {world.times}{describe(run.device)}")
        flops = flops_of(model, run, world)
    preparing = f"Preparing optimizer state and the first step (mode {recipe.mode})"
    with console.phase(preparing), memory_advice(recipe, world.size):
        engine, before = start_engine(model, remainders, run, saved, console, world)
    check_disk_of(engine, run, start.first_step, world)
    identity = Identity.of(recipe, run.total_steps, run.data.fingerprint, fingerprint, before, model)
    return Loaded(engine, identity, flops)


def flops_of(model: PreTrainedModel, run: Run, world: World) -> Flops:
    """What a token of this run costs each GPU."""
    rows = run.data.train
    return count_flops(
        model,
        row=rows.num_tokens / rows.num_rows,
        recompute=run.recipe.recompute,
        gpus=world.size,
    )


def load(run: Run, console: Console, world: World) -> tuple[PreTrainedModel, dict[nn.Parameter, Tensor]]:
    """The model, or this rank's rows of it, and what its weights lost in rounding if that is known already."""
    if not world.many or run.recipe.engine == "deepspeed":
        if streams(run.recipe):
            return load_to_stream(run.recipe, run.config, run.device, console.say), {}
        return load_model(run.recipe, run.config, load_device(run.recipe, run.device, world), console.say), {}
    own = load_for_ranks(run.recipe, run.config, run.device, world.size, console.say)
    return own.model, own.remainders


def end_tokens(run: Run) -> set[int]:
    """The tokens that end the responses of the data: special ones that are trained on last."""
    store, tokenizer = run.data.train.store, run.tokenizer
    special = set(tokenizer.all_special_ids)
    special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    examples = (store.example(i) for i in range(min(len(store), 256)))
    return {int(ids[mask.nonzero()[0][-1]]) for ids, mask in examples} & special


def stop_at(model: PreTrainedModel, ends: set[int]) -> None:
    """Let generation stop where the model is taught to: a chat template may end turns with another token than eos."""
    config = model.generation_config
    assert config is not None, "a causal model has a generation config"
    known = config.eos_token_id
    known = {known} if isinstance(known, int) else set(known or ())
    if not ends <= known:
        config.eos_token_id = sorted(known | ends)


def start_engine(
    model: PreTrainedModel,
    remainders: dict[nn.Parameter, Tensor],
    run: Run,
    saved: Saved | None,
    console: Console,
    world: World,
) -> tuple[Engine, str]:
    """The engine, and what the model says before training. DeepSpeed cuts the weights, so that it is asked first."""

    def say(text: str) -> None:
        console.say(f"  {text}")

    if run.recipe.engine == "deepspeed":
        before = answer_before(model, run, saved) if world.first else ""
        return DeepSpeedEngine(model, run.recipe, say, world), before
    examples = run.data.train.most_examples(run.recipe.rows_on(world.size))
    engine = NativeEngine(model, run.recipe, say, world, remainders, run.device, examples)
    with engine.packed.as_exported():
        return engine, answer_before(model, run, saved)


def answer_before(model: PreTrainedModel, run: Run, saved: Saved | None) -> str:
    """What the model says before training; after a resume, what it said then."""
    prompt = run.recipe.prompt
    if saved:
        return saved.before if saved.recipe.get("prompt") == prompt else ""
    return answer(model, run.tokenizer, run.recipe, prompt) if prompt else ""


def check_disk_of(engine: Engine, run: Run, first_step: int, world: World = ALONE) -> None:
    """Before the first step, see that there is room for all that the run will write. All ranks take part."""
    sizes = {group: sum(t.num_bytes for t in tensors) for group, tensors in engine.saved_tensors().items()}
    checkpoint_bytes = sum(sizes.values())
    if not engine.rows_on_ranks:  # each rank has tensors of its own
        checkpoint_bytes = int(world.total(torch.tensor(checkpoint_bytes)))
    world.share(lambda: check_disk(run, first_step, checkpoint_bytes, sizes["weights"]))
