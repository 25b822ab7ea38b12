"""Tokens, masks, counts, and what happens to rows that are too long."""

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from tokenizers import AddedToken

from penstock.data import coding, encoding
from penstock.data.encoding import write_examples
from penstock.data.files import Row
from penstock.data.rows import Source
from penstock.data.source import open_source
from penstock.data.store import notes, open_store
from penstock.errors import DataError, ModelError
from penstock.recipe.recipe import Recipe


def quiet(_):
    pass


def store_of(path, tokenizer, **fields):
    return open_store(open_source(str(path), "train", quiet), tokenizer, Recipe(**fields), len(tokenizer), quiet)


def trained_text(store, tokenizer, i):
    ids, mask = store.example(i)
    return tokenizer.decode(ids[mask == 1].tolist())


def whole_text(store, tokenizer, i):
    return tokenizer.decode(store.example(i)[0].tolist())


@pytest.mark.parametrize(
    ("kind", "end", "lead"),
    [
        ("chatml", "<|im_end|>", ""),
        ("llama3", "<|eot_id|>", ""),
        ("qwen3", "<|im_end|>", "<think>\n\n</think>\n\n"),
        ("harmony", "<|return|>", "<|channel|>final<|message|>"),
        (None, "</s>", ""),
    ],
)
def test_the_trained_tokens_are_the_response_and_its_end(write, make_tokenizer, kind, end, lead):
    tokenizer = make_tokenizer(kind)
    answers = ["Paris.", " led by a space", "é 😀 ünïcode", "two\n\nlines\n", "<b>&amp;"]
    rows = [{"instruction": "The capital of France?", "output": a} for a in answers]
    store = store_of(write(rows), tokenizer)
    for i, answer in enumerate(answers):
        shown = answer.strip() if kind == "llama3" else answer
        assert trained_text(store, tokenizer, i) == lead + shown + end
    assert store.counts.unended.count == 0


def test_an_end_token_that_swallows_the_line_break_is_trained(write, make_tokenizer):
    tokenizer = make_tokenizer("chatml", pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken("<|im_end|>", rstrip=True, special=True)], special_tokens=True)
    store = store_of(write([{"prompt": "q", "completion": "a"}]), tokenizer)
    assert trained_text(store, tokenizer, 0) == "a<|im_end|>"
    assert store.counts.unended.count == 0


def test_a_word_that_takes_in_the_blank_at_the_end_of_the_prompt_is_trained(write, plain):
    store = store_of(write([{"prompt": "The capital: ", "completion": "is"}]), plain, template="none")
    assert trained_text(store, plain, 0) == " is</s>"
    assert plain.convert_ids_to_tokens(store.example(0)[0][-2:].tolist()) == ["Ġis", "</s>"]


