"""The cache: found again when nothing changed, built again when anything did or anything is damaged."""

import dataclasses
import errno
import os
import resource
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.data import store as store_module
from penstock.data.encoding import writing
from penstock.data.source import open_source
from penstock.data.store import notes, open_store
from penstock.errors import DataError, DoesNotFit
from penstock.machine.cache import cache_dir
from penstock.recipe.recipe import Recipe

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def builds(monkeypatch):
    """How often rows were tokenized."""
    calls = []

    def counted(*args):
        calls.append(args)
        return original(*args)

    original = store_module.write_examples
    monkeypatch.setattr(store_module, "write_examples", counted)
    return calls


def open_it(path, tokenizer, say=lambda _: None, vocab_size=10**6, **fields):
    return open_store(open_source(str(path), "train", say), tokenizer, Recipe(**fields), vocab_size, say)


def contents(store):
    return [
        (ids.tolist(), mask.tolist(), store.where(i)) for i in range(len(store)) for ids, mask in [store.example(i)]
    ]


def entry_of(store):
    return cache_dir("tokens") / store.key


def test_second_opening_finds_the_first(write, chatml, alpaca_rows, builds):
    path = write([*alpaca_rows(20), {"instruction": "q", "output": ""}])
    first = open_it(path, chatml)
    second = open_it(path, chatml)
    assert len(builds) == 1
    assert contents(second) == contents(first)
    assert (second.counts, second.key, second.data_format) == (first.counts, first.key, first.data_format)
    assert isinstance(second.ids, np.memmap)


def test_a_renamed_file_is_found_and_named_as_it_is_now(write, chatml, alpaca_rows, builds, tmp_path):
    path = write([*alpaca_rows(3), {"instruction": "q", "output": ""}])
    open_it(path, chatml)
    moved = path.rename(tmp_path / "moved.jsonl")
    store = open_it(moved, chatml)
    assert len(builds) == 1
    assert store.where(2) == f"{moved}:3"
    assert notes(store) == [f"1 dropped, empty response: {moved}:4"]


@pytest.mark.parametrize(
    "fields",
    [
        {"data_format": "text"},
        {"template": "alpaca"},
        {"end_token": "<|endoftext|>", "template": "none"},
        {"train_on_prompt": True},
        {"max_length": 100},
        {"too_long": "drop"},
    ],
)
def test_what_matters_builds_anew(write, chatml, builds, fields):
    path = write([{"instruction": "q", "output": "a", "text": "t"}])
    first, other = open_it(path, chatml), open_it(path, chatml, **fields)
    assert len(builds) == 2
    assert first.key != other.key


def test_what_does_not_matter_does_not(write, chatml, builds):
    path = write([{"instruction": "q", "output": "a"}])
    open_it(path, chatml)
    open_it(path, chatml, lr=1.0, seed=7, packing=False, shuffle=False, data_percent=50.0, batch_size=2)
    assert len(builds) == 1


def test_content_tokenizer_and_template_matter(write, make_tokenizer, builds):
    path = write([{"instruction": "q", "output": "a"}])
    open_it(path, make_tokenizer("chatml"))
    open_it(path, make_tokenizer("chatml"))
    assert len(builds) == 1, "the same tokenizer, built twice"
    changed = make_tokenizer("chatml")
    changed.chat_template += "\n"
    open_it(path, changed)
    other_special = make_tokenizer("chatml", eos_token="<|im_end|>", bos_token="<|im_start|>")
    open_it(path, other_special)
    assert len(builds) == 3
    open_it(write([{"instruction": "q", "output": "b"}]), make_tokenizer("chatml"))
    assert len(builds) == 4
    splitting = make_tokenizer("chatml")
    splitting.split_special_tokens = True
    with pytest.raises(DataError, match="its end token"):
        open_it(path, splitting)


