"""Tokenized rows on disk, cached by content and read through memory maps.

An entry's name is a hash of everything that decides its content: the source's bytes, the tokenizer, the recipe fields
that matter here, and the version of this format. So an entry never goes stale, and changing the learning rate does not
tokenize again. It is written to a temporary directory and renamed; each file carries a checksum that is verified at
every opening, because a flipped bit in a token id would otherwise be trained on without a word. Anything wrong with an
entry means that it is built anew.

Flat files and numpy were chosen over Arrow tables: the loader needs exactly one operation, a slice, and a memory map
does it without a copy or a library.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.data.counts import NAMED_NOTES, NOTES, Counts, Noted
from penstock.data.encoding import DTYPES, Unwritable, Written, write_examples, writing
from penstock.data.files import place_name
from penstock.data.rows import Source
from penstock.data.turns import Format
from penstock.errors import DataError, DoesNotFit, counted
from penstock.machine.cache import cache_dir
from penstock.machine.disk import FILE_LIMIT, hits_file_limit
from penstock.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENT, _VERSION = 4, 8
"""Raised when other tokens come of the same data, and when the same are written down otherwise."""
_FIELDS = (
    "data_format", "columns", "split_documents", "template", "end_token", "train_on_prompt", "max_length", "too_long",
)  # fmt: skip
OR_SPLIT = "make several examples of a long one: --too-long split"
_BUILDING = ".building-"
_ABANDONED_S = 2 * 24 * 3600.0


@dataclass(frozen=True)
class Store:
    """Examples as slices of flat arrays."""

    key: str
    files: tuple[str, ...]
    data_format: Format | None
    """None if its parts have different forms."""
    counts: Counts
    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int32]
    """Trained tokens of every example."""
    places: npt.NDArray[np.int64]
    parts: tuple[int, ...]
    """Examples of each part of its source, one after another."""
    keep: object = None
    """Owner of a temporary directory, which goes when the store goes."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every example."""
        return np.diff(self.offsets)

    def example(self, i: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """Token ids of example i, and 1 where a token is trained on."""
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.ids[part], self.mask[part]

    def where(self, i: int) -> str:
        """file:line of example i."""
        return place_name(self.files[self.places[2 * i]], int(self.places[2 * i + 1]))


def notes(store: Store) -> list[str]:
    """What happened to rows on the way that a user should know, one line each."""
    counts, files = store.counts, store.files
    noted = {
        "truncated": counts.truncated,
        "without a trained end token": counts.unended,
        "with text that spells a special token, and becomes it": counts.spelled,
        "with an empty question": counts.unasked,
        "longer than max_length, each split into several examples": counts.split,
    }
    noted |= {f"dropped, {reason}": note for reason, note in counts.dropped.items()}
    lines = [f"{note.count:,} {what}: {describe(note, files)}" for what, note in noted.items() if note.count]
    if counts.lost_tokens:
        pieces = "they are in pieces without a token to train on"
        why = pieces if counts.split.count else "--too-long split keeps what is trained on"
        lines.append(f"{counted(counts.lost_tokens, 'token')} of examples over max_length not used; {why}")
    return [*lines, f"not used: {unused}"] if (unused := unused_columns(store)) else lines


def unused_columns(store: Store) -> str:
    """The columns and keys of messages that are not used, with the number of rows where not all have them."""
    counts = store.counts
    return ", ".join(
        name if note.count == counts.rows else f"{name} (in {counted(note.count, 'row')})"
        for name, note in counts.unused.items()
    )


def describe(noted: Noted, files: tuple[str, ...]) -> str:
    """The first places of something, for a message."""
    places = ", ".join(place_name(files[file], line) for file, line in noted.places)
    return f"{places}, ..." if noted.count > len(noted.places) else places


def open_store(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    vocab_size: int,
    say: Callable[[str], None],
) -> Store:
    """The tokenized rows of a source, from the cache if they are there. Checked against the size of the embedding."""
    key = _key(source, tokenizer, recipe)
    root = cache_dir("tokens")
    store = _load(root / key, source.files)
    if store is None:
        try:
            store = _build_in(root, key, source, tokenizer, recipe, say)
        except Unwritable as error:
            say(f"The cache {root} cannot be written ({error}); tokenized rows go to a temporary directory.")
            store = _build_aside(key, source, tokenizer, recipe, say)
    _check_vocabulary(store, tokenizer, vocab_size)
    return store


# --- the key ----------------------------------------------------------------------------------------------------------


def _key(source: Source, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> str:
    parts = {
        "version": _CONTENT,
        "source": source.fingerprint,
        "tokenizer": _tokenizer_fingerprint(tokenizer),
        "recipe": {name: getattr(recipe, name) for name in _FIELDS},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides its output. Its name would not do: files behind a name change."""
    import tokenizers
    import transformers

    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for state in ("truncation", "padding"):  # left behind by the last call, and set anew by every call
        backend.pop(state, None)
    versions = [tokenizers.__version__, transformers.__version__]
    parts = [backend, tokenizer.chat_template, dict(tokenizer.special_tokens_map), versions]
    if getattr(tokenizer, "split_special_tokens", False):
        parts.append("split_special_tokens")
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


# --- building ---------------------------------------------------------------------------------------------------------


def _build_in(
    root: Path,
    key: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    say: Callable[[str], None],
) -> Store:
    """Build an entry of the cache and open it."""
    entry = root / key
    with writing():
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=root))
    try:
        _build(building, source, tokenizer, recipe, say)
        if _load(entry, source.files) is None:  # another process may have finished the same entry meanwhile
            shutil.rmtree(entry, ignore_errors=True)
            with writing():
                building.rename(entry)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    store = _load(entry, source.files)
    if store is None:
        raise Unwritable("what was written does not read back")
    return store


def _build_aside(
    key: str, source: Source, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, say: Callable[[str], None]
) -> Store:
    """Build in a temporary directory that lives as long as the store."""
    remedy = "Set PENSTOCK_CACHE to a directory with room: 5 bytes a token and 24 a row."
    try:
        with writing():
            directory = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        _build(Path(directory.name), source, tokenizer, recipe, say)
    except Unwritable as error:
        where, advice = tempfile.gettempdir(), FILE_LIMIT if hits_file_limit(error) else remedy
        raise DoesNotFit(f"tokenized rows cannot be written ({error})", where=where, remedy=advice) from error
    store = _load(Path(directory.name), source.files)
    if store is None:
        raise DoesNotFit("tokenized rows do not read back as they were written", where=directory.name, remedy=remedy)
    return dataclasses.replace(store, key=key, keep=directory)


def _build(
    directory: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    say: Callable[[str], None],
) -> None:
    written = write_examples(directory, source, tokenizer, recipe, say)
    _check_counts(written.counts, source, recipe)
    with writing():
        (directory / "entry.json").write_text(json.dumps(dataclasses.asdict(written) | {"version": _VERSION}))


def _remove_abandoned(root: Path) -> None:
    """Clear away what killed runs left half built."""
    for path in root.glob(f"{_BUILDING}*"):
        try:
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process was faster
            continue


# --- opening ----------------------------------------------------------------------------------------------------------


def _load(directory: Path, files: tuple[str, ...]) -> Store | None:
    """The entry in a directory, or None if there is none or anything is wrong with it."""
    try:
        entry = json.loads((directory / "entry.json").read_text())
        if entry["version"] != _VERSION:
            return None
        for name, checksum in entry["checksums"].items():
            with (directory / name).open("rb") as file:
                if hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() != checksum:
                    return None
        arrays: dict[str, Any] = {name: np.memmap(directory / name, dtype, "r") for name, dtype in DTYPES.items()}
        written = Written(entry["data_format"], _counts(entry["counts"]), entry["checksums"], tuple(entry["parts"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Store(directory.name, files, written.data_format, written.counts, parts=written.parts, **arrays)


def _counts(values: dict[str, Any]) -> Counts:
    noted = {name: _noted(values[name]) for name in NOTES}
    named = {name: {reason: _noted(v) for reason, v in values[name].items()} for name in NAMED_NOTES}
    return Counts(**(values | noted | named))


def _noted(values: dict[str, Any]) -> Noted:
    return Noted(values["count"], tuple((file, line) for file, line in values["places"]))


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_counts(counts: Counts, source: Source, recipe: Recipe) -> None:
    """Refuse data from which nothing, or no end of a response, would be learned, and names that no column has."""
    for column, note in counts.lacking.items():
        if note.count == counts.rows:
            remedy = "--columns takes the file's own name first: --columns question=prompt."
            raise DataError(f"no row has a column {column!r}, which is to be renamed", where=source.name, remedy=remedy)
    longer = f"Raise --max-length (the longest example has {counts.longest:,} tokens)."
    if recipe.too_long != "split":
        longer = f"Raise --max-length (the longest example has {counts.longest:,} tokens), or {OR_SPLIT}"
    if not counts.kept:
        reasons = "; ".join(f"{n.count:,} {why} ({describe(n, source.files)})" for why, n in counts.dropped.items())
        what = f"no example is left of {counts.rows:,} rows with max_length {recipe.max_length}: {reasons}"
        remedy = "Every row needs a response."
        if counts.longest > recipe.max_length:
            remedy = longer
        elif set(counts.dropped) <= {"weight 0", "no response with a weight"}:
            remedy = "Give the weight 1, or none, to what is to be trained on; 0 leaves it out."
        elif set(counts.dropped) <= {"weight 0", "empty text"}:
            remedy = "A row needs text."
        raise DataError(what, where=source.name, remedy=remedy)
    if counts.unended.count == counts.kept:
        what = f"no example of {counts.kept:,} has its end token within max_length {recipe.max_length}"
        raise DataError(f"{what}, so the model would never learn to stop", where=source.name, remedy=longer)


def _check_vocabulary(store: Store, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    token_id = store.counts.max_token_id
    if token_id < vocab_size:
        return
    example = int(np.searchsorted(store.offsets, int(np.argmax(store.ids)), side="right")) - 1
    token = tokenizer.convert_ids_to_tokens(token_id)
    what = f"token {token!r} has id {token_id}, but the model's embedding has {vocab_size} rows"
    remedy = "The tokenizer does not belong to the model: name the right one with --tokenizer."
    raise DataError(what, where=store.where(example), remedy=remedy)
