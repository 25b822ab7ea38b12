"""From a position to the micro-batches of a step.

The whole state of the loader is a position: the epoch and how many of its rows have been used. The order of rows is a
function of (seed, epoch), so any step is found at once; resuming a run costs nothing. Rejected: an iterator with hidden
state, which resumes by reading everything up to where it was, and worker processes, whose prefetched batches are in
nobody's checkpoint. A step's rows are slices of memory maps; building 16,000 tokens takes about a millisecond.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.data.cost import BY_TOKENS, Floats, TokenFlops, deal, step_costs
from penstock.data.folders import is_folder, open_folder
from penstock.data.forms import Format
from penstock.data.packing import Ints, Packing, one_a_row, pack_best_fit, pack_in_order
from penstock.data.rows import Source
from penstock.data.source import Reading, open_source, refuse_without_text
from penstock.data.store import Store, notes, open_store
from penstock.data.template import pad_id
from penstock.errors import DataError, RecipeError
from penstock.recipe.lists import parse_parts, path_of
from penstock.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a random draw is for; part of its seed, so that no two draws are the same.
_ROW_ORDER, _TIE_ORDER, _SHARE, _HELD_OUT, _MIXTURE = range(5)
EPOCHS_AHEAD = 20
"""After the one that is going on, whose steps are looked at one by one to say how long they will take."""
_SELECTING_FIELDS = ("data_percent", "validation", "packing", "shuffle", "seed", "max_length")


def _permutation(n: int, seed: int, purpose: int, epoch: int = 0) -> Ints:
    return np.random.Generator(np.random.PCG64([seed, purpose, epoch])).permutation(n)


@dataclass(frozen=True)
class Position:
    """Where a run stands in its data: rows used of an epoch. This is the whole resume state."""

    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together."""

    input_ids: Tensor
    """int64 [rows, length], padded at the end of each row."""
    position_ids: Tensor
    """int64 [rows, length]; starts at 0 in every example, and in the padding after a row."""
    boundaries: tuple[int, ...]
    """Ends of the segments over the flattened rows, from 0 on. A segment is an example or a row's padding; attention
    never crosses a boundary."""
    target_index: Tensor
    """int64 [n]: flat index of each place whose next token, in the same example, is trained on."""
    targets: Tensor
    """int64 [n]: those next tokens."""
    num_tokens: int
    """Tokens without padding."""
    num_trained: int
    """Tokens that are trained on, n."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device."""
        tensors = ("input_ids", "position_ids", "target_index", "targets")
        moved = {name: getattr(self, name) for name in tensors}
        if torch.device(device).type == "cuda":  # from pageable memory the copy would wait for all work queued there
            moved = {name: tensor.pin_memory() for name, tensor in moved.items()}
        return dataclasses.replace(self, **{n: t.to(device, non_blocking=True) for n, t in moved.items()})


