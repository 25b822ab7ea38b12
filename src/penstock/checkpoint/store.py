"""Checkpoints on disk: directories that are there whole or not at all, and that show every damaged byte.

    checkpoints/step-00000100/   manifest.json  run.json  weights-00001.safetensors  state-00001.safetensors ...
    checkpoints/.saving-...      a save that is going on, or was cut off
    checkpoints/.debris-...      what is being removed, or was when the process died

A save writes into `.saving-`, every file synced and hashed, the manifest last, and then renames once. A removal renames
first. So at any instant a directory called `step-` with a manifest is a complete checkpoint; anything else is debris,
which resume does not see and the next save clears away. Which is newest is told by the step in the name, never by
clocks. A step that is saved again gets a name of its own (`step-00000100.1`): two renames, or none, would leave an
instant without the old and without the new one.

Only JSON and safetensors are read, after every byte of them was compared with the manifest; pickles were rejected,
since loading one runs whatever is in it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from penstock.checkpoint.places import MANIFEST
from penstock.checkpoint.tensors import Digest, Transfer, digest_file, in_file_order, read_file, safetensors, write_file
from penstock.errors import CheckpointError, ModelError
from penstock.machine.hardware import usable_cores
from penstock.model.weight_files import read_header
from penstock.offload.saved_tensors import SavedTensor

FORMAT = 2
"""Format 1, still read, also kept the powers of AdamW's betas. Runs of it decayed weights with another rounding."""
GONE = {1: {"powers"}, 2: set()}
"""By format, tensors that nobody has any more."""
FILE_BYTES = 2 * 2**30
"""Where a file ends and the next begins. Files are what threads share out, so there should be many."""
NUM_THREADS = 4
"""Files written at once. One stream leaves the disk waiting: measured 0.9 GB/s with one, 1.7 with two, 1.8 with four
(2 cores, 4.3 GB), where a plain copy of one file made 1.0."""

_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_FILE = re.compile(r"[A-Za-z0-9_-]+\.(json|safetensors)")
_SAVING, _DEBRIS = ".saving-", ".debris-"
IN_USE = (errno.ENOTEMPTY, errno.EBUSY)
"""What network file systems say of removing a directory while another process has a file of it open."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its manifest is good. Whether its files are is what `verify` finds out."""

    path: Path
    step: int
    files: Mapping[str, Digest]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(digest.num_bytes for digest in self.files.values())


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Sequence[SavedTensor]],
    documents: Mapping[str, Any],
    say: Say,
) -> Checkpoint:
    """Write a checkpoint of `step` to `directory`, from where the tensors lie. It exists when this returns."""
    path, building = begin_save(directory, step)
    try:
        files = write_all(building, tensors, documents, say)
        return end_save(building, path, step, files)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)  # give the space back at once: the disk may be full
        raise


def begin_save(directory: Path, step: int) -> tuple[Path, Path]:
    """The name that a checkpoint of `step` will have, and a new directory to write it in."""
    if not directory.exists():
        directory.mkdir()
        sync_directory(directory.parent)
    sweep(directory)
    path = directory / _free_name(directory, step)
    building = directory / f"{_SAVING}{path.name}"
    building.mkdir()
    return path, building


def end_save(building: Path, path: Path, step: int, files: Mapping[str, Digest]) -> Checkpoint:
    """All files are there: the manifest, and the rename that makes them a checkpoint."""
    write_file(building / MANIFEST, _json(_sealed({"format": FORMAT, "step": step, "files": files})))
    sync_directory(building)
    os.rename(building, path)
    sync_directory(path.parent)
    return Checkpoint(path, step, files)


