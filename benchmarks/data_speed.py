"""Two million short rows: rendered, tokenized, masked and packed by Penstock, beside `datasets.map`, in one run.

    python benchmarks/data_speed.py --rows 2000000 --to benchmarks/results/DATE-cpu/data_speed.json

Each contender runs in a process of its own, one after another, on the same file, tokenizer and cores. Time is that of
the process's own work, without imports. Memory is the largest sum over it and its children of the memory that is theirs
(PSS: a page that several share counts once), looked at every half second; `at_rest` is what it was before the work.

`datasets.map` does less: it renders and tokenizes, with as many processes as there are cores, and makes no mask, no
packing and no check. Reading the JSON lines into Arrow is timed apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "on",
    "be",
    "by",
    "at",
    "this",
    "have",
)
RECIPE = {"max_length": 2048, "model": "demo"}


def write_rows(path: Path, rows: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for i in range(rows):
            question = " ".join(draw.choices(WORDS, k=draw.randint(4, 14)))
            answer = " ".join(draw.choices(WORDS, k=draw.randint(8, 47)))
            row = {"instruction": f"{question} {i}?", "input": "", "output": f"{answer}."}
            file.write(json.dumps(row) + "\n")


def memory(process: psutil.Process) -> int:
    total = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            total += each.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Watch:
    """Seconds of some work, and the most memory that it took."""

    def __enter__(self):
        self._end, me = threading.Event(), psutil.Process()
        self.at_rest = self.peak = memory(me)

        def look():
            while not self._end.wait(0.5):
                self.peak = max(self.peak, memory(me))

        self._thread = threading.Thread(target=look)
        self._thread.start()
        self._start, self._cpu = time.perf_counter(), cpu_seconds()
        return self

    def __exit__(self, *_):
        self.seconds, self.cpu = time.perf_counter() - self._start, cpu_seconds() - self._cpu
        self._end.set()
        self._thread.join()

    def found(self, **more):
        """For the result file."""
        return {
            "seconds": round(self.seconds, 2),
            "cpu_seconds": round(self.cpu, 2),
            "peak_mb": self.peak >> 20,
            "at_rest_mb": self.at_rest >> 20,
            **more,
        }


def penstock(path: str) -> dict:
    """The whole of what a run does with its data before the first step."""
    import dataclasses

    from penstock.data.loader import prepare
    from penstock.model.load import load_tokenizer
    from penstock.recipe.recipe import Recipe

    recipe = Recipe(data=path, **RECIPE)
    tokenizer = load_tokenizer(recipe)
    with Watch() as watch:
        data = prepare(recipe, tokenizer, len(tokenizer), lambda _: None)
    counts = dataclasses.asdict(data.train.store.counts)
    ids = hashlib.sha256(data.train.store.ids.tobytes()).hexdigest()
    return watch.found(examples=counts["kept"], tokens=counts["tokens"], ids=ids)


def datasets_map(path: str) -> dict:
    import datasets

    from penstock.model.load import load_tokenizer
    from penstock.recipe.recipe import Recipe

    tokenizer = load_tokenizer(Recipe(**RECIPE))

    def tokenize(batch):
        chats = [
            [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
            for q, a in zip(batch["instruction"], batch["output"], strict=True)
        ]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}

    datasets.disable_progress_bars()
    with Watch() as reading:
        table = datasets.load_dataset("json", data_files=path, split="train")
    with Watch() as watch:
        table = table.map(tokenize, batched=True, num_proc=cores(), remove_columns=table.column_names)
    digest = hashlib.sha256()
    tokens = 0
    import numpy as np

    for batch in table.with_format("arrow").iter(batch_size=10_000):
        ids = batch["input_ids"].combine_chunks().values.to_numpy().astype(np.uint32)
        digest.update(ids.tobytes())
        tokens += len(ids)
    return watch.found(
        examples=len(table), tokens=tokens, ids=digest.hexdigest(), reading_seconds=round(reading.seconds, 2)
    )


def cores() -> int:
    return len(os.sched_getaffinity(0))


CONTENDERS = {
    "datasets": datasets_map,
    "penstock": penstock,
    "penstock_cached": penstock,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--to", default="")
    parser.add_argument("--one", choices=CONTENDERS, default="", help=argparse.SUPPRESS)
    parser.add_argument("--file", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(CONTENDERS[args.one](args.file)))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        write_rows(path, args.rows)
        where = {
            "HF_HOME": f"{directory}/hf",
            "PENSTOCK_CACHE": f"{directory}/cache",
            "TOKENIZERS_PARALLELISM": "false",
        }
        found: dict = {
            "rows": args.rows,
            "file_mb": path.stat().st_size >> 20,
            "cores": cores(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--one", name, "--file", str(path)]
            result = subprocess.run(command, env={**os.environ, **where}, stdout=subprocess.PIPE, text=True, check=True)
            found[name] = json.loads(result.stdout.splitlines()[-1])
            print(name, found[name], flush=True)
    assert found["penstock"]["ids"] == found["datasets"]["ids"], "the same rows must give the same tokens"
    if args.to:
        Path(args.to).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