class Loader:
    """Rows of examples, in the order of each epoch."""

    def __init__(
        self,
        store: Store,
        packing: Packing,
        *,
        batch_size: int,
        rows_at_once: int,
        pad_id: int,
        seed: int | None,
        fixed_length: int = 0,
        flops: TokenFlops = BY_TOKENS,
    ) -> None:
        """Without a seed, rows come in their own order in every epoch.

        With `fixed_length` every micro-batch has the same shape, as compiled layers want it: rows of that length, and
        empty rows where there are too few. Without, rows are as long as the longest of their micro-batch.
        """
        self.store, self.packing, self._fixed_length, self._flops = store, packing, fixed_length, flops
        self._batch_size, self._rows_at_once, self._pad_id, self._seed = batch_size, rows_at_once, pad_id, seed
        self._order = (-1, np.empty(0, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return len(self.packing)

    @property
    def num_examples(self) -> int:
        """Examples in an epoch."""
        return len(self.packing.examples)

    @property
    def num_tokens(self) -> int:
        """Tokens in an epoch, without padding."""
        return int(self.store.lengths[self.packing.examples].sum())

    @property
    def num_trained(self) -> int:
        """Tokens that an epoch trains on."""
        return int(self.store.trained[self.packing.examples].sum())

    def most_examples(self, rows: int) -> int:
        """Of so many rows, with the padding of each as one more."""
        return rows * (int(np.diff(self.packing.offsets).max()) + 1)

    def steps_per_epoch(self) -> int:
        """Steps in an epoch; the last may be smaller."""
        return math.ceil(self.num_rows / self._batch_size)

    def step_at(self, position: Position, rank: int = 0, ranks: int = 1) -> tuple[list[MicroBatch], Position]:
        """The micro-batches of the step at a position, and the position of the next step.

        The last step of an epoch may have fewer rows. Several ranks share them by cost (`deal`); all get the same
        number of micro-batches, since a rank that runs one less would leave the others waiting. A rank that has no rows
        left for its last one gets padding, which trains nothing.
        """
        assert 0 <= position.row < self.num_rows, f"{position} is not in an epoch of {self.num_rows} rows"
        step = self._rows(position.epoch)[position.row : position.row + self._batch_size]
        (dealt,) = self._deal(step[None], ranks)
        batches = [self._micro_batch(rows[rows >= 0], dealt.shape[2]) for rows in dealt[:, rank]]
        after = position.row + len(step)
        return batches, Position(position.epoch, after) if after < self.num_rows else Position(position.epoch + 1, 0)

    def counts_at(self, position: Position) -> tuple[int, int, float]:
        """Of the whole step at a position, what all ranks have together: tokens, and tokens that are trained on.

        Then tokens of the example that a token is in, on average: attention stays inside it.
        """
        step = self._rows(position.epoch)[position.row : position.row + self._batch_size]
        examples = np.concatenate([self.packing.row(r) for r in step])
        lengths = self.store.lengths[examples]
        tokens = int(lengths.sum())
        return tokens, int(self.store.trained[examples].sum()), float(np.square(lengths).sum() / tokens)

    def costs_from(self, position: Position, steps: int, ranks: int = 1) -> Floats:
        """FLOPs of each of so many steps from a position on, as long as they take beside each other (`step_costs`).

        Those of distant epochs are the mean of the nearer ones.
        """
        found, epoch, row = [np.empty(0)], position.epoch, position.row
        while steps > 0:
            if epoch - position.epoch > EPOCHS_AHEAD:
                found.append(np.full(steps, np.concatenate(found).mean()))
                break
            rows = self._rows(epoch)[row:][: steps * self._batch_size]
            missing = -len(rows) % self._batch_size
            by_step = np.pad(rows, (0, missing), constant_values=-1).reshape(-1, self._batch_size)
            dealt = self._deal(by_step, ranks)
            found.append(step_costs(dealt, self._lengths, self._pairs, self._flops, self._fixed_length))
            steps, epoch, row = steps - len(by_step), epoch + 1, 0
        return np.concatenate(found)

    def row_flops(self) -> tuple[Floats, Floats]:
        """FLOPs of every row without padding: of products, and of attention."""
        return self._lengths * np.float64(self._flops.products), self._flops.pair * self._pairs

    def _deal(self, steps: Ints, ranks: int) -> Ints:
        at_once = min(self._rows_at_once, math.ceil(self._batch_size / ranks))
        return deal(steps, self._costs, ranks, at_once)

    @cached_property
    def _costs(self) -> Floats:
        """FLOPs of every row; with its padding, where that does not depend on other rows."""
        places = np.maximum(self._lengths, self._fixed_length)
        pairs = self._pairs + self._flops.pairs(places - self._lengths)
        return places * np.float64(self._flops.products) + self._flops.pair * pairs

    @cached_property
    def _lengths(self) -> Ints:
        return self.packing.row_lengths(self.store.lengths)

    @cached_property
    def _pairs(self) -> Floats:
        """Of every row: what its examples attend to."""
        return np.add.reduceat(self._flops.pairs(self.store.lengths[self.packing.examples]), self.packing.offsets[:-1])

    def __iter__(self) -> Iterator[MicroBatch]:
        """Every micro-batch of the first epoch, as an evaluation wants them."""
        return self.of_rank(0, 1)

    def of_rank(self, rank: int, ranks: int) -> Iterator[MicroBatch]:
        """The same, for one of several ranks."""
        position = Position()
        while position.epoch == 0:
            batches, position = self.step_at(position, rank, ranks)
            yield from batches

    def _rows(self, epoch: int) -> Ints:
        if self._order[0] != epoch:
            n = self.num_rows
            order = np.arange(n) if self._seed is None else _permutation(n, self._seed, _ROW_ORDER, epoch)
            self._order = (epoch, order)
        return self._order[1]

    def _micro_batch(self, rows: Ints, at_once: int) -> MicroBatch:
        store, num_rows = self.store, at_once if self._fixed_length else max(1, len(rows))
        in_row = [self.packing.row(r) for r in rows]
        examples = np.concatenate([*in_row, np.empty(0, dtype=np.int64)])
        row = np.repeat(np.arange(len(rows)), [len(e) for e in in_row])
        lengths = store.lengths[examples]
        starts = np.cumsum(lengths) - lengths  # of the examples, if they lay one after another without padding
        row_lengths = np.bincount(row, weights=lengths, minlength=num_rows).astype(np.int64)
        length = self._fixed_length or max(1, int(row_lengths.max()))
        starts_in_batch = starts + row * length - (np.cumsum(row_lengths) - row_lengths)[row]
        place = np.arange(lengths.sum()) - np.repeat(starts, lengths)  # of every token in its example
        target = np.repeat(starts_in_batch, lengths) + place
        source = np.repeat(store.offsets[examples], lengths) + place
        ids, trained = store.ids[source].astype(np.int64), store.mask[source] == 1
        input_ids = np.full(num_rows * length, self._pad_id, dtype=np.int64)
        input_ids[target] = ids
        position_ids = np.zeros(num_rows * length, dtype=np.int64)  # padding too: `longrope` looks for the largest
        position_ids[target] = place
        row_ends = np.arange(num_rows + 1) * length
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids.reshape(num_rows, length)),
            position_ids=torch.from_numpy(position_ids.reshape(num_rows, length)),
            boundaries=tuple(np.union1d(row_ends, starts_in_batch + lengths).tolist()),
            # The first token of an example is never trained on, so the place before a trained one is in its example.
            target_index=torch.from_numpy(target[trained] - 1),
            targets=torch.from_numpy(ids[trained]),
            num_tokens=len(ids),
            num_trained=int(trained.sum()),
        )