def test_the_tokenizers_passing_state_does_not_matter(write, chatml, builds):
    path = write([{"instruction": "q", "output": "a"}])
    open_it(path, chatml)
    chatml(["a", "b c d"], padding=True, truncation=True, max_length=2)
    open_it(path, chatml)
    assert len(builds) == 1


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGE = {
    "flipped bit": flip,
    "cut short": lambda p: p.write_bytes(p.read_bytes()[:-4]),
    "emptied": lambda p: p.write_bytes(b""),
    "zeroed": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("name", ["ids", "mask", "offsets", "places", "entry.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_built_again(write, chatml, alpaca_rows, builds, name, damage):
    path = write(alpaca_rows(20))
    good = contents(open_it(path, chatml))
    store = open_it(path, chatml)
    entry = entry_of(store)
    del store
    DAMAGE[damage](entry / name)
    if name == "entry.json" and damage == "flipped bit":
        (entry / name).write_text((entry / name).read_text().replace("checksums", "checksumz"))
    assert contents(open_it(path, chatml)) == good
    assert len(builds) == 2
    assert contents(open_it(path, chatml)) == good
    assert len(builds) == 2, "the repaired entry is believed again"


def test_a_run_of_an_earlier_version_finds_the_same_data(write, chatml):
    """Its fingerprint is that of the tokens: how they are written down may change."""
    assert store_module._CONTENT == 4, "raise it only when other tokens come of the same data"
    assert store_module._CONTENT < store_module._VERSION


def test_another_version_is_not_believed(write, chatml, builds):
    path = write([{"text": "a"}])
    entry = entry_of(open_it(path, chatml)) / "entry.json"
    entry.write_text(entry.read_text().replace(f'"version": {store_module._VERSION}', '"version": 0'))
    open_it(path, chatml)
    assert len(builds) == 2


def test_a_build_that_fails_leaves_nothing(write, chatml):
    path = write('{"text": "a"}\n{"text": }\n')
    with pytest.raises(DataError, match="malformed"):
        open_it(path, chatml)
    assert list(cache_dir("tokens").iterdir()) == []


def test_a_killed_build_is_not_believed_and_is_cleared_away_later(write, chatml, alpaca_rows):
    path = write(alpaca_rows(20))
    killed = cache_dir("tokens") / ".building-old"
    killed.mkdir(parents=True)
    (killed / "ids").write_bytes(b"half")
    recent = cache_dir("tokens") / ".building-recent"
    recent.mkdir()
    long_ago = time.time() - 10 * 24 * 3600
    os.utime(killed, (long_ago, long_ago))
    open_it(path, chatml)
    assert not killed.exists()
    assert recent.exists(), "another process may be at work in it"


def test_two_builders_at_once(write, chatml, alpaca_rows, monkeypatch):
    """The second to finish finds the entry there and takes it."""
    path = write(alpaca_rows(5))
    original = store_module.write_examples

    def overtaken(*args):
        monkeypatch.setattr(store_module, "write_examples", original)
        other.append(open_it(path, chatml))
        return original(*args)

    other = []
    monkeypatch.setattr(store_module, "write_examples", overtaken)
    store = open_it(path, chatml)
    assert contents(store) == contents(other[0])
    assert [p.name for p in cache_dir("tokens").iterdir()] == [store.key]


# --- a cache that cannot be written -----------------------------------------------------------------------------------


def test_an_unwritable_cache_does_not_stop_a_run(write, chatml, alpaca_rows, monkeypatch, tmp_path):
    path = write(alpaca_rows(5))
    expected = contents(open_it(path, chatml))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = []
    store = open_it(path, chatml, said.append)
    assert contents(store) == expected
    assert any("cannot be written" in line and "temporary directory" in line for line in said)
    (directory,) = tmp_path.glob("penstock-*")
    del store
    assert not directory.exists(), "the temporary directory goes with the store"


def test_a_limit_on_file_size_is_said_to_be_one(write, chatml, alpaca_rows):
    path = write(alpaca_rows(200))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = []
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # no file may pass 4 KiB, in the cache or elsewhere
        with pytest.raises(DoesNotFit, match="cannot be written") as caught:
            open_it(path, chatml, said.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert "`ulimit -f`" in caught.value.remedy
    assert "PENSTOCK_CACHE" not in caught.value.remedy
    assert any("cannot be written" in line for line in said)
    assert list(cache_dir("tokens").iterdir()) == []


def test_a_full_disk_is_said_to_be_one(write, chatml, alpaca_rows, monkeypatch):
    def full(*_):
        with writing():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("penstock.data.encoding._Column.append", full)
    with pytest.raises(DoesNotFit, match=r"cannot be written \(No space left on device\)") as caught:
        open_it(write(alpaca_rows(2)), chatml)
    assert "PENSTOCK_CACHE" in caught.value.remedy


def test_the_cache_lies_where_it_is_told_to(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "there"))
    assert cache_dir("tokens") == tmp_path / "there" / "tokens"
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir("tokens") == tmp_path / ".cache" / "penstock" / "tokens"


# --- data from which nothing would be learned -------------------------------------------------------------------------


def test_every_example_truncated_to_nothing(write, plain):
    path = write([{"instruction": "A long question, " * 20, "output": "a"}] * 7)
    with pytest.raises(DataError, match="no example is left of 7 rows with max_length 32") as caught:
        open_it(path, plain, max_length=32)
    assert f"7 response begins beyond max_length ({path}:1, {path}:2" in caught.value.what
    assert "--max-length" in caught.value.remedy


def test_every_row_without_a_response(write, plain):
    path = write([{"instruction": "q", "output": ""}] * 2)
    with pytest.raises(DataError, match="2 empty response") as caught:
        open_it(path, plain)
    assert "--max-length" not in caught.value.remedy


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"text": "a"}, "Give the weight 1, or none"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}], "weight": 1}, "Give the weight 1, or none"),
        ({"text": " ", "weight": 1}, "A row needs text."),
        ({"instruction": "q", "output": "", "weight": 1}, "Every row needs a response."),
    ],
)
def test_when_every_row_is_dropped_the_remedy_is_for_why(write, plain, row, remedy):
    path = write([{"weight": 0, **row}] * 2)
    with pytest.raises(DataError, match="no example is left of 2 rows") as caught:
        open_it(path, plain)
    assert caught.value.remedy.startswith(remedy)