def write_all(
    building: Path, tensors: Mapping[str, Sequence[SavedTensor]], documents: Mapping[str, Any], say: Say
) -> dict[str, Digest]:
    """Every file but the manifest."""
    transfer = Transfer("saving", _num_bytes(tensors), say)
    content: dict[str, Iterator[memoryview]] = {f"{name}.json": _json(value) for name, value in documents.items()}
    for group, members in tensors.items():
        for number, part in enumerate(_parts(members), start=1):
            content[f"{group}-{number:05}.safetensors"] = safetensors(part)
    over_ranks = any(tensor.bytes_by_rank for members in tensors.values() for tensor in members)
    num_threads = 1 if over_ranks else NUM_THREADS  # other ranks send their parts file after file
    with ThreadPoolExecutor(num_threads, "penstock-save") as pool:
        futures = {name: pool.submit(write_file, building / name, c, transfer) for name, c in content.items()}
        try:
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)  # the first error ends the save; the rest need not be tried
            raise


def _parts(tensors: Sequence[SavedTensor]) -> Iterator[list[SavedTensor]]:
    """Tensors in order, in files of at most FILE_BYTES; a larger tensor has one to itself."""
    part: list[SavedTensor] = []
    size = 0
    for tensor in tensors:
        if part and size + tensor.num_bytes > FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.num_bytes
    if part:
        yield part


def order_of_save(tensors: Mapping[str, Sequence[SavedTensor]]) -> list[SavedTensor]:
    """Tensors in the order in which a save writes them: what ranks that do not write go by."""
    return [t for members in tensors.values() for part in _parts(members) for t in in_file_order(part)]


def _num_bytes(tensors: Mapping[str, Sequence[SavedTensor]]) -> int:
    return sum(tensor.num_bytes for members in tensors.values() for tensor in members)


