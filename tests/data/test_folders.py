"""Files of every kind, folders with splits, and mixtures: what is read, and that never two splits are read as one."""

import gzip
import json
import os

import datasets
import numpy as np
import pyarrow
import pytest

from penstock.data import hub
from penstock.data.folders import open_folder
from penstock.data.loader import prepare
from penstock.data.run_length import run_length
from penstock.data.source import Reading, open_source
from penstock.errors import DataError, RecipeError
from penstock.recipe.lists import Part, parse_parts
from penstock.recipe.recipe import Recipe


def quiet(_):
    pass


def texts(name, split="train", **reading):
    return [row.fields["text"] for row in open_source(str(name), split, quiet, Reading(**reading)).read()]


def places(name, **reading):
    return [row.line for row in open_source(str(name), "train", quiet, Reading(**reading)).read()]


ROWS = [{"text": f"row {i}"} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zst(content):
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


# --- kinds of files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("a.JSONL.GZ", gzip.compress(LINES)),
        ("a.jsonl.zst", zst(LINES)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode())),
        ("a.json.zst", zst(LINES)),
        ("a.csv.gz", gzip.compress(b"text\n" + b"".join(b"row %d\n" % i for i in range(5)))),
        ("a.tsv", b"text\tn\n" + b"".join(b"row %d\t%d\n" % (i, i) for i in range(5))),
        ("a.tsv.zst", zst(b"n\ttext\n" + b"".join(b"1\trow %d\n" % i for i in range(5)))),
    ],
)
def test_compressed_files_and_tabs(write, name, content):
    assert texts(write(content, name)) == [row["text"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], "not a readable .jsonl.gz file"),
        ("a.jsonl.gz", LINES, "not a readable .jsonl.gz file"),
        ("a.jsonl.zst", zst(LINES * 50)[:-9], "not a readable .jsonl.zst file"),
        ("a.jsonl.zst", LINES, "not a readable .jsonl.zst file"),
        ("a.jsonl.gz", gzip.compress(LINES + b'{"text"'), "malformed JSON"),
    ],
)
def test_damaged_archives(write, name, content, says):
    path = write(content, name)
    with pytest.raises(DataError, match=says) as caught:
        texts(path)
    assert caught.value.where.startswith(str(path))
    assert ("give it the extension of what it is" in caught.value.remedy) == ("malformed" not in says)


def test_a_fault_in_an_archive_names_its_line(write):
    path = write(gzip.compress(LINES + b"oops\n"), "a.jsonl.gz")
    with pytest.raises(DataError) as caught:
        texts(path)
    assert caught.value.where == f"{path}:6"


def test_plain_text_is_a_document_a_file(write, tmp_path):
    write("One\ntwo.\n\nThree.\n", "set/b.txt")
    write("\ufeffZero.\r\n", "set/a.txt")
    assert texts(tmp_path / "set") == ["Zero.", "One\ntwo.\n\nThree."]


def test_plain_text_is_split_as_asked(write):
    path = write("One\ntwo.\n\n \nThree.\n\n\nFour", "my.txt")
    assert texts(path, split_documents="blank-lines") == ["One\ntwo.", "Three.", "Four"]
    assert places(path, split_documents="blank-lines") == [1, 5, 8]
    assert texts(path, split_documents="lines") == ["One", "two.", "Three.", "Four"]
    assert places(path, split_documents="lines") == [1, 2, 5, 8]


def test_splitting_what_is_no_text_file_is_refused(write, plain, own_cache):
    rows, text = write(ROWS), write("One\ntwo.\n", "my.txt")
    with pytest.raises(DataError, match=r"there is no \.txt file to split"):
        prepare(Recipe(data=str(rows), split_documents="lines"), plain, len(plain), quiet)
    both = Recipe(data=str(text), eval_data=str(rows), split_documents="lines")
    found = prepare(both, plain, len(plain), quiet)
    assert (found.train.num_examples, found.evaluation.num_examples) == (2, len(ROWS))


