import errno
import os
import resource
import signal

import pytest
from safetensors import SafetensorError

from penstock.errors import DoesNotFit, OutputError
from penstock.machine.disk import append_line, file_limit, hits_file_limit, write_whole, writing


@pytest.fixture
def one_kib():
    """No file may pass 1 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_file_is_there_whole_or_as_it_was(tmp_path, one_kib):
    path = tmp_path / "page.html"
    for before in ([], ["page.html"]):
        with pytest.raises(OSError, match="File too large") as caught:
            write_whole(path, "x" * 2000)
        assert hits_file_limit(caught.value)
        assert [file.name for file in tmp_path.iterdir()] == before
        write_whole(path, "é")
    assert path.read_bytes() == "é".encode()


def test_it_has_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "other").write_text("x")
    write_whole(tmp_path / "file", b"x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_line_is_added_whole_or_not_at_all(tmp_path, one_kib):
    path = tmp_path / "rows.jsonl"
    append_line(path, "é" * 400)
    with pytest.raises(OSError, match="File too large"):
        append_line(path, "x" * 400)  # half of it has room
    append_line(path, "x" * 100)
    assert path.read_text() == f"{'é' * 400}\n{'x' * 100}\n"


def test_a_full_disk_has_an_exit_code_of_its_own(tmp_path, one_kib):
    with pytest.raises(DoesNotFit, match="ulimit -f"), writing(tmp_path, "directory"):
        write_whole(tmp_path / "file", "x" * 2000)
    with pytest.raises(DoesNotFit, match="name a directory on another disk"), writing(tmp_path, "directory"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputError, match="Name a file that can be written"), writing(tmp_path, "file"):
        (tmp_path / "missing" / "file").write_text("x")


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_the_limit_is_known_and_told_from_a_full_disk(one_kib):
    assert file_limit() == 1024
    assert hits_file_limit(SafetensorError("I/O error: File too large (os error 27)"))
    assert not hits_file_limit(OSError(errno.ENOSPC, "No space left on device"))
    assert not hits_file_limit(SafetensorError("I/O error: No space left on device (os error 28)"))


def test_there_is_mostly_no_limit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert file_limit() is None
