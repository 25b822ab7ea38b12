"""A limit of GPU memory is kept by torch's allocator, with the context counted in."""

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import RecipeError
from penstock.machine import gpu_memory
from penstock.machine.gpu_memory import LATER_BYTES, driver_bytes, gpu_left, gpu_room, limit_gpu

CUDA = torch.device("cuda", 0)
GB = 10**9


@pytest.fixture
def card(monkeypatch):
    """A GPU of 80 GB whose context takes half a GB; `fraction` is what torch was told."""
    card = SimpleNamespace(total=80 * GB, free=80 * GB - GB // 2, reserved=0, fraction=None)
    monkeypatch.setattr(gpu_memory, "_LIMITS", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=card.total))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free, card.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: card.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 * GB)

    def told(fraction, device):
        card.fraction = fraction

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told)
    return card


def test_context_and_what_the_driver_takes_later_are_counted_in(card):
    limit_gpu(CUDA, "24GB")
    allowed = 24 * GB - GB // 2 - LATER_BYTES
    assert card.fraction == pytest.approx(allowed / card.total)
    assert gpu_room(CUDA) == (allowed, allowed)
    card.reserved = 20 * GB
    assert gpu_room(CUDA) == (allowed - 20 * GB, allowed)
    card.free = 2 * GB
    assert gpu_room(CUDA)[0] == 2 * GB, "others may have taken it"
    assert driver_bytes(CUDA) == 78 * GB
    assert gpu_left(CUDA) == 2 * GB + 13 * GB, "with what torch has in its cache"


def test_auto_takes_a_limit_back(card):
    limit_gpu(CUDA, "24GB")
    limit_gpu(CUDA, "auto")
    assert card.fraction == 1.0
    assert gpu_room(CUDA) == (card.free, card.total)


def test_what_others_take_is_no_context(card):
    card.free = 40 * GB
    limit_gpu(CUDA, "24GB")
    assert gpu_room(CUDA)[1] == 24 * GB - gpu_memory.MOST_CONTEXT - LATER_BYTES


def test_what_others_are_known_to_have_taken_does_not_count(card):
    card.free -= GB // 2
    limit_gpu(CUDA, "24GB", GB // 2)
    assert gpu_room(CUDA)[1] == 24 * GB - GB // 2 - LATER_BYTES


def test_less_than_the_context_is_refused(card):
    with pytest.raises(RecipeError, match=r"context alone takes 1\.1 GB"):
        limit_gpu(CUDA, "0.5GB")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
def test_on_a_gpu_more_than_the_limit_is_not_to_be_had():
    limit_gpu(torch.device("cuda"), "3GB")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * GB, dtype=torch.uint8, device="cuda")
        torch.empty(GB, dtype=torch.uint8, device="cuda")
    finally:
        limit_gpu(torch.device("cuda"), "auto")
