"""What a name stands for, and what is said when it stands for nothing."""

import os
import shutil

import datasets
import pytest

from penstock.data import source
from penstock.data.source import Reading, open_source
from penstock.errors import DataError


def quiet(_):
    pass


def error(name, split="train"):
    with pytest.raises(DataError) as caught:
        open_source(str(name), split, quiet)
    return caught.value


def test_file(write):
    path = write([{"text": "a"}, {"text": "b"}])
    opened = open_source(str(path), "train", quiet)
    assert [r.fields["text"] for r in opened.read()] == ["a", "b"]
    assert [r.fields["text"] for r in opened.read()] == ["a", "b"], "a source can be read again"
    assert opened.files == (str(path),)


def test_directory_is_read_in_the_order_of_names(write, tmp_path):
    write([{"text": "b"}], "set/b.jsonl")
    write('[{"text": "a"}]', "set/a.json")
    write("text\nc\n", "set/c.CSV")
    write("not data", "set/README.md")
    write("hidden", "set/.hidden.json")
    opened = open_source(str(tmp_path / "set"), "train", quiet)
    assert [(r.fields["text"], r.line) for r in opened.read()] == [("a", 1), ("b", 1), ("c", 2)]
    assert [os.path.basename(f) for f in opened.files] == ["a.json", "b.jsonl", "c.CSV"]


def test_the_order_of_names_is_not_the_order_of_the_disk(write, tmp_path):
    for letter in "hbjdafcige":
        write([{"text": letter}], f"set/{letter}.jsonl")
    rows = open_source(str(tmp_path / "set"), "train", quiet).read()
    assert "".join(r.fields["text"] for r in rows) == "abcdefghij"


def test_demo_is_embedded():
    rows = list(open_source("demo", "train", quiet).read())
    assert len(rows) > 100
    assert rows[0].where.endswith("demo/examples.jsonl:1")


def test_fingerprint_follows_content_and_not_name_or_date(write, tmp_path):
    path = write([{"text": "a"}])
    first = open_source(str(path), "train", quiet).fingerprint
    copy = tmp_path / "copy.jsonl"
    shutil.copy(path, copy)
    os.utime(copy, (0, 0))
    assert open_source(str(copy), "train", quiet).fingerprint == first
    copy.write_text(copy.read_text().replace("a", "b"))
    os.utime(copy, (0, 0))
    assert open_source(str(copy), "train", quiet).fingerprint != first
    as_csv = tmp_path / "copy.csv"
    shutil.copy(path, as_csv)
    assert open_source(str(as_csv), "train", quiet).fingerprint != first, "the same bytes are read otherwise"


def test_fingerprint_follows_what_text_is_split_at(write):
    path = write("a\nb\n", "book.txt")
    first = open_source(str(path), "train", quiet).fingerprint
    assert open_source(str(path), "train", quiet, Reading("lines")).fingerprint != first
    assert open_source(str(path), "train", quiet, Reading("length")).fingerprint == first, "the same rows, cut later"


def test_fingerprint_of_a_directory_follows_every_file(write, tmp_path):
    write([{"text": "a"}], "set/a.jsonl")
    first = open_source(str(tmp_path / "set"), "train", quiet).fingerprint
    write([{"text": "b"}], "set/b.jsonl")
    assert open_source(str(tmp_path / "set"), "train", quiet).fingerprint != first


def test_missing_file_suggests_its_neighbours(write, tmp_path):
    write([{"text": "a"}], "training.jsonl")
    caught = error(tmp_path / "trainign.jsonl")
    assert caught.what == "no such file or directory"
    assert str(tmp_path / "training.jsonl") in caught.remedy


NOT_ON_THE_HUB = [
    "my.jsonl", "./alpaca", "a/b/c", "data/my.csv", "my.txt", "../x", "no such thing", "data/my.jsonl:0.5", "my.csv:1",
]  # fmt: skip


@pytest.mark.parametrize("name", NOT_ON_THE_HUB)
def test_a_name_that_is_no_hub_name_never_asks_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "open_hub", lambda *_: pytest.fail("asked the Hub"))
    assert error(name).what == "no such file or directory"


def test_unsupported_extension(write):
    caught = error(write("a", "my.docx"))
    assert ".docx are not read" in caught.what
    assert ".jsonl" in caught.remedy


def test_directory_without_data(tmp_path):
    assert error(tmp_path).what == "no data file in the directory"


@pytest.mark.parametrize("name", ["tatsu-lab/alpaca", "squad", "owner/name:config", "owner/name:2023", "name:3.0.0"])
def test_unreachable_hub_names_the_local_alternatives(name):
    caught = error(name)  # the tests run with HF_HUB_OFFLINE=1
    assert "the Hub cannot be reached" in caught.what
    assert "JSON, JSONL, CSV or Parquet" in caught.remedy


def test_a_near_file_is_suggested_also_for_what_looks_like_a_hub_name(write, tmp_path, monkeypatch):
    write([{"text": "a"}], "data/train.jsonl")
    monkeypatch.chdir(tmp_path)
    assert "data/train.jsonl" in error("data/train").remedy


def test_hub_rows_and_fingerprint(monkeypatch):
    rows = [{"prompt": str(i), "completion": "x"} for i in range(2500)]
    table = datasets.Dataset.from_list(rows)
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    opened = open_source("owner/name:config", "test", quiet)
    assert asked == [(("owner/name", "config"), {"split": "test"})]
    got = list(opened.read())
    assert [r.fields for r in got] == rows
    assert got[2499].where == "owner/name:config:2500"
    assert opened.fingerprint == table._fingerprint


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (datasets.exceptions.DatasetNotFoundError("no"), "neither a file here nor a data set on the Hub"),
        (ValueError("Unknown split \"x\". Should be one of ['train']."), "Should be one of ['train']"),
    ],
)
def test_hub_failures(monkeypatch, raised, says):
    def load_dataset(*args, **kwargs):
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert says in error("owner/name").what


def test_hub_set_without_rows(monkeypatch):
    empty = datasets.Dataset.from_dict({"text": []})
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: empty)
    with pytest.raises(DataError, match="no rows"):
        list(open_source("owner/name", "train", quiet).read())


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "my.jsonl")
    assert "is not a file on a disk" in error(tmp_path / "my.jsonl").what


def test_a_link_to_nothing_is_not_what_was_meant(tmp_path):
    (tmp_path / "mine.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "mine2.jsonl").write_text("{}")
    found = error(str(tmp_path / "mine.jsonl"))
    assert found.what == "no such file or directory"
    assert "mine2.jsonl" in found.remedy
    assert "mine.jsonl" not in found.remedy
