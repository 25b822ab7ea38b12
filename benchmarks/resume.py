"""Save and resume of a model with state in all three homes: to the bit, and how fast beside the disk itself.

    OUT=out python benchmarks/resume.py qwen3-14b shape=num_hidden_layers=8 homes=gpu=0.4,stream=0.3,host=0.3

One process trains, saves, trains on, goes back by itself and trains on again (so that a difference can be told from
arithmetic that does not repeat). A second process takes up the checkpoint with other homes and trains on. Both print a
hash of every tensor. The disk's own rate is measured in the same run, with the same number of threads. Appends a row to
$OUT/resume.jsonl; the checkpoint lies in $OUT/resume and is removed at the end.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from penstock.checkpoint.store import NUM_THREADS, find, open_checkpoint, read_tensors, save, verify
from penstock.checkpoint.tensors import safetensors
from penstock.engine.native import NativeEngine
from penstock.engine.trial import full_batch
from penstock.machine.hardware import describe, make_repeatable, pick_device, pick_dtype
from penstock.model.load import load_config, load_model
from penstock.recipe.lists import parse_homes
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values

OUT = Path(os.environ.get("OUT", "."))
STEPS = 3
DISK_BYTES = int(os.environ.get("DISK_BYTES", 8 * 2**30))


def parse(preset, settings):
    values = {"init": "random", "homes": "gpu=0.4,stream=0.3,host=0.3"} | dict(s.split("=", 1) for s in settings)
    typed = {key: json.loads(value) if value[0] in "0123456789" else value for key, value in values.items()}
    return with_values(dataclasses.replace(PRESETS[preset], recompute="full"), typed, "command line")


def turned(homes):
    """The same shares, each for another home."""
    shares = parse_homes(homes)
    return ",".join(
        f"{name}={share}" for name, share in zip([*list(shares)[1:], *list(shares)[:1]], shares.values(), strict=True)
    )


def build(recipe):
    make_repeatable(dataclasses.replace(recipe, deterministic=True))
    device = pick_device(recipe.device)
    recipe = dataclasses.replace(recipe, dtype=pick_dtype(recipe.dtype, device))
    config = load_config(recipe)
    model = load_model(recipe, config, device, print)
    engine = NativeEngine(model, recipe, print)
    batch = full_batch(recipe.rows_at_once, recipe.max_length, config.get_text_config().vocab_size)
    return engine, batch


def train(engine, batch):
    for _ in range(STEPS):
        engine.begin(1e-4)
        engine.accumulate(batch, batch.num_trained, last=True)
        result = engine.step()
    return result.loss


def fingerprint(engine):
    """A hash of every tensor, in a fixed order."""
    hasher = xxhash.xxh3_128()
    for tensors in engine.saved_tensors().values():
        for block in safetensors(sorted(tensors, key=lambda t: t.name)):
            hasher.update(block)
    return hasher.hexdigest()


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def forget(path):
    """Let the kernel drop the pages of a file, so that reading it asks the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def disk_rates(directory, threads):
    """GB/s of plain writes with a sync at the end, and of plain reads, in `threads` files at once."""
    block = os.urandom(2**20) * 16
    count = DISK_BYTES // len(block) // threads
    paths = [directory / f"disk-{number}" for number in range(threads)]

    def write(path):
        with open(path, "wb", buffering=0) as file:
            for _ in range(count):
                file.write(block)
            os.fsync(file.fileno())

    def read(path):
        buffer = bytearray(len(block))
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(threads) as pool:
        written = timed(lambda: list(pool.map(write, paths)))
        for path in paths:
            forget(path)
        read_s = timed(lambda: list(pool.map(read, paths)))
    for path in paths:
        path.unlink()
    total = threads * count * len(block) / 1e9
    return {"write_gb_s": total / written, "read_gb_s": total / read_s}


def first(recipe, directory):
    engine, batch = build(recipe)
    train(engine, batch)
    tensors = engine.saved_tensors()
    num_bytes = sum(t.num_bytes for members in tensors.values() for t in members)
    disk = {f"disk_{threads}": disk_rates(directory, threads) for threads in (1, NUM_THREADS)}
    seconds = timed(lambda: save(directory / "checkpoints", STEPS, tensors, {}, print))
    saved = fingerprint(engine)
    train(engine, batch)
    end = fingerprint(engine)
    for group, members in engine.saved_tensors().items():
        read_tensors(open_checkpoint(find(directory / "checkpoints")[0]), group, members, print)
    engine.restored()
    train(engine, batch)
    return {
        "gb": num_bytes / 1e9, "save_gb_s": num_bytes / 1e9 / seconds, **disk, "saved": saved, "end": end,
        "repeated": fingerprint(engine), "homes": engine.optimizer.describe(),
        "machine": describe(engine.packed.device),
    }  # fmt: skip


def second(recipe, directory):
    engine, batch = build(dataclasses.replace(recipe, homes=turned(recipe.homes)))
    checkpoint = open_checkpoint(find(directory / "checkpoints")[0])
    groups, seconds = engine.saved_tensors().items(), {}
    parts = {
        "verify": lambda: verify(checkpoint, print),
        "load": lambda: [read_tensors(checkpoint, group, members, print) for group, members in groups],
    }
    for name, part in parts.items():
        for file in checkpoint.files:
            forget(checkpoint.path / file)
        seconds[name] = timed(part)
    engine.restored()
    restored = fingerprint(engine)
    train(engine, batch)
    rates = {f"{name}_gb_s": checkpoint.num_bytes / 1e9 / s for name, s in seconds.items()}
    return {
        "restored": restored,
        "resumed_end": fingerprint(engine),
        "resumed_homes": engine.optimizer.describe(),
        **rates,
    }


def main(*words):
    if words[0] in ("first", "second"):
        result = (first if words[0] == "first" else second)(parse(words[1], words[2:]), OUT / "resume")
        (OUT / "resume" / f"{words[0]}.json").write_text(json.dumps(result))
        return
    (OUT / "resume").mkdir(parents=True, exist_ok=True)
    row = {"date": datetime.now(UTC).date().isoformat(), "recipe": " ".join(words)}
    for part in ("first", "second"):
        subprocess.run([sys.executable, __file__, part, *words], check=True)
        row |= json.loads((OUT / "resume" / f"{part}.json").read_text())
    row["restored_to_the_bit"] = row["restored"] == row["saved"]
    row["resumed_to_the_bit"] = row["resumed_end"] == row["end"]
    row["arithmetic_repeats"] = row["repeated"] == row["end"]
    with (OUT / "resume.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    shutil.rmtree(OUT / "resume")
    print(json.dumps(row, indent=1))
    sys.exit(0 if row["restored_to_the_bit"] and (row["resumed_to_the_bit"] or not row["arithmetic_repeats"]) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
