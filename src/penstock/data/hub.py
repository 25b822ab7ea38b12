"""Data sets of the Hugging Face Hub, fetched first or read while they are tokenized."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from penstock.data.names import LOCAL, near
from penstock.data.rows import Piece, Row, Source, Table, place_name
from penstock.errors import DataError

_PIECE_ROWS = 1000


def open_hub(name: str, split: str, say: Callable[[str], None], stream: bool = False) -> Source:
    """The rows of a split of `OWNER/NAME` or `OWNER/NAME:CONFIGURATION`."""
    say(f"Looking for {name} ({split}) on the Hugging Face Hub")
    import datasets

    repository, _, configuration = name.partition(":")
    asked = {"split": split, "streaming": True} if stream else {"split": split}
    try:
        found = datasets.load_dataset(repository, configuration or None, **asked)
        version = _version(repository) if stream else ""
    except ConnectionError as error:
        remedy = f"{near(name)}Without a network, --data takes {LOCAL}."
        raise DataError(f"no such file, and the Hub cannot be reached: {error}", where=name, remedy=remedy) from error
    except FileNotFoundError as error:
        remedy = f"{near(name)}--data takes {LOCAL}, or a Hub name; a private set needs HF_TOKEN in the environment."
        raise DataError("neither a file here nor a data set on the Hub", where=name, remedy=remedy) from error
    except Exception as error:  # whatever else a third-party loader meets (split, configuration, damaged files)
        remedy = "--data-split names a split; --data OWNER/NAME:CONFIGURATION names a configuration."
        raise DataError(f"cannot be loaded from the Hub: {error}", where=name, remedy=remedy) from error
    if stream:
        fingerprint = hashlib.sha256(f"{name} {split} {version}".encode()).hexdigest()
        return Source(name, (name,), fingerprint, lambda: _stream_rows(found, name), num_bytes=_size(found, split))
    return Source(
        name,
        (name,),
        f"{found._fingerprint}",
        lambda: (row for piece in _pieces(found, name) for row in piece.rows()),
        pieces=lambda: _pieces(found, name),
        num_bytes=found.data.nbytes,
    )


def _version(repository: str) -> str:
    """The commit that is read: a stream has no content yet that could be compared."""
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(repository).sha)


def _size(found: Any, split: str) -> int:
    known = (found.info.splits or {}).get(split.partition("[")[0])
    return int(known.num_bytes or 0) if known else 0


def _pieces(table: Any, name: str) -> Iterator[Piece]:
    number, total = 0, len(table)
    for batch in table.with_format("arrow").iter(batch_size=_PIECE_ROWS):
        yield Table(batch, name, number + 1, (number + batch.num_rows) / total)
        number += batch.num_rows
    _refuse_nothing(number, name)


def _stream_rows(found: Any, name: str) -> Iterator[Row]:
    number = 0
    try:
        for number, fields in enumerate(found, 1):
            yield Row(fields, name, number)
    except Exception as error:  # the network, or whatever else a third-party reader meets
        what = f"cannot be read on from the Hub after this row: {error!r}"
        remedy = "Run it again. Without --data-stream it is fetched first, and files that have come are kept."
        raise DataError(what, where=place_name(name, number), remedy=remedy) from error
    _refuse_nothing(number, name)


def _refuse_nothing(number: int, name: str) -> None:
    if not number:
        raise DataError("no rows in the data set", where=name, remedy="Name another split with --data-split.")