def find(directory: Path) -> list[Path]:
    """Complete checkpoints, newest first. Damage in them is not looked for."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if _STEP.fullmatch(path.name) and (path / MANIFEST).exists()]
    return sorted(named, key=lambda path: _place(path.name), reverse=True)


def check_links(directory: Path) -> None:
    """Refuse links to a disk that is not there: a run would begin anew, and its checkpoints are whole."""
    for path in (directory, *directory.glob("step-*")):
        if path.is_symlink() and not path.exists():
            what = f"is a link to {os.readlink(path)}, which is not there"
            raise CheckpointError(what, where=str(path), remedy="See that its disk is mounted, or remove the link.")


def _place(name: str) -> tuple[int, int]:
    """Step, and how often it had been saved before."""
    match = _STEP.fullmatch(name)
    assert match is not None, f"{name} is not a checkpoint's name"
    return int(match[1]), int(match[2] or 0)


def _free_name(directory: Path, step: int) -> str:
    taken = [_place(path.name)[1] for path in directory.iterdir() if _STEP.fullmatch(path.name)
             if _place(path.name)[0] == step]  # fmt: skip
    return f"step-{step:08}" + (f".{max(taken) + 1}" if taken else "")


DAMAGED = "A damaged checkpoint cannot be mended; the others are not touched by it."
OTHER_MODEL = "The checkpoint is of another model: give the one that the run began with."

# --- reading ----------------------------------------------------------------------------------------------------------


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory, its manifest checked. No other file is looked at."""
    manifest = path / MANIFEST
    remedy = "Name a directory such as runs/mine/checkpoints/step-00000100."
    if not path.exists():
        raise CheckpointError("no such directory", where=str(path), remedy=remedy)
    if not manifest.is_file() or manifest.is_symlink():
        raise CheckpointError("is not a checkpoint: it has no manifest", where=str(path), remedy=remedy)
    try:
        values = json.loads(manifest.read_bytes())
        checksum = values.pop("checksum")
        if checksum != _sealed(values)["checksum"]:
            raise ValueError("its checksum is another")
        if values["format"] not in GONE:
            what = f"has format {values['format']}, and formats up to {FORMAT} are read here"
            raise CheckpointError(what, where=str(manifest), remedy="Use the version of penstock that wrote it.")
        files = {str(name): Digest(int(d["num_bytes"]), str(d["xxh3_128"])) for name, d in values["files"].items()}
        step = int(values["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the manifest is damaged: {error}", where=str(manifest), remedy=DAMAGED) from None
    for name in files:
        if not _FILE.fullmatch(name) or name == MANIFEST:
            what = f"names {name!r}, which is no name of a file in this directory that a checkpoint may hold"
            raise CheckpointError(what, where=str(manifest), remedy="Somebody changed it: do not use this checkpoint.")
    if _STEP.fullmatch(path.name) and _place(path.name)[0] != step:
        what = f"is of step {step} and called {path.name}"
        raise CheckpointError(what, where=str(manifest), remedy=f"Rename the directory to step-{step:08}.")
    return Checkpoint(path, step, files, int(values["format"]))


def verify(checkpoint: Checkpoint, say: Say) -> None:
    """Compare every byte of every file with the manifest; the first file that differs is named."""
    listed = checkpoint.files.keys() | {MANIFEST}
    for path in checkpoint.path.iterdir():
        if path.name not in listed:
            what = "does not belong to the checkpoint"
            raise CheckpointError(what, where=str(path), remedy="Move the file elsewhere.")
    transfer = Transfer("checking", checkpoint.num_bytes, say)
    with ThreadPoolExecutor(max(1, min(8, len(usable_cores()))), "penstock-verify") as pool:
        largest_first = sorted(checkpoint.files, key=lambda name: -checkpoint.files[name].num_bytes)
        found = pool.map(lambda name: _damage(checkpoint, name, transfer), largest_first)
        damages = {name: damage for name, damage in zip(largest_first, found, strict=True) if damage}
    for name, damage in sorted(damages.items()):
        raise CheckpointError(damage, where=str(checkpoint.path / name), remedy=DAMAGED)


def _damage(checkpoint: Checkpoint, name: str, transfer: Transfer) -> str:
    """What is wrong with a file, or nothing."""
    path, expected = checkpoint.path / name, checkpoint.files[name]
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is not a plain file"  # a link could point anywhere
        if difference := differs(path, expected, transfer):
            return difference
        json.loads(path.read_bytes()) if path.suffix == ".json" else read_header(path)
    except FileNotFoundError:
        return "is missing"
    except ModelError as error:
        return error.what
    except ValueError:
        return "is not JSON"
    return ""


def differs(path: Path, expected: Digest, transfer: Transfer) -> str:
    """In what a file differs from what was written, or nothing."""
    try:
        if path.stat().st_size != expected.num_bytes:
            return f"has {path.stat().st_size:,} bytes and should have {expected.num_bytes:,}"
        same = digest_file(path, transfer) == expected
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if same else "is damaged: its checksum is not the one it was written with"


def read_document(checkpoint: Checkpoint, name: str) -> Any:
    """One of the JSON files, after a check of its own, so that it can be read before everything is verified."""
    file = f"{name}.json"
    damage = _damage(checkpoint, file, Transfer("", 0, lambda _: None)) if file in checkpoint.files else "is missing"
    if damage:
        raise CheckpointError(damage, where=str(checkpoint.path / file), remedy=DAMAGED)
    return json.loads((checkpoint.path / file).read_bytes())


def order_of_load(checkpoint: Checkpoint, group: str, tensors: Sequence[SavedTensor]) -> list[str]:
    """Names of the tensors of a group in the order in which they are read. All must be there, and no others."""
    found = [(name, entry) for path in _files(checkpoint, group) for name, entry in read_header(path).items()]
    listed = [(name, entry) for name, entry in found if name not in GONE[checkpoint.format]]
    stored, wanted = dict(listed), {tensor.name: tensor for tensor in tensors}
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored or name not in wanted:
            lacks = "the checkpoint lacks it" if name in wanted else "the model has no such tensor"
            raise CheckpointError(f"{name}: {lacks}", where=str(checkpoint.path), remedy=OTHER_MODEL)
        there, here = (stored[name].shape, stored[name].stored), (wanted[name].shape, wanted[name].dtype)
        if there != here:
            what = f"is {list(there[0])} {there[1]} here and {list(here[0])} {here[1]} in the model"
            raise CheckpointError(f"{name} {what}", where=str(stored[name].path), remedy=OTHER_MODEL)
    return [name for name, _ in listed]


def _files(checkpoint: Checkpoint, group: str) -> list[Path]:
    return [checkpoint.path / name for name in checkpoint.files if re.fullmatch(rf"{group}-\d+\.safetensors", name)]


def read_tensors(
    checkpoint: Checkpoint, group: str, tensors: Sequence[SavedTensor], say: Say, num_ranks: int = 1
) -> None:
    """Write a group of tensors to where they lie. All of them must be there, and no others; that is seen to first.

    Other ranks must be in `receive_tensors`, in the order of `order_of_load`.
    """
    order_of_load(checkpoint, group, tensors)  # refuses what does not fit
    wanted = {tensor.name: tensor for tensor in tensors}
    transfer = Transfer("loading", sum(tensor.num_bytes for tensor in tensors), say)

    def read(path: Path) -> None:
        try:
            read_file(path, wanted, transfer, num_ranks)
        except OSError as error:  # of a disk that failed since all was verified
            remedy = "See that its disk is there, and resume again: nothing was written."
            raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path), remedy=remedy) from error

    with ThreadPoolExecutor(NUM_THREADS if num_ranks == 1 else 1, "penstock-load") as pool:
        for _ in pool.map(read, _files(checkpoint, group)):
            pass