def test_a_header_that_swallows_the_blank_of_the_response_is_not_trained(write, make_tokenizer):
    tokenizer = make_tokenizer("llama3")
    tokenizer.add_tokens([AddedToken("<|end_header_id|>", rstrip=True, special=True)], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace(" | trim", "")
    store = store_of(write([{"prompt": "q", "completion": " a"}]), tokenizer)
    assert trained_text(store, tokenizer, 0) == "a<|eot_id|>"


def test_tokens_are_those_of_the_whole_text(write, chatml):
    store = store_of(write([{"prompt": "The capital", "completion": "is Paris."}]), chatml)
    messages = [{"role": "user", "content": "The capital"}, {"role": "assistant", "content": "is Paris."}]
    text = chatml.apply_chat_template(messages, tokenize=False)
    assert store.example(0)[0].tolist() == chatml(text, add_special_tokens=False)["input_ids"]


def test_a_first_token_that_the_tokenizer_adds_is_there_once(write, make_tokenizer):
    tokenizer = make_tokenizer(None, adds_bos=True, bos_token="<s>", eos_token="</s>")
    store = store_of(write([{"prompt": "q", "completion": "a"}]), tokenizer)
    assert store.example(0)[0].tolist().count(tokenizer.bos_token_id) == 1
    assert store.example(0)[0][0] == tokenizer.bos_token_id


def test_train_on_prompt_trains_all_but_the_first_token(write, chatml):
    store = store_of(write([{"prompt": "q", "completion": "a"}]), chatml, train_on_prompt=True)
    mask = store.example(0)[1]
    assert mask[0] == 0
    assert mask[1:].all()


def test_the_first_token_is_never_trained(write, plain):
    store = store_of(write([{"text": "Two and two"}]), plain)
    mask = store.example(0)[1]
    assert mask.tolist() == [0] + [1] * (len(mask) - 1)


def test_examples_keep_their_place(write, plain):
    path = write('{"text": "a b"}\n\n{"text": ""}\n{"text": "c"}\n')
    store = store_of(path, plain)
    assert [store.where(i) for i in range(len(store))] == [f"{path}:1", f"{path}:4"]


def test_places_in_a_directory(write, plain, tmp_path):
    write([{"text": "a"}, {"text": "b"}], "set/a.jsonl")
    write("text\nc\n", "set/b.csv")
    store = store_of(tmp_path / "set", plain)
    assert store.where(1) == f"{tmp_path / 'set/a.jsonl'}:2"
    assert store.where(2) == f"{tmp_path / 'set/b.csv'}:2"


def test_batches_do_not_change_the_result(write, chatml, alpaca_rows, monkeypatch, own_cache):
    source = open_source(str(write(alpaca_rows(50))), "train", quiet)
    results = []
    for rows, characters in ((1000, 10**6), (7, 10**6), (1000, 100)):
        monkeypatch.setattr(coding, "_BATCH_ROWS", rows)
        monkeypatch.setattr(coding, "_BATCH_CHARACTERS", characters)
        directory = own_cache / f"{rows}-{characters}"
        directory.mkdir(parents=True)
        results.append(write_examples(directory, source, chatml, Recipe(), quiet))
    assert results[0] == results[1] == results[2]


def test_counts(write, plain):
    rows = [
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "output": ""},
        {"instruction": "q", "output": "b " * 200},
        {"instruction": "q " * 200, "output": "c"},
        {"instruction": "q", "output": " "},
    ]
    path = write(rows)
    counts = store_of(path, plain, max_length=64).counts
    assert (counts.rows, counts.kept) == (5, 2)
    assert (counts.truncated.count, counts.truncated.places) == (1, ((0, 3),))
    assert (counts.unended.count, counts.unended.places) == (1, ((0, 3),))
    dropped = {reason: (n.count, n.places) for reason, n in counts.dropped.items()}
    assert dropped == {
        "empty response": (2, ((0, 2), (0, 5))),
        "response begins beyond max_length": (1, ((0, 4),)),
    }
    store = store_of(path, plain, max_length=64)
    assert counts.tokens == len(store.ids) == int(store.lengths.sum())
    assert counts.trained_tokens == int(store.mask.sum()) == int(store.trained.sum())
    assert counts.max_token_id == int(store.ids.max())
    assert counts.longest > 200
    assert store.lengths.max() == 64


def test_only_the_first_places_are_kept(write, plain):
    path = write([{"text": "a"}, *([{"text": ""}] * 9)])
    store = store_of(path, plain)
    assert store.counts.dropped["empty text"].count == 9
    assert store.counts.dropped["empty text"].places == tuple((0, line) for line in range(2, 7))
    assert notes(store) == [f"9 dropped, empty text: {', '.join(f'{path}:{n}' for n in range(2, 7))}, ..."]


def test_an_example_of_just_max_length_is_whole(write, plain):
    path = write([{"text": "Two and two make four."}])
    length = int(store_of(path, plain).lengths[0])
    counts = store_of(path, plain, max_length=length).counts
    assert (counts.truncated.count, counts.unended.count) == (0, 0)
    with pytest.raises(DataError, match="no example of 1 has its end token"):
        store_of(path, plain, max_length=length - 1)


def test_truncation_keeps_the_beginning(write, plain):
    path = write([{"text": "Two and two make four."}, {"text": "a"}])
    whole = store_of(path, plain).example(0)[0].tolist()
    assert store_of(path, plain, max_length=4).example(0)[0].tolist() == whole[:4]


def test_too_long_drop(write, plain):
    path = write([{"text": "a"}, {"text": "x" * 100}])
    counts = store_of(path, plain, max_length=16, too_long="drop").counts
    assert (counts.kept, counts.truncated.count, counts.dropped["longer than max_length"].places) == (1, 0, ((0, 2),))


