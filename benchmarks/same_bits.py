"""Proof that a refactoring changed nothing that a user can see: two installations, the same commands, the same bits.

    python benchmarks/same_bits.py /old/.venv/bin/python /new/.venv/bin/python:/new/src

OLD and NEW are interpreters, each with a PYTHONPATH after a colon where it needs one. Both run on the CPU, in temporary
directories, in the same order: a grid of trainings, checkpoints of OLD taken up by both, plans, data, help, and broken
inputs. Compared are exit codes, both outputs, `--json` objects, and every file of a run: names, tensors by sha256, JSON
value by value. Times, rates, paths and versions may differ, and nothing else. A difference is a line; any makes the
exit code 1. Placement is meant to change now and then: values of plans become a table, and fail with --plans strict.

Tests compare with figures that somebody wrote down, and change with the code they test. This compares with the old code
itself, and so covers what no test thought of. It costs a process a command, so commands are forked out of a process
that has imported torch and transformers (never penstock) already, which is ten times faster; a few are started cold, in
case a command misses an import of its own.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from same_bits_cases import Case, all_cases

TIMEOUT_S = 120
FOREIGN = ("SLURM_", "PENSTOCK_", "PYTHON", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "HF_")
"""Variables of the environment that a command might follow, and that are none of ours."""
SHOWN = 6
"""Differences of one file that are printed; the rest are counted."""

VARYING = re.compile(
    r"(^|\.|_)(seconds|tokens_per_s|\w+_tflops|started|checksum|python|\w*version)$"
    r"|(^|\.)packages\."
    r"|files\.(run|metrics|rng)\.json\.(num_bytes|xxh3_128)$"  # they hold some of this, and are compared themselves
    r"|^(python|numpy)\.1\.\d+$"  # states of two generators that no recipe seeds
    r"|^this process, the rest\.num_bytes$"
)
"""Paths of JSON values of which only the type is compared."""


def serve() -> None:
    """Fork a `python -m penstock` for every line of standard input, and answer with its exit codes."""
    answers = os.dup(1)
    os.dup2(2, 1)
    import torch.distributed.fsdp
    import transformers.models.llama.modeling_llama  # noqa: F401

    package = find_spec("penstock")
    if package is None:
        sys.exit(f"{sys.executable} has no penstock")
    torch.set_num_threads(1)
    gc.freeze()  # or every collection in a fork would copy all pages with objects of the server
    os.write(answers, (json.dumps([package.submodule_search_locations[0], sys.prefix]) + "\n").encode())
    for line in sys.stdin:
        asked = json.loads(line)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        children = []
        for rank in range(asked["ranks"]):
            children.append(os.fork())
            if children[-1] == 0:
                become(asked, rank, port)
        os.write(answers, (json.dumps(wait(children)) + "\n").encode())
    os._exit(0)  # or Triton's library would complain of its own leaks


def become(asked: dict, rank: int, port: int) -> None:
    """Turn this fork into the command; it ends with it."""
    os.setsid()
    os.chdir(asked["directory"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{asked['outputs']}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if asked["ranks"] > 1:
        ranks = str(asked["ranks"])
        os.environ.update(RANK=str(rank), WORLD_SIZE=ranks, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    if asked["cold"]:
        os.execv(sys.executable, [sys.executable, "-m", "penstock", *asked["words"]])
    sys.path[0] = ""  # as `python -m` has it; our own directory has modules whose names others might want
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115, the server's own has read ahead
    sys.argv = ["penstock", *asked["words"]]
    codes = [1]  # of an exception that nobody caught
    atexit.register(leave, codes)
    try:
        runpy.run_module("penstock", run_name="__main__", alter_sys=True)
        codes[0] = 0
    except SystemExit as error:
        codes[0] = error.code if isinstance(error.code, int) else int(error.code is not None)
    sys.exit()  # through the exit of its threads and all that the command registered; `leave` comes last


def leave(codes: list[int]) -> None:
    """End a fork. To free all of its memory, as Python would, takes it two seconds: each page is first copied."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(codes[0])