@dataclass(frozen=True)
class Dataset:
    """What a run trains and evaluates on."""

    train: Loader
    evaluation: Loader | None
    fingerprint: str
    """Changes with anything that changes a step's examples; a resumed run must find the same."""

    @property
    def data_format(self) -> Format | None:
        """The form that the training rows were found to have; None if parts of them differ."""
        return self.train.store.data_format


def prepare(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    say: Callable[[str], None],
    flops: TokenFlops = BY_TOKENS,
) -> Dataset:
    """Read, tokenize, choose and pack the data of a recipe. `vocab_size` is the number of rows of the embedding."""

    def store_of(source: Source) -> Store:
        store = open_store(source, tokenizer, recipe, vocab_size, say)
        for line in notes(store):
            say(f"{source.name}: {line}")
        return store

    source, *evaluated = open_sources(recipe, say, describe=say)
    store = store_of(source)
    weights = [part.weight for part in parse_parts(recipe.data) or ()]
    chosen = _choose_share(mix(store.parts, weights, recipe, say), recipe, say)
    eval_store, held_out = store, np.empty(0, dtype=np.int64)
    if evaluated:
        eval_store = store_of(evaluated[0])
        held_out = np.arange(len(eval_store))
    elif recipe.validation:
        chosen, held_out = _hold_out(chosen, recipe)
    filler = pad_id(tokenizer)
    filler = filler if filler < vocab_size else 0  # a padding token that was added has no row of its own; any id does
    sizes = {"batch_size": recipe.batch_size, "rows_at_once": recipe.rows_at_once, "pad_id": filler}
    seed = recipe.seed if recipe.shuffle else None
    fixed_length = recipe.max_length if recipe.compile else 0
    train = Loader(store, _pack(store, chosen, recipe), **sizes, seed=seed, fixed_length=fixed_length, flops=flops)
    evaluation = None
    if len(held_out):
        packing = one_a_row(held_out)
        if recipe.packing:
            packing = pack_best_fit(eval_store.lengths, held_out, recipe.max_length)
        evaluation = Loader(eval_store, packing, **sizes, seed=None, flops=flops)
    parts = [store.key, eval_store.key, weights, [getattr(recipe, name) for name in _SELECTING_FIELDS]]
    return Dataset(train, evaluation, hashlib.sha256(json.dumps(parts).encode()).hexdigest())


def open_sources(recipe: Recipe, say: Callable[[str], None], describe: Callable[[str], None]) -> list[Source]:
    """What is trained on, and what is evaluated on if it is something else. `describe` is told of directories."""
    reading = Reading(recipe.split_documents, recipe.data_stream)
    evaluated, split = evaluation_of(recipe, describe)
    if recipe.eval_every and not (evaluated or recipe.validation):
        remedy = "Hold examples out with --validation 0.05, or name a file with --eval-data."
        raise RecipeError("there is nothing to evaluate on", where=f"eval_every = {recipe.eval_every}", remedy=remedy)
    opened = [open_source(recipe.data, recipe.data_split, say, reading)]
    if evaluated:
        opened.append(open_source(evaluated, split, say, reading))
    if recipe.split_documents in ("lines", "blank-lines"):
        refuse_without_text(opened, recipe.split_documents)
    return opened


