"""What `penstock data` shows: what the model will see, before any time is spent on training it.

Examples come from the store, the thing that is trained on, and not from a second rendering made for display; a preview
that is computed apart can be right while the training is wrong. Everything reads without colour too: trained tokens
stand in brackets then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.data.counts import Noted
from penstock.data.loader import Dataset, Loader, Position
from penstock.data.rows import place_name
from penstock.data.store import Store, notes
from penstock.errors import counted, short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST_SHOWN, _LAST_SHOWN = 300, 60
_ROWS_SHOWN = 8
_BAR_WIDTH = 60
_BINS = 10
_TRAINED = ("bold green", "bold bright_green")  # two shades in turn, so that one sees where tokens end
_PROMPT = ("grey62", "grey46")


def show(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, examples: int = 3) -> list[RenderableType]:
    """The parts of the preview, ready to be printed one after another."""
    parts: list[RenderableType] = [*_examples(dataset.train, tokenizer, examples)]
    parts.append(Panel(_packing(dataset.train), title="packing", title_align="left"))
    parts.append(Panel(_histogram(dataset.train), title="tokens in an example", title_align="left"))
    parts.append(Panel(_rows_read(dataset.train.store), title="rows of data", title_align="left"))
    if dataset.evaluation:
        held = dataset.evaluation
        held_out = f"{counted(held.num_examples, 'example')} in {counted(held.num_rows, 'row')}"
        what = f"{held_out}, {counted(held.num_trained, 'trained token')}"
        parts.append(Panel(what, title="evaluation", title_align="left"))
        if held.store is not dataset.train.store:
            parts.append(Panel(_rows_read(held.store), title="rows of data for evaluation", title_align="left"))
    return parts


def summary(dataset: Dataset) -> dict[str, object]:
    """The counts behind the preview, ready for JSON."""
    result: dict[str, object] = {
        "data_format": dataset.data_format or "mixed",
        "fingerprint": dataset.fingerprint,
        "steps_per_epoch": dataset.train.steps_per_epoch(),
        "train": _loader_summary(dataset.train),
        "train_flops": _flops(dataset.train),
        "evaluation": _loader_summary(dataset.evaluation) if dataset.evaluation else None,
        "source": _store_summary(dataset.train.store),
    }
    if dataset.evaluation and dataset.evaluation.store is not dataset.train.store:
        result["evaluation_source"] = _store_summary(dataset.evaluation.store)
    return result


def samples(loader: Loader, tokenizer: PreTrainedTokenizerBase, count: int) -> list[dict[str, object]]:
    """The first examples in runs of text that are trained on or not, ready for JSON."""
    found: list[dict[str, object]] = []
    for i in np.sort(loader.packing.examples)[:count].tolist():
        ids, mask = loader.store.example(i)
        runs: list[tuple[str, bool]] = []
        for piece, trained in Tokens(tokenizer, ids.tolist(), mask.tolist()).pieces:
            text = runs.pop()[0] if runs and runs[-1][1] == trained else ""
            runs.append((text + piece, trained))
        trained_tokens = int(mask.sum())
        found.append({"where": loader.store.where(i), "tokens": len(ids), "trained": trained_tokens, "runs": runs})
    return found


def _loader_summary(loader: Loader) -> dict[str, object]:
    rows = loader.packing.row_lengths(loader.store.lengths)
    return {
        "examples": loader.num_examples,
        "rows": loader.num_rows,
        "tokens": loader.num_tokens,
        "trained_tokens": loader.num_trained,
        "longest_row": int(rows.max()),
        "fill": _fill(loader),
        "lengths": [{"from": low, "to": high, "examples": count} for low, high, count in _bins(loader)],
    }


def _store_summary(store: Store) -> dict[str, object]:
    counts = store.counts
    noted = {
        "truncated": counts.truncated,
        "without_end_token": counts.unended,
        "spells_special_token": counts.spelled,
        "empty_question": counts.unasked,
        "split": counts.split,
    }
    return {
        "rows": counts.rows,
        "kept": counts.kept,
        "longest": counts.longest,
        "lost_tokens": counts.lost_tokens,
        **{name: note.count for name, note in noted.items()},
        "dropped": _noted(store, counts.dropped),
        "unused": _noted(store, counts.unused),
    }


def _noted(store: Store, notes: dict[str, Noted]) -> dict[str, object]:
    return {
        name: {"count": note.count, "first": [place_name(store.files[file], line) for file, line in note.places]}
        for name, note in notes.items()
    }


# --- examples ---------------------------------------------------------------------------------------------------------


def _examples(loader: Loader, tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[Panel]:
    for i in np.sort(loader.packing.examples)[:count].tolist():
        ids, mask = loader.store.example(i)
        title = f"{loader.store.where(i)} · {len(ids):,} tokens, {int(mask.sum()):,} trained"
        yield Panel(Tokens(tokenizer, ids.tolist(), mask.tolist()), title=Text(title), title_align="left")


class Tokens:
    """Tokens, coloured by whether they are trained on; or, where there is no colour, with the trained ones in ⟦ ⟧."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[int]) -> None:
        pieces = [(visible(tokenizer, i), bool(m)) for i, m in zip(ids, mask, strict=True)]
        hidden = len(pieces) - _FIRST_SHOWN - _LAST_SHOWN
        if hidden > 0:  # the end is shown in any case: whether the end token is trained is what one wants to see
            pieces[_FIRST_SHOWN:-_LAST_SHOWN] = [(f"\n( ... {hidden:,} tokens ... )\n", pieces[_FIRST_SHOWN][1])]
        pieces[-1] = (pieces[-1][0].rstrip("\n"), pieces[-1][1])
        self.pieces = pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        in_colour = console.color_system is not None and not console.no_color
        yield self._coloured() if in_colour else self._marked()

    def _coloured(self) -> Text:
        text = Text()
        for number, (piece, trained) in enumerate(self.pieces):
            text.append(piece, style=(_TRAINED if trained else _PROMPT)[number % 2])
        return text

    def _marked(self) -> Text:
        text, inside = Text(), False
        for number, (piece, trained) in enumerate(self.pieces):
            if trained != inside:
                text.append("⟦" if trained else "⟧")
            elif number and not text.plain.endswith("\n"):
                text.append("|")
            text.append(piece)
            inside = trained
        return text.append("⟧" if inside else "")