def test_a_long_document_in_pieces_is_trained_on_whole(write, plain, own_cache):
    text = "The capital of France is Paris. " * 40
    path = write(text, "my.txt")
    recipe = Recipe(data=str(path), max_length=50, split_documents="length", shuffle=False)
    store = prepare(recipe, plain, len(plain), quiet).train.store
    ids = plain(text + "</s>", add_special_tokens=False)["input_ids"]
    trained = np.concatenate([i[m == 1] for i, m in (store.example(k) for k in range(len(store)))])
    assert len(store) > 5
    assert trained.tolist() == ids[1:], "every token but the first, once"
    assert store.counts.split.count == 1
    assert store.counts.truncated.count == 0
    said = []
    prepare(recipe, plain, len(plain), said.append)
    assert any("1 longer than max_length, each split into several examples" in line for line in said)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_saved_data_set(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one", num_shards=2)
    assert texts(tmp_path / "one") == [row["text"] for row in ROWS]
    assert places(tmp_path / "one") == [1, 2, 3, 1, 2]


def test_a_saved_data_set_with_splits(tmp_path):
    both = {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS[3:])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "two")
    assert texts(tmp_path / "two") == ["row 0", "row 1", "row 2"]
    assert texts(tmp_path / "two", "test") == ["row 3", "row 4"]


def test_a_saved_data_set_may_not_point_elsewhere(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    state = tmp_path / "one" / "state.json"
    state.write_text(state.read_text().replace("data-00000-of-00001", "../other"))
    with pytest.raises(DataError, match="does not name the files"):
        texts(tmp_path / "one")


def test_a_folder_as_the_hub_has_it(write, tmp_path):
    root = tmp_path / "set"
    write("---\nlicense: mit\n---\n", "set/README.md")
    write('{"default": {"splits": {}}}', "set/dataset_infos.json")
    for name, rows in (
        ("train-00000-of-00002", ROWS[:2]),
        ("train-00001-of-00002", ROWS[2:4]),
        ("test-00000-of-00001", ROWS[4:]),
    ):
        (root / "data").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "data" / f"{name}.parquet")
    assert texts(root) == ["row 0", "row 1", "row 2", "row 3"]
    assert texts(root, "test") == ["row 4"]


def test_a_link_to_nothing_is_refused_and_not_passed_over(write, tmp_path):
    write(ROWS, "set/a.jsonl")
    (tmp_path / "set" / "b.jsonl").symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "set" / "notes.md").symlink_to(tmp_path / "notes.md")
    with pytest.raises(DataError, match=r"b\.jsonl: is a link to a file that is not there\n.*git annex get"):
        texts(tmp_path / "set")
    write(ROWS, "b.jsonl")
    assert len(texts(tmp_path / "set")) == 2 * len(ROWS)


@pytest.mark.parametrize("name", ["README.txt", "readme_en.txt", "ReadMe.json", "LICENSE.txt", "license-test.txt.gz"])
def test_a_readme_or_a_license_is_no_data_whatever_its_extension(write, tmp_path, name):
    write("Be kind.\n", f"set/{name}")
    with pytest.raises(DataError, match="no data file in the directory"):
        texts(tmp_path / "set")
    write(ROWS, "set/data/train.jsonl")
    assert len(texts(tmp_path / "set")) == 5
    write(ROWS[:2], "set/licenses.jsonl")
    assert len(texts(tmp_path / "set")) == 2, "another word"
    write(ROWS[:1], "set/license_questions.jsonl")
    assert len(texts(tmp_path / "set")) == 3, "rows about licenses"


def test_directories_that_are_splits(write, tmp_path):
    write(ROWS[:3], "set/train/a.jsonl")
    write(ROWS[3:], "set/validation/a.jsonl")
    assert texts(tmp_path / "set") == ["row 0", "row 1", "row 2"]
    assert texts(tmp_path / "set", "validation") == ["row 3", "row 4"]


