from pathlib import Path

import pytest
import torch

from penstock.errors import DoesNotFit
from penstock.flow.arena import Arena
from penstock.plan.layout import ALIGNMENT, padded


def test_pieces_are_aligned_exact_and_apart():
    arena = Arena(padded(1000) + padded(7), pinned=False, cores=[0])
    a, b = arena.cut(1000), arena.cut(7)
    assert (len(a), len(b)) == (1000, 7)
    assert b.data_ptr() - a.data_ptr() == padded(1000)
    assert a.data_ptr() % ALIGNMENT == 0
    a.fill_(1)
    assert b.sum() == 0
    with pytest.raises(AssertionError, match="cut to the sizes"):
        arena.cut(1)
    arena.close()


def test_too_much_memory_is_refused_with_bytes(monkeypatch):
    monkeypatch.setattr("penstock.flow.arena.available_host_bytes", lambda: 2**30)
    with pytest.raises(DoesNotFit, match=r"host memory: optimizer state: 3\.0 GiB are needed, 1\.0 are available"):
        Arena(3 * 2**30, pinned=False, cores=[0])


@pytest.mark.gpu
def test_a_pinned_arena_copies_and_is_given_back():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU on this machine")
    for _ in range(2):
        arena = Arena(2**28, pinned=True, cores=[0])
        piece = arena.cut(2**28)
        assert piece.is_pinned()
        piece.copy_(torch.arange(2**28, device="cuda").to(torch.uint8))
        assert int(piece[-1]) == 255
        del piece
        arena.close()


def test_workers_of_a_loader_get_no_copy_of_an_arena():
    arena = Arena(2**21, pinned=False, cores=[0])
    address = arena.cut(1).data_ptr()
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ")[0].split("-")
        if len(bounds) == 2:
            found = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif found and line.startswith("VmFlags:"):
            assert " dc" in line, "not to be copied by fork"
            break
    arena.close()