def visible(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """A token as one can read it: line breaks are shown and kept, control characters cannot reach the terminal."""
    raw = tokenizer.convert_ids_to_tokens(token_id)
    text = str(tokenizer.decode([token_id]))
    if "\ufffd" in text or (not text and raw):  # part of a character, or something the decoder swallows
        text = str(raw)
    elif isinstance(raw, str) and raw.startswith("▁") and not text.startswith(" "):
        text = f" {text}"
    safe = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return safe.replace("\t", "→\t").replace("\n", "⏎\n")


# --- packing and lengths ----------------------------------------------------------------------------------------------


def _fill(loader: Loader) -> float:
    """Share of the places that hold a token, were all rows as long as the longest."""
    rows = loader.packing.row_lengths(loader.store.lengths)
    return float(rows.sum() / (len(rows) * rows.max()))


def _packing(loader: Loader) -> RenderableType:
    rows = loader.packing.row_lengths(loader.store.lengths)
    each = np.diff(loader.packing.offsets)
    facts = Text(
        f"{counted(loader.num_examples, 'example')} in {counted(loader.num_rows, 'row')}, {each.mean():.1f} a row "
        f"(at most {each.max()}); steps an epoch: {loader.steps_per_epoch():,}; "
        f"form: {loader.store.data_format or 'mixed'}\n"
        f"{loader.num_tokens:,} tokens, {loader.num_trained / loader.num_tokens:.1%} of them trained on; "
        f"the longest row has {rows.max():,}, the rows are {_fill(loader):.1%} full\n"
        f"{_flops_line(loader)}"
    )
    shown = min(_ROWS_SHOWN, loader.num_rows)
    chosen = np.linspace(0, loader.num_rows - 1, shown).astype(int).tolist()
    pictures = [Text(f"row {r:>6,} {_picture(loader, r, int(rows.max()))}", no_wrap=True) for r in chosen]
    return Group(facts, *pictures)


def _flops(loader: Loader) -> dict[str, dict[str, float]]:
    """FLOPs of forward and backward: of rows without padding, and of the steps of the first epoch with it."""
    products, attention = loader.row_flops()
    steps = loader.costs_from(Position(), loader.steps_per_epoch())
    found = {"row_products": products, "row_attention": attention, "step": steps}
    return {name: {"mean": float(flops.mean()), "largest": float(flops.max())} for name, flops in found.items()}


def _flops_line(loader: Loader) -> str:
    flops = _flops(loader)
    products, attention = (
        f"{short(flops[name]['mean'] / 1e12)} on average, {short(flops[name]['largest'] / 1e12)} at most"
        for name in ("row_products", "row_attention")
    )
    heaviest = flops["step"]["largest"] / flops["step"]["mean"]
    return (
        f"TFLOP of a row: products {products}; attention {attention}; the heaviest step has {heaviest:.2f} of the mean"
    )


def _picture(loader: Loader, row: int, longest: int) -> str:
    """A row as a bar: its examples in two shades in turn, and dots for what is left free."""
    ends = np.cumsum(loader.store.lengths[loader.packing.row(row)])
    marks = np.round(ends * _BAR_WIDTH / longest).astype(int).tolist()
    bar = ""
    for drawn, mark in enumerate(dict.fromkeys(marks)):  # an example too short for a cell of its own is left out
        bar = bar.ljust(mark, "█▒"[drawn % 2])
    return bar.ljust(_BAR_WIDTH, "·")


def _bins(loader: Loader) -> list[tuple[int, int, int]]:
    """(shortest, longest, how many) of about ten ranges of lengths."""
    lengths = loader.store.lengths[loader.packing.examples]
    width = max(1, -(-int(lengths.max()) // _BINS))
    counts = np.bincount((lengths - 1) // width)
    return [(i * width + 1, (i + 1) * width, count) for i, count in enumerate(counts.tolist())]


def _histogram(loader: Loader) -> RenderableType:
    bins = _bins(loader)
    most = max(count for *_, count in bins)
    table = Table.grid(padding=(0, 1))
    for low, high, count in bins:
        bar = "█" * max(count > 0, round(count * _BAR_WIDTH / most))
        table.add_row(Text(f"{low:,} to {high:,}", justify="right"), Text(f"{count:,}", justify="right"), bar)
    return table


def _rows_read(store: Store) -> RenderableType:
    counts = store.counts
    made = f"{counted(counts.rows, 'row')} of data became {counted(counts.kept, 'example')}"
    lines = [f"{made}; uncut, the longest has {counted(counts.longest, 'token')}"]
    lines += notes(store) or ["nothing truncated, nothing dropped, every column used"]
    return Text("\n".join(lines))
