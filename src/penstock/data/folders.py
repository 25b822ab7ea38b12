"""Which files of a directory are the data: as someone put them there, as the Hub has them, as `datasets` saves them.

A directory with files to train on and files to test on is never read as one: the files of one split are taken, and who
asks is told what the others are. Splits are told from names, as the Hub tells them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.data.files import KINDS, file_kind
from penstock.errors import DataError, counted

_ABOUT = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
"""Files about the data that are no data."""
_FOR_PEOPLE = {"readme", "license"}
"""Names of files that are no data either, whatever their extension; of text also first words (`LICENSE-MIT.txt`)."""
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_DEFAULTS = ("train", "test")
"""Splits that a recipe asks for if nobody says another."""
_BETWEEN_WORDS = re.compile(r"[-._\s\d]+")


@dataclass(frozen=True)
class Folder:
    """The data files of a directory, by split. Without splits all are under the empty name."""

    path: Path
    splits: dict[str, tuple[Path, ...]]

    def choose(self, split: str) -> tuple[Path, ...]:
        """The files of a split. One that is alone is meant, whatever it is called, unless another was asked for."""
        if len(self.splits) == 1 and (split in _DEFAULTS or "" in self.splits):
            return next(iter(self.splits.values()))
        if "" in self.splits:
            others = ", ".join(path.name for path in self.splits[""][:3])
            what = f"some files belong to a split ({', '.join(filter(None, self.splits))}) and others do not: {others}"
            raise DataError(what, where=str(self.path), remedy="Name the files that you mean, with commas.")
        if split not in self.splits:
            remedy = f"--data-split and --eval-split name one of: {', '.join(self.splits)}."
            raise DataError(f"no files of the split {split!r}", where=str(self.path), remedy=remedy)
        return self.splits[split]

    def evaluation(self, trained: str, wanted: str) -> str:
        """The split to evaluate on when `trained` is trained on, or nothing."""
        others = [split for split in self.splits if split not in ("", trained)] if trained in self.splits else []
        return next((split for split in ("validation", wanted) if split in others), "")

    def describe(self, trained: str, evaluated: str) -> str:
        """What is taken of a directory with several splits, in words."""
        left = [split for split in self.splits if split not in (trained, evaluated)]
        said = f"{self.path}: training on {trained!r} ({counted(len(self.splits[trained]), 'file')})"
        said += f", evaluating on {evaluated!r}" if evaluated else ""
        return said + (f"; not used: {', '.join(map(repr, left))}" if left else "")


def is_folder(path: Path) -> bool:
    """Whether a path is a directory, or an error where that may not be looked at."""
    with _looking(path):
        return path.is_dir()


def open_folder(directory: Path) -> Folder:
    """The data files of a directory in the order of their names; anything else (README, LICENSE) is passed over."""
    with _looking(directory):
        return _open_folder(directory)


@contextmanager
def _looking(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "See that it is there, and that you may read it and the directories that it is in."
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error


def _open_folder(directory: Path) -> Folder:
    if (directory / "dataset_dict.json").is_file():
        splits = [str(split) for split in _about(directory / "dataset_dict.json", "splits")]
        return Folder(directory, {split: _saved(directory / Path(split).name) for split in splits})
    if (directory / "state.json").is_file():
        return Folder(directory, {"": _saved(directory)})
    files = _files(directory)
    if files:
        return Folder(directory, _by_split(files))
    below = {path.name: _files(path) for path in sorted(directory.iterdir()) if path.is_dir() and path.name[0] != "."}
    below = {name: found for name, found in below.items() if found}
    if len(below) == 1 and not _split_of(next(iter(below))):
        return Folder(directory, _by_split(next(iter(below.values()))))
    if below and all(_split_of(name) for name in below):
        merged: dict[str, tuple[Path, ...]] = {}
        for name, found in below.items():
            merged[_split_of(name)] = (*merged.get(_split_of(name), ()), *found)
        return Folder(directory, merged)
    if below:
        what = f"several directories with data: {', '.join(below)}"
        raise DataError(
            what, where=str(directory), remedy=f"Name one of them, such as {directory / next(iter(below))}."
        )
    raise DataError(
        "no data file in the directory", where=str(directory), remedy=f"Put {', '.join(KINDS)} files into it."
    )


def _files(directory: Path) -> tuple[Path, ...]:
    named = sorted(p for p in directory.iterdir() if file_kind(p) and not p.name.startswith("."))
    named = [p for p in named if p.name not in _ABOUT and not _is_for_people(p)]
    for path in named:
        if path.is_symlink() and not path.exists():  # passed over, a part of the data would be missing unseen
            remedy = "Fetch what it stands for (git annex get, dvc pull), or remove the link."
            raise DataError("is a link to a file that is not there", where=str(path), remedy=remedy)
    return tuple(path for path in named if path.is_file())


def _is_for_people(path: Path) -> bool:
    word, *others = _words(path.name)
    return word in _FOR_PEOPLE and (file_kind(path) == ".txt" or f".{others[0]}" in KINDS)


def _by_split(files: tuple[Path, ...]) -> dict[str, tuple[Path, ...]]:
    splits: dict[str, tuple[Path, ...]] = {}
    for path in files:
        split = _split_of(path.name)
        splits[split] = (*splits.get(split, ()), path)
    order = ("train", "validation", "test", "")
    return {split: splits[split] for split in order if split in splits}


def _split_of(name: str) -> str:
    words = set(_words(name))
    return next((split for split, known in _SPLITS.items() if words & {*known}), "")


def _words(name: str) -> list[str]:
    return _BETWEEN_WORDS.split(name.lower())


def _saved(directory: Path) -> tuple[Path, ...]:
    """The files of a data set that `save_to_disk` wrote."""
    entries = _about(directory / "state.json", "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        remedy = "Save it again with save_to_disk."
        raise DataError("does not name the files of the data set", where=str(directory / "state.json"), remedy=remedy)
    return tuple(directory / str(name) for name in names)


def _about(path: Path, key: str) -> list[object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Save it again with save_to_disk."
        raise DataError(f"does not describe a data set: {error!r}", where=str(path), remedy=remedy) from error
    return value if isinstance(value, list) else []