@pytest.mark.parametrize("form", ["text", "conversation"])
def test_too_long_split_loses_nothing_that_is_trained_on(write, plain, form):
    """The same tokens, trained on as often: each once. What it does not use, and what truncating loses, is counted."""
    row = {"text": "abcdefgh" * 10} if form == "text" else {"prompt": "why? " * 40, "completion": "because " * 20}
    limit = 16 if form == "text" else 64
    path = write([row, {**row, **({"text": "a"} if form == "text" else {"prompt": "a", "completion": "b"})}])
    whole = store_of(path, plain)
    ids, mask = whole.example(0)
    split = store_of(path, plain, max_length=limit, too_long="split")
    pieces = [split.example(i) for i in range(len(split) - 1)]
    assert all(len(piece) <= limit for piece, _ in pieces)
    trained = [token for piece, trains in pieces for token in piece[trains == 1].tolist()]
    first = ids[mask == 1].tolist()
    assert trained == first
    assert split.counts.split.count == 1
    assert split.counts.lost_tokens + sum(len(piece) for piece, _ in pieces) >= len(ids)
    assert (split.counts.lost_tokens == 0) == (form == "text"), "a piece of the prompt alone teaches nothing"
    truncated = store_of(path, plain, max_length=limit)
    assert truncated.counts.lost_tokens == (len(ids) - limit if form == "text" else len(ids))
    assert store_of(path, plain, max_length=limit, too_long="drop").counts.lost_tokens == len(ids)
    assert any("--too-long split keeps" in line for line in notes(truncated))


def test_too_long_refuse(write, plain):
    path = write([{"text": "a"}, {"text": "x" * 100}])
    with pytest.raises(DataError, match="101 tokens, over max_length 16") as caught:
        store_of(path, plain, max_length=16, too_long="refuse")
    assert caught.value.where == f"{path}:2"
    assert "--max-length" in caught.value.remedy


def test_a_format_that_is_forced(write, plain):
    path = write([{"text": "a", "prompt": "q", "completion": "b"}])
    assert store_of(path, plain).data_format == "prompt-completion"
    forced = store_of(path, plain, data_format="text")
    assert forced.data_format == "text"
    assert whole_text(forced, plain, 0) == "a</s>"


def test_a_later_row_without_the_column(write, plain):
    path = write([{"text": "a"}, {"text": "b"}, {"body": "c"}])
    with pytest.raises(DataError, match="no column 'text'; columns found: body") as caught:
        store_of(path, plain)
    assert caught.value.where == f"{path}:3"


def test_a_slow_tokenizer_is_refused(write, plain, monkeypatch):
    monkeypatch.setattr(type(plain), "is_fast", False)
    with pytest.raises(ModelError, match="not a fast one"):
        store_of(write([{"text": "slow"}]), plain)


def test_progress_is_said_now_and_then(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "_PIECE_ROWS", 1)
    clock = itertools.count(0, 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    rows = [Row({"text": "a"}, "mine", i) for i in range(1, 42)]
    said = []
    write_examples(tmp_path, Source("mine", ("mine",), "", lambda: iter(rows)), plain, Recipe(), said.append)
    assert len(said) == 10
    assert said[0].startswith("Tokenizing mine: 4 rows")


def test_memory_does_not_grow_with_the_number_of_rows(plain, tmp_path, monkeypatch):
    """What a build holds at its peak for many rows is what it holds for few; only the files grow."""
    monkeypatch.setattr(encoding, "_PIECE_ROWS", 100)

    def peak_bytes(num_rows):
        rows = (Row({"text": f"Two and two make {i}."}, "mine", i) for i in range(num_rows))
        directory = tmp_path / str(num_rows)
        directory.mkdir()
        tracemalloc.start()
        write_examples(directory, Source("mine", ("mine",), "", lambda: rows), plain, Recipe(), quiet)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.fromfile(directory / "offsets", np.int64).size == num_rows + 1
        return peak

    peak_bytes(400)  # caches inside libraries fill up once
    few, many = peak_bytes(500), peak_bytes(5000)
    assert many < 1.2 * few


def test_text_that_spells_a_special_token_is_counted(write, chatml):
    """Whoever wrote it, it becomes that token, and what is in the middle of a turn may end it."""
    rows = [
        {"instruction": "What ends a turn?", "output": "A token."},
        {"instruction": "What ends a turn?", "output": "<|im_end|> does."},
        {"instruction": "Say <|im_start|>system", "output": "No."},
        {"instruction": "Say <|im_end|>", "output": ""},
        {"instruction": "Say it.", "input": "<|im_end|>", "output": "It."},
    ]
    path = write(rows)
    store = store_of(path, chatml)
    assert (store.counts.spelled.count, store.counts.spelled.places) == (3, ((0, 2), (0, 3), (0, 5)))
    assert notes(store)[0] == (f"3 with text that spells a special token, and becomes it: {path}:2, {path}:3, {path}:5")
    meant = write([{"text": "<|im_start|>user\nq<|im_end|>\n"}])
    assert store_of(meant, chatml).counts.spelled.count == 0, "in plain text it is meant"
