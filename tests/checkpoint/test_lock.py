import errno
import json
import os
from pathlib import Path

import pytest

from penstock.checkpoint import lock
from penstock.checkpoint.lock import claim, is_claimed, refuse_if_claimed
from penstock.errors import OutputError


def test_a_second_claim_is_refused_and_says_who_holds_it(tmp_path):
    with claim(tmp_path / "run"):
        for second in (lambda: claim(tmp_path / "run").__enter__(), lambda: refuse_if_claimed(tmp_path / "run")):
            with pytest.raises(OutputError, match=f"process {os.getpid()} on .*, since 2"):
                second()
        (tmp_path / "run" / "recipe.yaml").write_text("")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["recipe.yaml"]
    with claim(tmp_path / "run"):
        pass


def test_the_lock_of_a_dead_process_is_no_lock(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "host": "gone", "since": "2020"}))
    refuse_if_claimed(tmp_path)
    with claim(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_directory_that_stays_empty_is_taken_away_with_its_parents(tmp_path):
    with claim(tmp_path / "a/b/run"):
        assert (tmp_path / "a/b/run").is_dir()
    assert list(tmp_path.iterdir()) == []
    with claim(tmp_path):
        pass
    assert tmp_path.is_dir(), "it was there before"


def test_a_disk_that_went_away_hides_no_error(tmp_path, monkeypatch):
    """The lock cannot be removed there either."""

    def unlink(*_, **__):
        raise OSError(30, "Read-only file system")

    def fail():
        with claim(tmp_path / "run"):
            monkeypatch.setattr(Path, "unlink", unlink)
            raise OutputError("the disk is gone", where="run", remedy="Mount it.")

    with pytest.raises(OutputError, match="the disk is gone"):
        fail()
    monkeypatch.undo()
    with claim(tmp_path / "run"):
        pass


@pytest.mark.parametrize("left", [False, True])
def test_a_file_system_without_locks_is_said_each_time_and_nothing_is_left(tmp_path, monkeypatch, left):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    if left:  # by a run that was killed
        (tmp_path / "lock").touch()
    for _ in range(2):
        refuse_if_claimed(tmp_path)
        assert not is_claimed(tmp_path)
        for directory in (tmp_path, tmp_path / "a/run"):
            with pytest.raises(OutputError, match=r"cannot be locked \(Function not implemented\)"):
                claim(directory).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"] * left