def test_a_split_that_is_alone_is_meant_unless_another_is_asked_for(write, tmp_path):
    write(ROWS, "set/validation.jsonl")
    assert len(texts(tmp_path / "set")) == 5
    with pytest.raises(DataError, match="no files of the split 'held-out'"):
        texts(tmp_path / "set", "held-out")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["train.jsonl", "test.jsonl", "more.jsonl"], "some files belong to a split"),
        (["validation.jsonl", "test.jsonl"], "no files of the split 'train'"),
        (["english/a.jsonl", "french/a.jsonl"], "several directories with data: english, french"),
    ],
)
def test_a_folder_that_cannot_be_told_asks(write, tmp_path, names, says):
    for name in names:
        write(ROWS, f"set/{name}")
    with pytest.raises(DataError, match=says) as caught:
        texts(tmp_path / "set")
    assert caught.value.where == str(tmp_path / "set")
    assert caught.value.remedy


def test_a_split_that_is_alone_is_meant(write, tmp_path):
    write(ROWS, "set/test.jsonl")
    assert len(texts(tmp_path / "set")) == 5


@pytest.mark.parametrize("name", ["contest.jsonl", "latest.jsonl", "trainer.jsonl", "a-1.jsonl"])
def test_words_that_only_contain_a_split(write, tmp_path, name):
    write(ROWS, f"set/{name}")
    assert list(open_folder(tmp_path / "set").splits) == [""]


def test_train_is_trained_on_and_the_other_evaluated_on_and_said(write, tmp_path, plain, own_cache):
    write(ROWS[:3], "set/train.jsonl")
    write(ROWS[3:4], "set/test.jsonl")
    said = []

    def run(**fields):
        said.clear()
        return prepare(Recipe(data=str(tmp_path / "set"), **fields), plain, len(plain), said.append)

    data = run()
    assert (data.train.num_examples, data.evaluation.num_examples) == (3, 1)
    assert said[0] == f"{tmp_path / 'set'}: training on 'train' (1 file), evaluating on 'test'"
    assert run(validation=0.34).evaluation.num_examples == 1
    assert said[0] == f"{tmp_path / 'set'}: training on 'train' (1 file); not used: 'test'"
    write(ROWS[3:], "set/valid.jsonl")
    assert run().evaluation.num_examples == 2
    assert said[0].endswith("evaluating on 'validation'; not used: 'test'")
    assert run(data_split="test").train.num_examples == 1


def test_evaluations_on_the_way_need_a_split_for_them(write, tmp_path, plain, own_cache):
    write(ROWS[:3], "set/train.jsonl")
    recipe = Recipe(data=str(tmp_path / "set"), eval_every=5, keep_best=True, patience=2)
    with pytest.raises(RecipeError, match="eval_every = 5: there is nothing to evaluate on"):
        prepare(recipe, plain, len(plain), quiet)
    write(ROWS[3:], "set/validation.jsonl")
    assert prepare(recipe, plain, len(plain), quiet).evaluation.num_examples == 2


def test_what_is_left_of_a_directory_among_several_names_is_said(write, tmp_path, plain, own_cache):
    for split in ("train", "test"):
        write(ROWS[:3], f"one/{split}.jsonl")
        write([{"text": "other"}], f"two/{split}.jsonl")
    file = write(ROWS[3:], "more.jsonl")
    said = []

    def run(data, **fields):
        said.clear()
        return prepare(Recipe(data=data, **fields), plain, len(plain), said.append)

    one, two = tmp_path / "one", tmp_path / "two"
    data = run(f"{one},{file},{two}")
    assert (data.train.num_examples, data.evaluation) == (6, None)
    assert said[:2] == [f"{path}: training on 'train' (1 file); not used: 'test'" for path in (one, two)]
    run(f"{one}:0.5,{file}:0.5", data_split="test")
    assert said[0] == f"{one}: training on 'test' (1 file); not used: 'train'"
    assert run(f"{one},{file}", eval_data=str(one)).evaluation.num_examples == 3
    assert said[0] == f"{one}: training on 'train' (1 file), evaluating on 'test'"