def test_an_end_token_that_would_never_be_trained(write, plain):
    path = write([{"instruction": "q", "output": "answer " * 50}] * 3)
    with pytest.raises(DataError, match="no example of 3 has its end token within max_length 64") as caught:
        open_it(path, plain, max_length=64)
    assert "--max-length" in caught.value.remedy
    assert caught.value.remedy.endswith("make several examples of a long one: --too-long split")
    split = open_it(path, plain, max_length=64, too_long="split")  # what is advised works
    assert split.counts.kept > 3


def test_token_ids_beyond_the_embedding(write, chatml):
    path = write([{"text": "a"}, {"text": "is Paris"}, {"text": "a"}])
    store = open_it(path, chatml, vocab_size=len(chatml))
    top = store.counts.max_token_id
    token = chatml.convert_ids_to_tokens(top)
    assert top in store.example(1)[0].tolist()
    assert top not in store.example(0)[0].tolist()
    open_it(path, chatml, vocab_size=top + 1)
    for _ in range(2):  # built or found in the cache
        with pytest.raises(DataError, match=f"has id {top}, but the model's embedding has {top} rows") as caught:
            open_it(path, chatml, vocab_size=top)
        assert repr(token) in caught.value.what
        assert caught.value.where == f"{path}:2"


def test_a_question_that_nobody_answers_is_listed(write, chatml):
    said = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    path = write([{"messages": said[:2]}, {"messages": said}])
    assert notes(open_it(path, chatml)) == ["not used: turns after the last response (in 1 row)"]


def test_an_empty_question_is_listed(write, chatml):
    path = write(
        [{"instruction": q, "input": i, "output": "x"} for q, i in (("q", ""), (None, ""), (" ", ""), ("", "i"))]
    )
    assert notes(open_it(path, chatml)) == [f"2 with an empty question: {path}:2, {path}:3"]


def test_what_splitting_leaves_out_is_not_said_to_be_kept_by_splitting(write, chatml):
    path = write([{"instruction": "q" * 300, "output": "x"}])
    found = notes(open_it(path, chatml, max_length=60, too_long="split"))
    assert [line for line in found if "--too-long" in line] == []
    assert any("in pieces without a token to train on" in line for line in found)


def test_what_is_split_is_looked_at_as_all_else(write, chatml):
    path = write([{"instruction": "", "output": "x" * 300}, {"instruction": "q", "output": "y" * 300 + "<|im_end|>"}])
    found = notes(open_it(path, chatml, max_length=60, too_long="split"))
    assert f"1 with an empty question: {path}:1" in found
    assert [line for line in found if f"{path}:2" in line and "special token" in line]


def test_counts_survive_the_cache(write, plain):
    path = write([{"text": "a"}, {"text": ""}, {"text": "x" * 99}])
    built, found = open_it(path, plain, max_length=50), open_it(path, plain, max_length=50)
    assert dataclasses.asdict(built.counts) == dataclasses.asdict(found.counts)
    assert notes(found) == [
        f"1 truncated: {path}:3",
        f"1 without a trained end token: {path}:3",
        f"1 dropped, empty text: {path}:2",
        "50 tokens of examples over max_length not used; --too-long split keeps what is trained on",
    ]
