"""Safetensors are read exactly, and what is wrong with a file is said before anything is read from it."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import ModelError
from penstock.model import weight_files
from penstock.model.weight_files import read_headers

TENSORS = {
    "a": torch.randn(7, 5),
    "b": torch.randn(3).bfloat16(),
    "c": torch.arange(9, dtype=torch.uint8),
    "d": torch.tensor(2.5),
    "e": torch.randn(4, 3).half(),
    "f": torch.zeros(0, 4),
}


def sharded(directory, parts):
    """Write tensors to shards and an index, as save_pretrained does."""
    weight_map = {}
    for file, names in parts.items():
        save_file({n: TENSORS[n] for n in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


@pytest.mark.parametrize("piece", [8, 32 * 2**20])
def test_tensors_are_read_exactly(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(weight_files, "_PIECE_BYTES", piece)
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = read_headers(tmp_path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name][...], tensor)
        assert found[name].get_shape() == list(tensor.shape)
        assert found[name].num_elements == tensor.numel()


def test_floats_are_widened_in_pieces_and_never_narrowed(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "_PIECE_BYTES", 8)
    save_file(TENSORS, tmp_path / "model.safetensors")
    for name, stored in read_headers(tmp_path).items():
        wide = replace(stored, dtype=torch.float32)[...]
        expected = TENSORS[name].float() if TENSORS[name].is_floating_point() else TENSORS[name]
        assert torch.equal(wide, expected)
        assert wide.dtype == expected.dtype
        narrow = replace(stored, dtype=torch.bfloat16)[...]
        assert narrow.dtype == TENSORS[name].dtype


def test_an_index_names_the_shards(tmp_path):
    sharded(tmp_path, {"one.safetensors": ["a", "b"], "two.safetensors": ["c"]})
    save_file({"stray": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert read_headers(tmp_path).keys() == {"a", "b", "c"}


def test_missing_shards_are_named(tmp_path):
    sharded(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["c"]})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 2 shards are missing: two\.safetensors"):
        read_headers(tmp_path)


@pytest.mark.parametrize("path", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_may_not_leave_its_directory(tmp_path, path):
    index = sharded(tmp_path, {"one.safetensors": ["a"]})
    index.write_text(json.dumps({"weight_map": {"a": path}}))
    with pytest.raises(ModelError, match="outside its directory"):
        read_headers(tmp_path)


def test_an_index_that_promises_too_much(tmp_path):
    index = sharded(tmp_path, {"one.safetensors": ["a"]})
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "z": "one.safetensors"}}))
    with pytest.raises(ModelError, match="names tensors that the shard lacks: z"):
        read_headers(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be read as an index"):
        read_headers(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(ModelError, match="there are no weights"):
        read_headers(tmp_path)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pickles \(pytorch_model\.bin\).*run any code"):
        read_headers(tmp_path)


def damaged(path, header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "header cannot be read"),
        (b"[]", b"", "header cannot be read"),
        ({"a": {"dtype": "F32"}}, b"", "header cannot be read"),
        ({"a": ENTRY | {"shape": [3]}}, b"12345678", "size and shape of a tensor disagree"),
        ({"a": ENTRY | {"data_offsets": [-8, 0]}}, b"12345678", "disagree"),
        ({"a": ENTRY | {"dtype": "F4"}}, b"12345678", "type that cannot be trained: F4"),
        ({"a": ENTRY}, b"1234", r"should have [\d,]+ bytes and has"),
        ({"a": ENTRY}, b"123456789", r"should have [\d,]+ bytes and has"),
    ],
)
def test_damaged_files_are_found_by_their_headers(tmp_path, header, data, message):
    damaged(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ModelError, match=message):
        read_headers(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        read_headers(tmp_path)


def test_a_file_cut_short_after_its_header_was_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    found = read_headers(tmp_path)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelError, match="ends before its tensors do"):
        _ = [found[name][...] for name in found]


def test_progress_is_said(tmp_path, monkeypatch, said):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(weight_files.time, "monotonic", lambda: next(clock))
    progress = weight_files.Progress(said.append)
    progress.expect(4_000_000_000)
    progress.add(1_000_000_000)
    assert said == ["  1.0 of 4.0 GB loaded"]


@pytest.mark.parametrize("rows", [slice(0, 3), slice(2, 5), slice(5, 99), slice(3, 3), slice(None)])
def test_rows_are_read_alone(tmp_path, rows):
    """What a rank asks for: its rows, and of the file nothing else."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    stored = read_headers(tmp_path)["a"]
    read = []
    watched = replace(stored, progress=type("Watch", (), {"add": lambda self, n: read.append(n)})())
    assert torch.equal(watched[rows, 1:4], TENSORS["a"][rows, 1:4])
    assert sum(read) == TENSORS["a"][rows].numel() * 4
    assert torch.equal(stored[(rows,)], TENSORS["a"][rows])
    assert torch.equal(stored[3], TENSORS["a"][3])
