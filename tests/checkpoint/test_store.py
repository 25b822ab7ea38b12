"""The store by itself: format, splitting, memory, names, pruning. Kills are in test_faults.py."""

import errno
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from penstock.checkpoint import store
from penstock.checkpoint.store import find, open_checkpoint, prune, read_document, read_tensors, save, sweep, verify
from penstock.errors import CheckpointError
from penstock.offload.saved_tensors import SavedTensor, whole


def quiet(_):
    pass


def in_pieces(name, tensor, size):
    return SavedTensor(name, tuple(tensor.shape), tensor.dtype, tensor.view(-1).split(size))


def sample():
    torch.manual_seed(0)
    a, b, c = torch.randn(7, 9).bfloat16(), torch.randn(33), torch.randint(-9, 9, (5,), dtype=torch.int16)
    return {
        "weights": [whole("a", a), whole("step", torch.tensor(3))],
        "state": [in_pieces("b", b, 10), whole("c", c), whole("codes", torch.arange(3, dtype=torch.int8))],
    }


def blank(tensors):
    return [whole(t.name, torch.zeros(t.shape, dtype=t.dtype)) for t in tensors]


def test_what_is_saved_is_plain_safetensors_and_comes_back(tmp_path):
    tensors = sample()
    saved = save(tmp_path / "c", 12, tensors, {"run": {"x": [1, None]}}, quiet)
    assert saved == open_checkpoint(tmp_path / "c/step-00000012")
    verify(saved, quiet)
    loaded = load_file(saved.path / "state-00001.safetensors")
    assert torch.equal(loaded["b"], torch.cat(tensors["state"][0].pieces))
    with safe_open(saved.path / "weights-00001.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("a").view(-1), tensors["weights"][0].pieces[0])
        assert file.get_tensor("step").shape == ()
    for group, members in tensors.items():
        landing = [SavedTensor(t.name, t.shape, t.dtype, t.pieces[0].split(4)) for t in blank(members)]
        read_tensors(saved, group, landing, quiet)
        for there, back in zip(members, landing, strict=True):
            assert torch.equal(torch.cat(there.pieces), torch.cat(back.pieces))
    assert read_document(saved, "run") == {"x": [1, None]}
    assert not list((tmp_path / "c").glob(".*"))


def test_files_are_split_and_a_large_tensor_has_one_to_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FILE_BYTES", 1000)
    tensors = {"state": [whole(f"t{i}", torch.randn(100 if i != 2 else 2000)) for i in range(6)]}
    saved = save(tmp_path / "c", 1, tensors, {}, quiet)
    files = {name: sorted(load_file(saved.path / name)) for name in saved.files}
    assert list(files.values()) == [["t0", "t1"], ["t2"], ["t3", "t4"], ["t5"]]
    landing = blank(tensors["state"])
    read_tensors(saved, "state", landing, quiet)
    assert all(torch.equal(a.pieces[0], b.pieces[0]) for a, b in zip(tensors["state"], landing, strict=True))


def test_a_disk_that_fails_while_tensors_are_read_is_told_as_that(tmp_path, monkeypatch):
    tensors = sample()
    saved = save(tmp_path / "c", 12, tensors, {}, quiet)
    verify(saved, quiet)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store, "read_file", fails)
    with pytest.raises(CheckpointError, match=r"weights-00001\.safetensors: cannot be read \(Input/output error\)"):
        read_tensors(saved, "weights", blank(tensors["weights"]), quiet)


def peak_bytes():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def test_saving_and_loading_need_no_second_copy(tmp_path):
    tensors = [in_pieces(f"t{i}", torch.ones(2**24), 2**22) for i in range(6)]  # 384 MiB
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    saved = save(tmp_path / "c", 1, {"state": tensors}, {}, quiet)
    verify(saved, quiet)
    read_tensors(saved, "state", tensors, quiet)
    assert peak_bytes() - before < 128 * 2**20


