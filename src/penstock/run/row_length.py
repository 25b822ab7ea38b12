"""How long rows are where nobody has said it (`max_length = 0`): as long as the data needs, the model takes, and fits.

`train`, `data`, `plan` and `bench` all ask here, so that they agree. A fixed default was rejected: 4,096 tokens make
one step out of a few hundred short examples, and do not fit a small GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from penstock.data.loader import open_sources
from penstock.data.store import open_store
from penstock.errors import UserError, counted
from penstock.machine.known import Machine
from penstock.model.load import load_config, load_tokenizer
from penstock.model.rope import positions_of
from penstock.plan.report import job_on, limited
from penstock.plan.solve import Free, solve
from penstock.recipe.recipe import Recipe

LONGEST = 4096
"""Tokens that nobody gets without asking for more."""
SHORTEST = 512
"""Rows are not made shorter than that to fit: what does not fit then is refused with advice."""
MULTIPLE = 64
"""Lengths that kernels like."""

Say = Callable[[str], None]


def with_length(
    recipe: Recipe,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    machine: Machine,
    gpus: int,
    say: Say,
) -> Recipe:
    """The recipe with a length, and with fewer rows at once where that is what makes it fit."""
    if recipe.max_length:
        return recipe
    text = config.get_text_config()
    most = min(LONGEST, positions_of(config) or LONGEST)
    trial, longest = replace(recipe, max_length=most), 0
    for source in open_sources(recipe, say, describe=lambda _: None):
        longest = max(longest, open_store(source, tokenizer, trial, text.vocab_size, say).counts.longest)
    wanted = max(2, min(most, -(-longest // MULTIPLE) * MULTIPLE))
    chosen = _fitting(replace(recipe, max_length=wanted), machine, gpus)
    why = f"the longest example has {longest:,}"
    if chosen.max_length < wanted:
        why += f", and {wanted:,} do not fit the memory"
    elif longest > most:
        why += f", and {most:,} is {'what the model takes' if most < LONGEST else 'the most that is taken unasked'}"
    say(f"  rows of {chosen.max_length:,} tokens ({why}); --max-length sets it")
    if chosen.micro_batch_size != recipe.micro_batch_size:
        say(f"  {counted(chosen.micro_batch_size, 'row')} at once, so that it fits; --micro-batch-size sets it")
    return chosen


def with_length_if_known(recipe: Recipe, machine: Machine, gpus: int, say: Say) -> Recipe:
    """The same for `plan` and `bench`, which need neither data nor a tokenizer: without them the length is assumed."""
    if recipe.max_length:
        return recipe
    try:
        if not recipe.data:
            raise _NoData
        return with_length(recipe, load_config(recipe), load_tokenizer(recipe), machine, gpus, say)
    except (UserError, _NoData) as error:
        why = "no --data is named" if isinstance(error, _NoData) else str(error).splitlines()[0]
        say(f"  rows of {LONGEST:,} tokens are assumed ({why}); `train` takes the length from the data")
        return replace(recipe, max_length=LONGEST)


class _NoData(Exception):
    """There is nothing to look at."""


def _fitting(recipe: Recipe, machine: Machine, gpus: int) -> Recipe:
    """Fewer rows at once before shorter rows: the first keeps every example whole. As it is, if nothing fits."""
    machine = limited(machine, recipe)
    try:
        for candidate in _candidates(recipe, gpus):
            free = Free(candidate.states, candidate.rows_on(gpus), _word(candidate))
            if solve(job_on(candidate, machine), machine, gpus, free) is not None:
                return candidate
    except UserError:  # a model whose numbers the plan does not know
        pass
    return recipe


def _candidates(recipe: Recipe, gpus: int) -> Iterator[Recipe]:
    length = recipe.max_length
    while True:
        yield replace(recipe, max_length=length)
        rows = 0 if recipe.micro_batch_size else recipe.rows_on(gpus)
        while rows > 1:
            rows //= 2
            yield replace(recipe, max_length=length, micro_batch_size=rows)
        if length // 2 < SHORTEST:
            return
        length //= 2


def _word(recipe: Recipe) -> str | None:
    return None if recipe.recompute == "auto" else recipe.recompute
