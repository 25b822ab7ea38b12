"""Several processes give the same bytes as one, the same first fault, and leave nothing behind."""

import os
import pickle
import signal
import subprocess
import sys
import time

import psutil
import pytest

from penstock.data import encoding, files, workers
from penstock.data.encoding import write_examples
from penstock.data.facts import facts_of
from penstock.data.source import open_source
from penstock.data.workers import Job, Task, encode_in
from penstock.errors import DataError, DoesNotFit
from penstock.recipe.recipe import Recipe

COLUMNS = ("ids", "mask", "offsets", "trained", "places")


def quiet(_):
    pass


@pytest.fixture
def in_small_pieces(monkeypatch):
    monkeypatch.setattr(files, "_PIECE_BYTES", 2000)
    monkeypatch.setattr(files, "_PIECE_ROWS", 20)


def build(path, tokenizer, directory, processes, **fields):
    directory.mkdir()
    source = open_source(str(path), "train", quiet)
    return write_examples(directory, source, tokenizer, Recipe(**fields), quiet, processes)


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_the_same_bytes_and_counts_from_one_process_and_from_two(write, chatml, alpaca_rows, tmp_path, kind):
    rows = [{**row, "source": i} for i, row in enumerate(alpaca_rows(300))]
    rows[70]["output"] = rows[250]["output"] = ""
    rows[90]["output"] = "word " * 200
    path = write(rows)
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "my.parquet")
        path = tmp_path / "my.parquet"
    one = build(path, chatml, tmp_path / "one", 1, max_length=400)
    two = build(path, chatml, tmp_path / "two", 2, max_length=400)
    assert one == two
    assert (one.counts.rows, one.counts.kept, one.counts.truncated.count) == (300, 298, 1)
    assert one.counts.unused["source"].count == 300
    for name in COLUMNS:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("in_small_pieces")
def test_the_first_fault_is_reported_with_its_line(write, chatml, alpaca_rows, tmp_path):
    before = psutil.Process().children()  # of other tests
    rows = alpaca_rows(200)
    rows[110] = {"instruction": "q"}
    rows[111] = {"instruction": 3, "output": "a"}
    path = write(rows)
    for processes in (1, 2):
        with pytest.raises(DataError, match="no column 'output'") as caught:
            build(path, chatml, tmp_path / str(processes), processes)
        assert caught.value.where == f"{path}:111"
        assert "columns of the first" in caught.value.remedy
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.slow
def test_a_fault_of_the_reader_waits_for_those_before_it(write, chatml, tmp_path):
    path = write("prompt,completion,label\nq,a,\nq,a,true\nq,a\n", "my.csv")
    for processes in (1, 2):
        with pytest.raises(DataError, match="preference training") as caught:
            build(path, chatml, tmp_path / str(processes), processes)
        assert caught.value.where == f"{path}:3"


@pytest.mark.slow
def test_processes_are_started_for_large_sources_only(write, chatml, alpaca_rows, tmp_path, monkeypatch):
    started = []
    original = workers._processes
    monkeypatch.setattr(workers, "_processes", lambda job, count: started.append(count) or original(job, count))
    path = write(alpaca_rows(20))
    build(path, chatml, tmp_path / "small", None)
    assert started == []
    monkeypatch.setattr(encoding, "_WORTH_BYTES", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    build(path, chatml, tmp_path / "large", None)
    assert started == [2]


@pytest.mark.slow
@pytest.mark.usefixtures("in_small_pieces")
def test_a_process_that_is_killed_is_missed(write, chatml, alpaca_rows):
    before = psutil.Process().children()  # of other tests
    source = open_source(str(write(alpaca_rows(200))), "train", quiet)
    job = Job(facts_of(chatml), Recipe(), source.files)
    results = encode_in(job, (Task(piece, "alpaca") for piece in source.pieces()), 1)
    next(results)
    for child in set(psutil.Process().children()) - set(before):
        child.kill()
    with pytest.raises(DoesNotFit, match="has ended") as caught:
        list(results)
    assert "memory" in caught.value.remedy
    assert set(psutil.Process().children()) <= set(before)


ENDLESS = """
import itertools, pickle, sys
from penstock.data.rows import Parsed, Row
from penstock.data.workers import Job, Task, encode_in
from penstock.recipe.recipe import Recipe
facts = pickle.load(open(sys.argv[1], "rb"))
row = Row({"instruction": "q", "output": "a"}, "mine", 1)
tasks = (Task(Parsed((row,) * 50), "alpaca") for _ in itertools.count())
for _ in encode_in(Job(facts, Recipe(), ("mine",)), tasks, 2):
    print("one", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_no_process_is_left_behind(chatml, tmp_path, number):
    (tmp_path / "facts").write_bytes(pickle.dumps(facts_of(chatml)))
    command = [sys.executable, "-c", ENDLESS, str(tmp_path / "facts")]
    main = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert main.stdout.readline() == b"one\n"
    children = psutil.Process(main.pid).children()
    assert len(children) == 2
    if number == signal.SIGINT:  # as from a terminal: all of them get it
        os.killpg(main.pid, number)
    else:
        main.kill()
    main.stdout.close()
    main.wait(timeout=20)
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, gone


def test_facts_are_small_to_carry_and_whole(chatml):
    facts = facts_of(chatml)
    again = pickle.loads(pickle.dumps(facts))
    assert again == facts
    text = "<|im_start|>user\nThe capital of France?<|im_end|>\n"
    assert (
        again.tokenizer.encode(text, add_special_tokens=False).ids
        == chatml(text, add_special_tokens=False)["input_ids"]
    )


@pytest.mark.slow
def test_what_a_process_imports_is_small():
    code = "import sys, penstock.data.workers, transformers.utils.chat_template_utils; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_progress_says_the_time_that_is_left(write, chatml, alpaca_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE_BYTES", 500)
    path = write(alpaca_rows(100))
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    said = []
    (tmp_path / "out").mkdir()
    write_examples(tmp_path / "out", open_source(str(path), "train", quiet), chatml, Recipe(), said.append, 1)
    assert said[0].endswith(" left)")
    seconds = [int(line.rpartition(":")[2].split()[0]) for line in said]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] <= 3