def test_progress_is_shown_with_bytes_and_rate(tmp_path, monkeypatch):
    lines, clock = [], iter(range(0, 10**6, 3))
    monkeypatch.setattr("penstock.checkpoint.tensors.time.monotonic", lambda: next(clock))
    save(tmp_path / "c", 1, {"state": [whole("t", torch.ones(2**20))]}, {}, lines.append)
    assert any(re.fullmatch(r"  saving: 0\.0 of 0\.0 GB, 0\.00 GB/s", line) for line in lines)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (lambda members: members[:-1], "codes: the model has no such tensor"),
        (lambda members: [*members, whole("new", torch.ones(1))], "new: the checkpoint lacks it"),
        (lambda members: [*members[:-1], whole("codes", torch.ones(4, dtype=torch.int8))], r"codes is \[3\]"),
        (lambda members: [*members[:-1], whole("codes", torch.ones(3))], r"codes is \[3\] torch.int8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_is_written(tmp_path, wanted, message):
    tensors = sample()
    saved = save(tmp_path / "c", 12, tensors, {}, quiet)
    landing = wanted(blank(tensors["state"]))
    with pytest.raises(CheckpointError, match=message):
        read_tensors(saved, "state", landing, quiet)
    assert all(not t.pieces[0].any() for t in landing if t.name in ("b", "c"))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_are_kept_and_a_step_can_be_saved_again(tmp_path):
    directory = tmp_path / "c"
    for step in (5, 100_000_000, 20, 20):
        current = save(directory, step, sample(), {}, quiet)
    assert [path.name for path in find(directory)] == [
        "step-100000000", "step-00000020.1", "step-00000020", "step-00000005",
    ]  # fmt: skip
    prune(directory, 2, current)
    assert names(directory) == ["step-00000005", "step-00000020.1"], "what is later than the newest is no future of it"
    prune(directory, 1, current)
    assert names(directory) == ["step-00000020.1"]


def test_debris_is_cleared_away_and_nothing_else(tmp_path):
    directory = tmp_path / "c"
    save(directory, 1, sample(), {}, quiet)
    for name in (".saving-step-00000002", ".debris-step-00000003", "step-00000004"):
        (directory / name).mkdir()
        (directory / name / "state-00001.safetensors").write_text("half")
    (directory / "mine").mkdir()
    assert [path.name for path in find(directory)] == ["step-00000001"]
    sweep(directory)
    assert names(directory) == ["mine", "step-00000001"]


def in_use(monkeypatch, *names):
    """Directories that cannot be removed, as on NFS while another process has a file of them open."""
    real = os.rmdir

    def rmdir(path, **kwargs):
        if Path(path).name in names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        real(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", rmdir)


def test_what_another_process_still_reads_is_passed_over_and_swept_later(tmp_path, monkeypatch):
    directory = tmp_path / "c"
    in_use(monkeypatch, ".debris-step-00000002")
    first, second = (save(directory, step, sample(), {}, quiet) for step in (1, 2))
    assert prune(directory, 1, first) == [second.path], "a later step, since the run went back"
    assert names(directory) == [".debris-step-00000002", "step-00000001"]
    save(directory, 2, sample(), {}, quiet)
    assert prune(directory, 1, first) == []
    assert names(directory) == [".debris-step-00000002", "step-00000001"]
    monkeypatch.undo()
    sweep(directory)
    assert names(directory) == ["step-00000001"]


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_syncs_no_directories_is_served(tmp_path, monkeypatch, reason):
    real = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(reason, os.strerror(reason))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error") if reason == errno.EIO else nullcontext():
        assert save(tmp_path / "c", 1, sample(), {}, quiet).path.is_dir()


def test_an_error_while_writing_leaves_nothing(tmp_path):
    tensors = [whole("good", torch.ones(5)), whole("lost", torch.ones(5, device="meta"))]
    with pytest.raises(NotImplementedError):
        save(tmp_path / "c", 1, {"state": tensors}, {}, quiet)
    assert names(tmp_path / "c") == []


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path):
    saved = save(tmp_path / "c", 1, sample(), {}, quiet)
    saved.path.rename(tmp_path / "c/step-00000009")
    with pytest.raises(CheckpointError, match="is of step 1 and called step-00000009"):
        open_checkpoint(tmp_path / "c/step-00000009")


def test_a_format_of_the_future_is_said(tmp_path):
    saved = save(tmp_path / "c", 1, sample(), {}, quiet)
    values = json.loads((saved.path / "manifest.json").read_text())
    values.pop("checksum")
    (saved.path / "manifest.json").write_text(json.dumps(store._sealed(values | {"format": 3})))
    with pytest.raises(CheckpointError, match="has format 3, and formats up to 2 are read here"):
        open_checkpoint(saved.path)