def test_a_directory_that_is_refused_is_not_described_first(write, tmp_path, plain, own_cache):
    for name in ("train", "test", "more"):
        write(ROWS, f"set/{name}.jsonl")
    said = []
    with pytest.raises(DataError, match="some files belong to a split"):
        prepare(Recipe(data=str(tmp_path / "set")), plain, len(plain), said.append)
    assert said == []


# --- several, and shares ----------------------------------------------------------------------------------------------


@pytest.fixture
def two(write):
    alpaca = [{"instruction": f"q{i}", "output": f"a{i}"} for i in range(40)]
    return write(alpaca, "a.jsonl"), write([{"messages": chat(i)} for i in range(40)], "b.jsonl")


def chat(i):
    return [{"role": "user", "content": f"p{i}"}, {"role": "assistant", "content": f"b{i}"}]


def test_several_files_of_different_forms(two, chatml, own_cache):
    data = prepare(Recipe(data=f"{two[0]},{two[1]}"), chatml, len(chatml), quiet)
    assert data.train.num_examples == 80
    assert data.data_format is None
    assert data.train.store.where(79) == f"{two[1]}:40"
    alone = prepare(Recipe(data=str(two[1])), chatml, len(chatml), quiet).train.store
    assert data.train.store.example(40)[0].tolist() == alone.example(0)[0].tolist()


def test_shares_of_a_mixture(two, chatml, own_cache):
    said = []

    def chosen(data, **fields):
        said.clear()
        found = prepare(Recipe(data=data, **fields), chatml, len(chatml), said.append)
        examples = np.sort(found.train.packing.examples)
        return (examples < 40).sum(), (examples >= 40).sum(), examples.tolist(), found.fingerprint

    first = chosen(f"{two[0]}:0.75,{two[1]}:0.25")
    assert first[:2] == (40, 13)
    assert said[-1] == f"mixture: 40 of 40 examples of {two[0]}, 13 of 40 examples of {two[1]}"
    assert chosen(f"{two[0]}:3,{two[1]}:1")[2] == first[2], "shares need not add up to 1"
    assert chosen(f"{two[0]}:0.75,{two[1]}:0.25", seed=1)[2] != first[2]
    assert chosen(f"{two[0]}:0.5,{two[1]}:0.5")[:2] == (40, 40)
    assert chosen(f"{two[0]}:0.5,{two[1]}:0.5")[3] != first[3], "a resumed run must find the same shares"
    assert chosen(f"{two[0]}:0.75,{two[1]}:0.25", shuffle=False)[2] == list(range(53))
    half = chosen(f"{two[0]}:0.5,{two[1]}:0.5", data_percent=50.0)
    assert sum(half[:2]) == 40


def test_several_names_may_be_longer_than_one_can_be(write, monkeypatch, tmp_path):
    names = [f"{'a' * 100}-{i}.jsonl" for i in range(4)]
    for name in names:
        write(ROWS[:1], name)
    monkeypatch.chdir(tmp_path)
    assert len(texts(",".join(names))) == 4
    assert Recipe(data=",".join(f"{name}:1" for name in names)).data


@pytest.mark.parametrize("name", ["~nobody-is-called-so/a.jsonl", "a" * 300 + ".jsonl"])
def test_a_name_that_cannot_be_of_a_file_is_refused_in_words(name, plain):
    with pytest.raises(DataError, match=r"no such file or directory|cannot be read"):
        prepare(Recipe(data=name), plain, len(plain), quiet)
    assert run_length(Recipe(data="~nobody-is-called-so/a.jsonl")) is None