# --- removing ---------------------------------------------------------------------------------------------------------


def prune(directory: Path, keep: int, current: Checkpoint, best_step: int = 0) -> list[Path]:
    """Keep the newest `keep` checkpoints, `current` among them, and the newest of `best_step`; give what is in use.

    Those of a later step are no future of this run: it went back to an earlier one, perhaps because they are damaged.
    """
    found = find(directory)
    later = [path for path in found if _place(path.name)[0] > current.step]
    again = [path for path in found if _place(path.name)[0] == current.step and path.name != current.path.name]
    earlier = [path for path in found if _place(path.name)[0] < current.step]
    best = next((path for path in earlier if _place(path.name)[0] == best_step), None)
    superfluous = [path for path in (*later, *again, *earlier[max(0, keep - 1) :]) if path != best]
    return [path for path in superfluous if not remove(path)]


def of_step(directory: Path, step: int) -> Path | None:
    """The complete checkpoint of a step, if there is one."""
    return next((path for path in find(directory) if _place(path.name)[0] == step), None)


def remove(path: Path) -> bool:
    """Remove a directory so that it is never there in part. False: something of it is in use, and left to a sweep."""
    debris = path.with_name(f"{_DEBRIS}{path.name}")
    while os.path.lexists(debris):  # in use: the new name must be free, or a later step would stay the newest
        debris = debris.with_name(f"{debris.name}.1")
    os.rename(path, debris)
    sync_directory(path.parent)
    return _clear(debris)


def sweep(directory: Path) -> None:
    """Clear away what saves and removals left that were cut off."""
    for path in directory.iterdir():
        half = path.name.startswith((_SAVING, _DEBRIS))
        if half or (_STEP.fullmatch(path.name) and not (path / MANIFEST).exists()):
            _clear(path)


def _clear(path: Path) -> bool:
    """Remove what is no checkpoint any more. False: something of it is in use, and the next sweep tries again."""
    try:
        path.unlink(missing_ok=True) if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    except OSError as error:
        if error.errno not in IN_USE:
            raise
        return False
    return True


def sync_directory(path: Path) -> None:
    """Make what was created, renamed or removed in a directory last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync files alone
            raise
    finally:
        os.close(descriptor)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """With a checksum of all the rest: the manifest vouches for the files, and nothing else for the manifest."""
    plain = json.loads(json.dumps(values, default=asdict))
    text = json.dumps(plain, sort_keys=True)
    return {**plain, "checksum": xxhash.xxh3_128_hexdigest(text.encode())}


def _json(value: Any) -> Iterator[memoryview]:
    yield memoryview(json.dumps(value, indent=1).encode())
