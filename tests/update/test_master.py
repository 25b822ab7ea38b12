"""The split master loses no bit."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.update.master import join, round_to_bf16_, split


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_split_and_join_lose_nothing(bits):
    master = torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)
    master = master[master.isfinite() & (master.abs() < 3.38e38)]
    assert torch.equal(join(*split(master)), master)


def test_split_of_every_tie_and_neighbour():
    high = torch.arange(0, 0x7F7F, dtype=torch.int32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        for sign in (0, -(2**31)):
            master = ((high | low) | sign).view(torch.float32)
            assert torch.equal(join(*split(master)), master)
            away = (master.view(torch.int32).to(torch.int64) & 0x7FFFFFFF) + 0x8000 >> 16  # half away from zero
            assert torch.equal(split(master)[0].view(torch.int16).to(torch.int64) & 0x7FFF, away)


def test_weights_are_rounded_in_place_and_what_they_lose_is_kept():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3).bfloat16())
    start = copy.deepcopy(model)
    remainders = round_to_bf16_(model.parameters())
    assert set(remainders) == set(model[0].parameters()), "bf16 weights have nothing to lose"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for p, q in zip(model[0].parameters(), start[0].parameters(), strict=True):
        assert p.shape == q.shape
        assert torch.equal(join(p.detach().view(-1), remainders[p]), q.detach().view(-1))
    assert all(torch.equal(p, q) for p, q in zip(model[1].parameters(), start[1].parameters(), strict=True))
