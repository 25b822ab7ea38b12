"""Safetensors files written and read in place: header first, then every piece from where it lies, block by block.

safetensors' own writer was rejected: it wants all tensors of a file in host memory at once. Here a save of any size
needs one block a thread, and tensors in host memory not even that. Files are hashed on the way to the disk, by XXH3
with 128 bits: a checksum has to be faster than the disk or it is left out one day. Measured on one Neoverse-N1 core:
XXH3 13.4 GB/s, CRC-32 2.2, SHA-256 1.6, BLAKE2b 0.6. It finds damage, not forgery: whoever can write a checkpoint can
hash it too, which is why nothing in one is ever executed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from penstock.engine.ranks import PATIENCE
from penstock.model.weight_files import DTYPES, read_header
from penstock.offload.saved_tensors import SavedTensor

BLOCK = 16 * 2**20
"""Bytes that are hashed and written at once: long enough for full speed, short enough that a thread needs little."""

SYNC_BYTES = 256 * 2**20
"""Bytes after which a file is synced while it is written. Otherwise the page cache takes tens of GB at the speed of
memory, from a host whose memory is full of state, and the last sync takes minutes in which no progress is seen."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Digest:
    """Size and checksum of a file."""

    num_bytes: int
    xxh3_128: str


class Transfer:
    """Says how far a save or a check is, at most every two seconds. Files are handled by several threads."""

    def __init__(self, what: str, num_bytes: int, say: Callable[[str], None]) -> None:
        self._what, self._total, self._say = what, num_bytes, say
        self._lock, self._done = threading.Lock(), 0
        self._start = self._last = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So much more is done."""
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now - self._last >= 2:
                self._last = now
                rate = self._done / (now - self._start)
                done, total = self._done / 1e9, self._total / 1e9
                self._say(f"  {self._what}: {done:,.1f} of {total:,.1f} GB, {rate / 1e9:.2f} GB/s")


def write_file(path: Path, content: Iterator[memoryview], transfer: Transfer | None = None) -> Digest:
    """A new file, durable when this returns. Nothing is buffered here: every write is one call to the system."""
    hasher, num_bytes, unsynced = xxhash.xxh3_128(), 0, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for block in content:
            hasher.update(block)
            num_bytes += len(block)
            unsynced += len(block)
            left = block
            while left:
                left = left[os.write(descriptor, left) :]
            if unsynced >= SYNC_BYTES:
                os.fdatasync(descriptor)
                unsynced = 0
            if transfer is not None:
                transfer.add(len(block))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Digest(num_bytes, hasher.hexdigest())


def safetensors(tensors: Sequence[SavedTensor]) -> Iterator[memoryview]:
    """The content of a safetensors file."""
    ordered = in_file_order(tensors)
    entries: dict[str, dict[str, object]] = {}
    start = 0
    for tensor in ordered:
        end = start + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for tensor in ordered:
        for block in _blocks(tensor):
            yield block.cpu().numpy().data
        for rank, num_bytes in enumerate(tensor.bytes_by_rank):
            if rank:  # rank 0 is the one that writes
                yield from receive_blocks(rank, num_bytes)


def in_file_order(tensors: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Widest elements first, so that every tensor is aligned to its elements."""
    return sorted(tensors, key=lambda t: -t.dtype.itemsize)


def _blocks(tensor: SavedTensor) -> Iterator[Tensor]:
    """The bytes of a tensor where they lie, a block at a time."""
    for piece in tensor.pieces:
        if piece.numel():
            yield from piece.view(torch.uint8).split(BLOCK)


def read_file(path: Path, tensors: Mapping[str, SavedTensor], transfer: Transfer, num_ranks: int = 1) -> None:
    """Fill those tensors that the file holds, where they lie; that they are of its shapes was seen to before.

    Other ranks get theirs sent, a tensor that does not lie in rows on the ranks as a whole.
    """
    stored = {name: entry for name, entry in read_header(path).items() if name in tensors}
    staging = torch.empty(BLOCK, dtype=torch.uint8)
    with open(path, "rb", buffering=0) as file:
        for name, entry in stored.items():
            file.seek(entry.offset)
            for block in _blocks(tensors[name]):
                landing = staging[: len(block)] if block.is_cuda else block
                _fill(file.readinto, landing.numpy().data)
                if block.is_cuda:
                    block.copy_(landing)
                transfer.add(len(block))
            for rank in range(1, num_ranks):
                by_rank = tensors[name].bytes_by_rank
                if not by_rank:
                    file.seek(entry.offset)
                num_bytes = by_rank[rank] if by_rank else tensors[name].num_bytes
                for block in asked_blocks(rank, num_bytes, staging):
                    _fill(file.readinto, block.numpy().data)
                    _send(block, rank)
                    transfer.add(len(block))


# --- between ranks ----------------------------------------------------------------------------------------------------
#
# Rank 0 has the files. Another rank goes through the same tensors in the same order; it says how long its next block
# is, then the block goes one way or the other. So nobody needs to know how another rank cuts its state, and a block is
# all the memory it takes.


def _send(block: Tensor, rank: int) -> None:
    """Returns when the rank has it, which may be writing to a slow disk.

    `dist.send` was rejected: it waits no longer than connections may take, whatever limit the group was given later.
    """
    work = dist.isend(block, rank)
    assert work is not None, "every rank is one of the group"
    work.wait(PATIENCE)


def _receive(block: Tensor, rank: int) -> None:
    """As `_send`."""
    work = dist.irecv(block, rank)
    assert work is not None, "every rank is one of the group"
    work.wait(PATIENCE)


def send_tensors(tensors: Sequence[SavedTensor]) -> None:
    """What a rank that does not write does during a save: give rank 0 its part of everything."""
    for tensor in tensors:
        for block in _blocks(tensor) if tensor.bytes_by_rank else ():
            _send(torch.tensor([len(block)]), 0)
            _send(block.cpu(), 0)


def receive_tensors(tensors: Sequence[SavedTensor]) -> None:
    """What a rank that does not read does during a restore: take its part of everything from rank 0."""
    staging = torch.empty(BLOCK, dtype=torch.uint8)
    for tensor in tensors:
        for block in _blocks(tensor):
            landing = staging[: len(block)]
            _send(torch.tensor([len(block)]), 0)
            _receive(landing, 0)
            block.copy_(landing)


def receive_blocks(rank: int, num_bytes: int) -> Iterator[memoryview]:
    """The next bytes from a rank that is in `send_tensors`."""
    staging = torch.empty(min(BLOCK, num_bytes), dtype=torch.uint8)
    for block in asked_blocks(rank, num_bytes, staging):
        _receive(block, rank)
        yield block.numpy().data


def asked_blocks(rank: int, num_bytes: int, staging: Tensor) -> Iterator[Tensor]:
    """Room for each block that the rank announces, until it has had `num_bytes`."""
    length = torch.zeros(1, dtype=torch.int64)
    while num_bytes:
        _receive(length, rank)
        num_bytes -= int(length)
        assert num_bytes >= 0, f"rank {rank} announced more than it has"
        yield staging[: int(length)]


def digest_file(path: Path, transfer: Transfer | None = None) -> Digest:
    """Size and checksum of what is on the disk."""
    hasher, num_bytes, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            num_bytes += count
            if transfer is not None:
                transfer.add(count)
    return Digest(num_bytes, hasher.hexdigest())


def _fill(read: Callable[[memoryview], int | None], view: memoryview) -> None:
    """Read until the view is full; one call may give less than was asked for."""
    while view:
        count = read(view)
        if not count:
            raise EOFError("the file ends before its tensors do")
        view = view[count:]