def wait(children: list[int]) -> list[int]:
    """Exit codes. Who is late is killed, with the processes it started, and so is who waits for a rank that failed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(codes) < len(children):
        for child in children:
            ended, status = (0, 0) if child in codes else os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + 10) if codes[child] else deadline
        if time.monotonic() > deadline:
            for child in set(children) - codes.keys():
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[child] for child in children]


class Side:
    """One installation: its server, its directories, and what it has run."""

    def __init__(self, name: str, installation: str, work: Path) -> None:
        python, _, path = installation.partition(":")
        self.name, self.work, self.outcomes = name, work / name, {}
        (self.work / "outputs").mkdir(parents=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        environment = {**kept, "PYTHONPATH": path, "PENSTOCK_CACHE": str(self.work / "cache")}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
        environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        command = [python, __file__, "--serve"]
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.package, self.prefix = self._answer()

    def run(self, made: Case, start: Path | None) -> Outcome:
        """The command in a new directory, which begins as a copy of `start`."""
        directory, outputs = self.work / "cases" / re.sub(r"\W+", "-", made.name), self.work / "outputs"
        if start:
            shutil.copytree(start, directory)
        else:
            directory.mkdir(parents=True)
        if made.prepare:
            made.prepare(directory)
        for old in outputs.iterdir():
            old.unlink()
        asked = {"words": made.words, "ranks": made.ranks, "cold": made.cold}
        asked |= {"directory": str(directory), "outputs": str(outputs)}
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        codes = self._answer()
        printed = {path.name: path.read_text(encoding="utf-8") for path in sorted(outputs.iterdir())}
        return Outcome(directory, codes, {name: self.plain(text) for name, text in printed.items()})

    def _answer(self) -> list:
        line = self.server.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: the server of {self.server.args[0]} ended; see above")
        return json.loads(line)

    def plain(self, text: str) -> str:
        """Without what two runs of the same code differ in: paths, times, rates, version."""
        text = re.sub(re.escape(self.package) + r"[\w./-]*/", "<penstock>/", text)  # modules may move in it
        text = text.replace(str(self.work), "<work>").replace(self.prefix, "<python>")
        text = re.sub(r"penstock \d+\.\d+\.\d+\S*", "penstock <version>", text)
        text = re.sub(r"(?m)^  [^\n]*: \d+\.\d s(, .* GB/s)?\n", "", text)  # phases that took two seconds
        text = re.sub(r" *[\d,.]+ (tokens|[KMG]B|[TG]FLOP)/s", r" # \1/s", text)
        text = re.sub(r"\b\d+\.\d+ s\b", "# s", text)
        text = re.sub("─+", "─", text)  # a box is as wide as the path in its title leaves it
        return re.sub(r"\d+:\d\d:\d\d", "#:##:##", text)

    def files(self, directory: Path) -> dict[str, dict[str, str]]:
        """Every file by its name: its parts, and the value of each as text."""
        found = (path for path in sorted(directory.rglob("*")) if path.is_file())
        return {str(path.relative_to(directory)): self.parts(path) for path in found}

    def parts(self, path: Path) -> dict[str, str]:
        """What is compared of a file, by the kind that it is."""
        if path.suffix == ".safetensors":
            return tensors(path)
        if path.suffix == ".json":
            return self.values(path.read_text(encoding="utf-8"))
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            return {f"{n}.{k}": v for n, line in enumerate(lines, 1) for k, v in self.values(line).items()}
        if path.suffix == ".html":  # charts of times: its headings, and nothing else
            return dict(enumerate(re.findall(r"<h\d.*?</h\d>", path.read_text(encoding="utf-8"))))
        try:
            return {"text": self.plain(path.read_text(encoding="utf-8"))}
        except UnicodeDecodeError:
            return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}

    def values(self, text: str, *, exact: bool = False) -> dict[str, str]:
        """The leaves of a JSON text, by path, with their types; exactly, or without times."""
        try:
            leaves = dict(flat(json.loads(text)))
        except ValueError:
            return {"text": self.plain(text)}
        if exact:
            return {path: repr(leaf) for path, leaf in leaves.items()}
        varying = {path: type(leaf).__name__ for path, leaf in leaves.items() if VARYING.search(path)}
        return {path: self.plain(repr(leaf)) for path, leaf in leaves.items()} | varying


@dataclass(frozen=True)
class Outcome:
    """What a command left."""

    directory: Path
    codes: list[int]
    printed: dict[str, str]


def flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Leaves with their paths. Parts of memory go by name; of a timeline, which lanes were ever busy is left."""
    if isinstance(value, dict) and isinstance(value.get("spans"), list):
        value = value | {"spans": sorted({span["lane"] for span in value["spans"]})}
    if isinstance(value, dict) and value:
        pairs = value.items()
    elif isinstance(value, list) and value:
        named = all(isinstance(item, dict) and "part" in item for item in value)
        pairs = ((item["part"] if named else number, item) for number, item in enumerate(value))
    else:
        yield path, value
        return
    for key, item in pairs:
        yield from flat(item, f"{path}.{key}" if path else str(key))


