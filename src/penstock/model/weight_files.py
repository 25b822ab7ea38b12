"""Safetensors read straight to where they are needed.

transformers maps every file into memory, and pages that were touched stay counted until the end: measured on a 1.2 GB
model in 190 MB files, loaded as fp32, peak memory beyond the model was the whole checkpoint (1,260 MiB); and bf16
weights on a CPU were not copied at all but remained views of the file, which must then not change while training runs.
Here a tensor is read with plain reads, in pieces, into its final place (150 MiB beyond the model in the same
measurement, of which 130 MiB is the allocator's rounding and stays), and nothing refers to the file afterwards.
`StoredTensor` has the interface of safetensors' slices, so transformers' loader, with all its conversions of names and
experts, takes it as it is.

Headers are checked before anything is read: names stay inside the directory, and sizes agree with the file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError

_PIECE_BYTES = 4 * 2**20
"""Read at once by each of transformers' four loading threads, whose allocators may keep a second piece each."""
_HEADER_LIMIT = 100 * 2**20  # safetensors' own

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Progress:
    """Says how far loading is, at most every two seconds. Tensors are read by several threads."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._lock = say, threading.Lock()
        self._done, self._total, self._last = 0, 0, time.monotonic()

    def expect(self, num_bytes: int) -> None:
        """How much there is."""
        self._total = num_bytes

    def add(self, num_bytes: int) -> None:
        """So much more is in place."""
        with self._lock:
            self._done += num_bytes
            if time.monotonic() - self._last >= 2:
                self._last = time.monotonic()
                self._say(f"  {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB loaded")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. Indexing reads it, to `device`, and in `dtype` if that is wider than what is stored."""

    path: Path
    offset: int
    num_bytes: int
    stored: torch.dtype
    shape: tuple[int, ...]
    device: torch.device = field(default=torch.device("cpu"))
    dtype: torch.dtype | None = None
    progress: Progress | None = None

    @property
    def num_elements(self) -> int:
        """Elements, from the header."""
        return self.num_bytes // self.stored.itemsize

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors' slices have it."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.stored)

    def __getitem__(self, index: Any) -> Tensor:
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if not isinstance(first, slice) or not self.shape or first.step not in (None, 1):
            return self._read()[index]
        start, stop, _ = first.indices(self.shape[0])
        return self._rows(start, max(start, stop))._read()[(slice(None), *rest)]  # a rank reads no more than its rows

    def _rows(self, start: int, stop: int) -> StoredTensor:
        row = self.num_bytes // max(1, self.shape[0])
        shape = (stop - start, *self.shape[1:])
        return replace(self, offset=self.offset + start * row, num_bytes=(stop - start) * row, shape=shape)

    def _read(self) -> Tensor:
        widen = self.dtype is not None and self.stored.is_floating_point and self.dtype.itemsize > self.stored.itemsize
        out = torch.empty(self.shape, dtype=self.dtype if widen else self.stored, device=self.device)
        flat = out.view(-1)
        direct = self.device.type == "cpu" and not widen
        pieces = flat.view(torch.uint8) if direct else torch.empty(min(_PIECE_BYTES, self.num_bytes), dtype=torch.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, self.num_bytes, _PIECE_BYTES):
                end = min(start + _PIECE_BYTES, self.num_bytes)
                piece = pieces[start:end] if direct else pieces[: end - start]
                self._fill(file, piece)
                if not direct:
                    size = self.stored.itemsize
                    flat[start // size : end // size].copy_(piece.view(self.stored))
                if self.progress is not None:
                    self.progress.add(end - start)
        return out

    def _fill(self, file: Any, piece: Tensor) -> None:
        """Read until the piece is full; one call may give less than was asked for."""
        view = piece.numpy().data
        while view:
            count = file.readinto(view)
            if not count:
                raise ModelError("the file ends before its tensors do", where=str(self.path), remedy=_FETCH_AGAIN)
            view = view[count:]


_TAMPERED = "No program writes that: do not use this model, and tell whoever gave it to you."
_FETCH_AGAIN = "The file is damaged or incomplete: fetch it again."


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `directory`, by name; nothing but headers is read."""
    tensors: dict[str, StoredTensor] = {}
    for path, expected in _weight_files(directory).items():
        found = read_header(path)
        missing = sorted(expected - found.keys())
        if missing:
            what = f"the index names tensors that the shard lacks: {', '.join(missing[:3])}"
            raise ModelError(what, where=str(path), remedy=_FETCH_AGAIN)
        tensors |= found if not expected else {name: found[name] for name in found if name in expected}
    return tensors


def _weight_files(directory: Path) -> dict[Path, set[str]]:
    """Files with weights, each with the tensors that the index expects in it (none: whatever is there)."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _read_index(index)
    single = directory / "model.safetensors"
    if single.is_file():
        return {single: set()}
    if not directory.is_dir():
        raise ModelError("no such directory", where=str(directory), remedy="Check the path given to --model.")
    pickles = [p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise ModelError(
            f"the weights are pickles ({', '.join(sorted(pickles)[:2])}), which can run any code when they are loaded",
            where=str(directory),
            remedy="Convert them on a machine you trust: load the model with transformers and call save_pretrained.",
        )
    raise ModelError(
        "there are no weights: neither model.safetensors nor model.safetensors.index.json",
        where=str(directory),
        remedy="Fetch the model again, or use --init random for shapes without weights.",
    )


def _read_index(index: Path) -> dict[Path, set[str]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = [(str(tensor), str(file)) for tensor, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"cannot be read as an index of shards: {error!r}"
        raise ModelError(what, where=str(index), remedy=_FETCH_AGAIN) from None
    shards: dict[Path, set[str]] = {}  # files of a checkpoint, not rows on ranks
    for tensor, file in entries:
        if Path(file).name != file or file in ("", ".", ".."):
            raise ModelError(f"names a file outside its directory: {file!r}", where=str(index), remedy=_TAMPERED)
        shards.setdefault(index.parent / file, set()).add(tensor)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        shown = ", ".join(sorted(missing)[:3])
        raise ModelError(f"{len(missing)} of {len(shards)} shards are missing: {shown}", where=str(index),
                         remedy="Fetch the model again.")  # fmt: skip
    return shards


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, by name; sizes are checked against the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_LIMIT, size - 8):
            raise ModelError("is not a safetensors file", where=str(path), remedy=_FETCH_AGAIN)
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _parse_entry(path, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"its header cannot be read: {error!r}", where=str(path), remedy=_FETCH_AGAIN) from None
    _check_extent(path, 8 + length, size, tensors.values())
    return tensors


def _parse_entry(path: Path, base: int, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        what, remedy = (
            f"holds tensors of a type that cannot be trained: {entry['dtype']}",
            "Take a model in bf16 or fp32.",
        )
        raise ModelError(what, where=str(path), remedy=remedy)
    begin, end = (int(x) for x in entry["data_offsets"])
    stored, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
    num_elements = 1
    for n in shape:
        num_elements *= n
    if begin < 0 or min(shape, default=0) < 0 or end - begin != num_elements * stored.itemsize:
        raise ValueError("size and shape of a tensor disagree")
    return StoredTensor(path, base + begin, end - begin, stored, shape)


def _check_extent(path: Path, base: int, size: int, tensors: Iterable[StoredTensor]) -> None:
    """The tensors must fill the file exactly, as the format demands; a truncated download does not."""
    end = max((t.offset + t.num_bytes for t in tensors), default=base)
    if end != size:
        raise ModelError(f"should have {end:,} bytes and has {size:,}", where=str(path), remedy=_FETCH_AGAIN)
