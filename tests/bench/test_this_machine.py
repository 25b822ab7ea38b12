"""This machine: measured once, read from the file afterwards, measured again when asked."""

import dataclasses
import json
import time

import pytest

from penstock.bench import this_machine as probe
from penstock.bench.this_machine import disk_rate, identity, this_machine
from penstock.machine.known import H200


def test_measured_once_then_read(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "busy_cores", lambda: 0.0)
    cache, said = tmp_path / "machines.json", []
    start = time.perf_counter()
    first = this_machine(remeasure=False, say=said.append, cache=cache)
    assert time.perf_counter() - start < 30, "ten seconds on a machine of its own"
    assert first.measured
    assert first.sources
    assert first.matrix_flops_per_s > 1e8
    assert len(said) == 2
    monkeypatch.setattr(probe, "measure", lambda: H200)  # to see whether it is asked again
    again = this_machine(remeasure=False, say=said.append, cache=cache)
    assert dataclasses.replace(again, host_bytes=0) == dataclasses.replace(first, host_bytes=0)
    assert len(said) == 2
    assert this_machine(remeasure=True, say=said.append, cache=cache).name == "h200"
    assert list(json.loads(cache.read_text())) == [identity()]


def test_machines_share_the_file_and_a_damaged_one_is_measured_again(tmp_path, monkeypatch):
    cache = tmp_path / "machines.json"
    monkeypatch.setattr(probe, "measure", lambda: H200)
    monkeypatch.setattr(probe, "identity", lambda: "one")
    this_machine(remeasure=False, say=print, cache=cache)
    monkeypatch.setattr(probe, "identity", lambda: "two")
    this_machine(remeasure=False, say=print, cache=cache)
    assert set(json.loads(cache.read_text())) == {"one", "two"}
    cache.write_text("{")
    assert this_machine(remeasure=False, say=print, cache=cache).name == "h200"
    assert set(json.loads(cache.read_text())) == {"two"}


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "measure", lambda: H200)
    (tmp_path / "file").write_text("")
    said = []
    assert this_machine(remeasure=False, say=said.append, cache=tmp_path / "file" / "machines.json").name == "h200"
    assert "cannot be written" in said[-1]


def test_memory_is_looked_up_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "measure", lambda: H200)
    found = this_machine(remeasure=False, say=print, cache=tmp_path / "machines.json")
    assert found.host_bytes != H200.host_bytes


@pytest.mark.parametrize(("busy", "warned"), [(0.5, False), (9.0, True)])
def test_a_machine_that_others_use_is_not_measured_silently(busy, warned, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "measure", lambda: H200)  # 16 cores
    monkeypatch.setattr(probe, "busy_cores", lambda: busy)
    said = []
    found = this_machine(remeasure=False, say=said.append, cache=tmp_path / "machines.json")
    assert any("other programs kept 9.0 of 16 cores busy" in line for line in said) == warned
    assert any("--remeasure" in line for line in said if "WARNING" in line) == warned
    later = this_machine(remeasure=False, say=said.append, cache=tmp_path / "machines.json")
    assert found.sources == later.sources
    assert any("cores busy" in source for source in later.sources) == warned, "every plan shows it"


def test_the_disk_has_a_rate(tmp_path):
    rate = disk_rate(tmp_path, 2**22)
    assert rate is not None
    assert 1e5 < rate < 1e12
    assert disk_rate(tmp_path / "none", 2**20) is None
