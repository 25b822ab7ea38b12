"""Where things are kept that can be made again."""

from pathlib import Path

from penstock.machine.cache import cache_dir


def test_a_place_that_was_named_is_found_from_everywhere(monkeypatch, tmp_path):
    """Compilers run in directories of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", "here")
    assert cache_dir("compiled") == tmp_path / "here" / "compiled"
    monkeypatch.setenv("PENSTOCK_CACHE", "~/there")
    assert cache_dir("compiled") == Path.home() / "there" / "compiled"