def evaluation_of(recipe: Recipe, say: Callable[[str], None]) -> tuple[str, str]:
    """What to evaluate on, as (name, split): what the recipe names, else another split of a directory that is alone."""
    names = [part.name for part in parse_parts(recipe.data) or ()]
    paths = {name: path_of(name) for name in names if name != "demo"}
    folders = {name: open_folder(path) for name, path in paths.items() if is_folder(path)}
    own = ""
    if folders and len(names) == 1 and not (recipe.eval_data or recipe.validation):
        own = folders[names[0]].evaluation(recipe.data_split, recipe.eval_split)
    for folder in folders.values():
        folder.choose(recipe.data_split)  # what is refused is not described first
    named = {part.name for part in parse_parts(recipe.eval_data or "") or ()}
    for name, folder in folders.items():
        if len(folder.splits) > 1:
            say(folder.describe(recipe.data_split, recipe.eval_split if name in named else own))
    return (recipe.data, own) if own else (recipe.eval_data or "", recipe.eval_split)


def mix(sizes: Sequence[int], weights: Sequence[float | None], recipe: Recipe, say: Callable[[str], None]) -> Ints:
    """The examples that the shares of a mixture leave, in their order; without shares all.

    As many as there can be without one twice: the part that is smallest for its share is taken whole. Repeating small
    parts was rejected: that is a choice of epochs, which should be seen in the recipe.
    """
    shares = [weight for weight in weights if weight is not None]
    if not shares or len(sizes) < 2:
        return np.arange(sum(sizes))
    names = [part.name for part in parse_parts(recipe.data) or ()]
    if 0 in sizes:
        remedy = "Why its rows were dropped is said above: mend them, or leave the file and its share out."
        raise DataError(f"no example is left of {names[sizes.index(0)]}", where=recipe.data, remedy=remedy)
    whole = min(size / share for size, share in zip(sizes, shares, strict=True))
    taken, start = list[Ints](), 0
    for number, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        keep = min(size, max(1, round(whole * share)))
        order = _permutation(size, recipe.seed, _MIXTURE, number) if recipe.shuffle else np.arange(size)
        taken.append(start + np.sort(order[:keep]))
        start += size
    parts = zip(names, taken, sizes, strict=True)
    say("mixture: " + ", ".join(f"{len(part):,} of {size:,} examples of {name}" for name, part, size in parts))
    return np.concatenate(taken)


def _choose_share(examples: Ints, recipe: Recipe, say: Callable[[str], None]) -> Ints:
    """The examples that --data-percent leaves, in the order of the file."""
    keep = max(1, round(len(examples) * recipe.data_percent / 100))
    if keep < len(examples):
        say(f"data_percent {recipe.data_percent:g}: {keep:,} of {len(examples):,} examples")
    if not recipe.shuffle:
        return examples[:keep]
    return np.sort(examples[_permutation(len(examples), recipe.seed, _SHARE)[:keep]])


def _hold_out(chosen: Ints, recipe: Recipe) -> tuple[Ints, Ints]:
    """Examples to train on and examples to evaluate on, both in the order of the file."""
    held = round(len(chosen) * recipe.validation)
    if not 0 < held < len(chosen):
        missing = "train" if held else "evaluate"
        what = f"validation = {recipe.validation} of {len(chosen)} examples leaves none to {missing} on"
        remedy = "Use more examples or another --validation, or name a file with --eval-data."
        raise DataError(what, where=recipe.data, remedy=remedy)
    mixed = _permutation(len(chosen), recipe.seed, _HELD_OUT)
    return chosen[np.sort(mixed[held:])], chosen[np.sort(mixed[:held])]


def _pack(store: Store, chosen: Ints, recipe: Recipe) -> Packing:
    if not recipe.packing:
        return one_a_row(chosen)
    if not recipe.shuffle:
        return pack_in_order(store.lengths, chosen, recipe.max_length)
    ties = chosen[_permutation(len(chosen), recipe.seed, _TIE_ORDER)]
    return pack_best_fit(store.lengths, ties, recipe.max_length)