def tensors(path: Path) -> dict[str, str]:
    """sha256 of a file, and of each tensor in it, so that a difference has a name."""
    content = memoryview(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(bytes(content[8 : 8 + length]))
    found = {"metadata": str(header.pop("__metadata__", None)), "order": " ".join(header)}
    for name, tensor in header.items():
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        found[name] = f"{tensor['dtype']} {tensor['shape']} {hashlib.sha256(content[begin:end]).hexdigest()}"
    return found


def between(old: dict, new: dict, where: str) -> list[str]:
    """A line for every key whose values differ or that one side lacks."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    lines = [f"{where}: {key}: {brief(old.get(key))} -> {brief(new.get(key))}" for key in keys[:SHOWN]]
    return lines + ([f"{where}: and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else [])


def brief(value: object) -> str:
    text = "nothing" if value is None else str(value).replace("\n", "\\n")
    return text if len(text) <= 160 else f"{text[:100]}...{text[-57:]}"


def by_line(text: str) -> dict[str, str]:
    return {f"line {number}": line for number, line in enumerate(text.splitlines(), 1)}


def without_findings(values: dict[str, str]) -> dict[str, str]:
    """What `doctor` found changes from minute to minute; which topics it has, and in which form, does not."""
    return {path: value if path.endswith(".topic") else value[:1] for path, value in values.items()}


class Comparison:
    """Runs cases on both sides at once, which share no directory, and gathers what differs."""

    def __init__(self, old: Side, new: Side, cases: list[Case]) -> None:
        self.sides, self.cases = (old, new), {made.name: made for made in cases}
        self.starts = {made.start for made in cases}
        self.outcomes: dict[str, tuple[Outcome, Outcome]] = {}
        self.told: set[str] = set()  # what differs in the files of a start differs in each copy
        self.pool = ThreadPoolExecutor(2)

    def run(self, name: str) -> list[str]:
        """What differs in a case; one that others start with is run once, and its directories stay."""
        made = self.cases[name]
        lines = [] if made.start in ("", *self.outcomes) else self.run(made.start)
        starts = [outcome.directory for outcome in self.outcomes[made.start]] if made.start else [None, None]
        starts = [starts[0]] * 2 if made.takes_up else starts
        both = tuple(self.pool.map(lambda side, start: side.run(made, start), self.sides, starts))
        found = self.compare(made, *both)
        lines += [line for line in found if line.replace(made.name, made.start, 1) not in self.told]
        self.told.update(found)
        if name in self.starts:
            self.outcomes[name] = both
        else:
            for outcome in both:
                shutil.rmtree(outcome.directory)
        return lines

    def compare(self, made: Case, old: Outcome, new: Outcome) -> list[str]:
        """Exit codes, outputs and files."""
        lines = []
        if made.expected is not None and set(old.codes) != {made.expected}:
            said = brief(old.printed.get("stderr-0", ""))
            lines.append(f"{made.name}: OLD ends with {old.codes}, expected {made.expected}: {said}")
        if old.codes != new.codes:
            lines.append(f"{made.name}: exit codes: {old.codes} -> {new.codes}")
        for output in sorted({*old.printed, *new.printed}):
            values = [self.shown(made, output, outcome) for outcome in (old, new)]
            lines += between(*values, f"{made.name}: {output}")
        files = list(self.pool.map(lambda side, outcome: side.files(outcome.directory), self.sides, (old, new)))
        for name in sorted({*files[0], *files[1]}):
            if name not in files[0] or name not in files[1]:
                lines.append(f"{made.name}: {name}: written by {'OLD' if name in files[0] else 'NEW'} only")
            else:
                lines += between(files[0][name], files[1][name], f"{made.name}: {name}")
        return lines + (self.against_start(made, files[1]) if made.takes_up else [])

    def shown(self, made: Case, output: str, outcome: Outcome) -> dict[str, str]:
        """An output by line, or a JSON object by value."""
        text = outcome.printed.get(output, "")
        if output != "stdout-0" or not text.startswith(("{", "[")):
            return by_line(text)
        values = self.sides[0].values(text, exact=made.name.startswith("plan/"))
        return without_findings(values) if made.name == "doctor" else values

    def against_start(self, made: Case, new: dict[str, dict[str, str]]) -> list[str]:
        """A run that was taken up ends with the tensors of the one that never stopped."""
        whole = self.sides[0].files(self.outcomes[made.start][0].directory)
        names = [name for name in whole if name.endswith(".safetensors")]
        return [
            line
            for name in names
            for line in between(whole[name], new.get(name, {}), f"{made.name}: {name}: never stopped -> taken up")
        ]


def plan_row(text: str) -> str:
    """A plan in a few words."""
    plan = json.loads(text)
    if "settings" not in plan:
        return f"exit code {plan['exit_code']}: {brief(plan['error'])}"
    homes = ", ".join(f"{home} {share:.2f}" for home, share in plan["homes"].items())
    fits = "fits" if plan["fits"] else "does not fit"
    sizes = f"GPU {plan['gpu_bytes'] / 1e9:.1f} GB, host {plan['host_bytes'] / 1e9:.1f} GB"
    return f"{fits}, {' '.join(map(str, plan['settings'].values()))}, {homes}, {sizes}, {plan['seconds']['step']:.3f} s"


class Plans(Comparison):
    """Plans whose values may change: a row of a table each. Their outermost keys may not."""

    table: tuple[str, ...] = ()

    def compare(self, made: Case, old: Outcome, new: Outcome) -> list[str]:
        """As ever, but for the objects of plans."""
        if not made.name.startswith("plan/"):
            return super().compare(made, old, new)
        texts = [outcome.printed["stdout-0"] for outcome in (old, new)]
        if old.codes == new.codes and texts[0] == texts[1]:
            return []
        if not all(text.startswith("{") for text in texts):
            return super().compare(made, old, new)
        rows = [plan_row(text) for text in texts]
        same = " (the same in short)" if rows[0] == rows[1] else ""
        self.table += (f"{made.name}{same}", f"  old  {rows[0]}", f"  new  {rows[1]}")
        keys = [dict.fromkeys(json.loads(text).keys() - {"error", "exit_code"}, "a key") for text in texts]
        return between(*keys, f"{made.name}: stdout-0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("old", metavar="OLD", help="an interpreter, or INTERPRETER:PYTHONPATH")
    parser.add_argument("new", metavar="NEW", help="the same of the other installation")
    parser.add_argument("--only", default="", help="run only cases with this in their name, such as train/, or int8")
    whether = "whether values of plans must be the same, or may be a table"
    parser.add_argument("--plans", choices=("strict", "report"), default="report", help=whether)
    args = parser.parse_args()
    began = time.monotonic()
    cases = all_cases()
    chosen = [made.name for made in cases if args.only in made.name]
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="same-bits-") as work:
        old, new = (Side(name, text, Path(work)) for name, text in (("old", args.old), ("new", args.new)))
        print(f"OLD {old.package}\nNEW {new.package}", flush=True)
        comparison = (Comparison if args.plans == "strict" else Plans)(old, new, cases)
        for number, name in enumerate(chosen, 1):
            if name not in comparison.outcomes:  # of one that others start with, they have told it
                start = time.monotonic()
                found = comparison.run(name)
                result = f"{len(found)} differences" if found else "same"
                print(f"[{number}/{len(chosen)}] {name}: {result}, {time.monotonic() - start:.1f} s", flush=True)
                print("".join(f"DIFFERENT {line}\n" for line in found), end="", flush=True)
                lines += found
        for side in (old, new):
            side.server.stdin.close()
            side.server.wait()
    table = getattr(comparison, "table", ())
    print("".join(f"{line}\n" for line in (("Plans that changed:", *table) if table else ())), end="")
    print(f"{len(lines)} differences in {len(chosen)} cases, {time.monotonic() - began:.0f} s")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["--serve"] else main())