def test_a_share_of_a_file_without_examples_is_refused(two, write, chatml, own_cache):
    """The smallest part for its share is taken whole: of nothing, that would leave one example of the other."""
    empty = write([{"instruction": "q", "output": ""}] * 5, "empty.jsonl")
    with pytest.raises(DataError, match=r"no example is left of .*empty\.jsonl\n.*said above"):
        prepare(Recipe(data=f"{two[0]}:0.75,{empty}:0.25"), chatml, len(chatml), quiet)
    assert prepare(Recipe(data=f"{two[0]},{empty}"), chatml, len(chatml), quiet).train.num_examples == 40


@pytest.mark.parametrize("data", ["a.jsonl:0.5,b.jsonl", "a.jsonl:0,b.jsonl:1", "a.jsonl,,b.jsonl", "a.jsonl:-1,b:2"])
def test_shares_that_are_none(data):
    with pytest.raises(RecipeError, match="data = "):
        Recipe(data=data)


def test_what_is_evaluated_on_has_no_shares():
    with pytest.raises(RecipeError, match=r"eval_data = .*has shares"):
        Recipe(eval_data="a.jsonl:0.5,b.jsonl:0.5")
    assert Recipe(eval_data="a.jsonl,b.jsonl").eval_data == "a.jsonl,b.jsonl"


def test_one_name_has_no_share(write):
    path = write(ROWS)
    for data in (f"{path}:0.5", f"{path.parent}:1", "demo:2"):
        with pytest.raises(RecipeError, match=r"gives a share to one name\n.*--data-percent 50 takes half of one"):
            Recipe(data=data)
    with pytest.raises(RecipeError, match=r"eval_data = .*has shares"):
        Recipe(eval_data=f"{path}:0.5")


def test_a_number_behind_a_name_on_the_hub_is_a_configuration(write):
    assert parse_parts("owner/name:2023") == (Part("owner/name:2023"),)
    path = write(ROWS, "my.jsonl:0.5")
    assert parse_parts(str(path)) == (Part(str(path)),)


def test_a_file_with_a_comma_in_its_name_is_that_file(write):
    path = write(ROWS, "a,b:0.5.jsonl")
    assert len(texts(path)) == 5


def test_a_file_named_twice_is_refused(write):
    path = write(ROWS)
    with pytest.raises(DataError, match="is named twice"):
        texts(f"{path},{path}")


# --- the Hub ----------------------------------------------------------------------------------------------------------


def test_a_stream_of_the_hub(monkeypatch, tmp_path, plain, own_cache):
    """`datasets` streams from a file as from the Hub; which commit is read is what the Hub would be asked."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES)
    load, asked, version = datasets.load_dataset, [], ["first"]

    def load_dataset(name, configuration, **options):
        asked.append(options)
        return load("json", data_files=str(path), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "_version", lambda repository: version[0])
    recipe = Recipe(data="owner/name", data_stream=True)
    data = prepare(recipe, plain, len(plain), quiet)
    assert asked == [{"split": "train", "streaming": True}]
    assert data.train.num_examples == 5
    assert data.train.store.where(4) == "owner/name:5"
    first = open_source("owner/name", "train", quiet, Reading(stream=True)).fingerprint
    version[0] = "second"
    assert open_source("owner/name", "train", quiet, Reading(stream=True)).fingerprint != first


def test_a_stream_that_breaks_off_is_told_with_its_row(monkeypatch, plain, own_cache):
    def rows():
        yield from ROWS
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows))
    monkeypatch.setattr(hub, "_version", lambda repository: "first")
    with pytest.raises(DataError, match=r"owner/name:5: .*reset by peer.*\n.*Without --data-stream"):
        prepare(Recipe(data="owner/name", data_stream=True), plain, len(plain), quiet)


def test_the_order_of_a_folder_is_not_that_of_the_disk(write, tmp_path):
    for letter in "dbca":
        write([{"text": letter}], f"set/train-{letter}.jsonl")
    assert "".join(texts(tmp_path / "set")) == "abcd"
    assert next(os.path.basename(p) for p in open_folder(tmp_path / "set").choose("train")) == "train-a.jsonl"
