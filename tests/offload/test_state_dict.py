"""A state dict holds whole parameters, whatever the chunks, in the format in which they are kept."""

import copy

import pytest
import torch
from small_net import offload
from torch import nn

from penstock.errors import RecipeError
from penstock.plan.layout import FORMATS
from penstock.update.formats import torch_dtype


def train(states, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 25), nn.Linear(25, 1)).bfloat16()  # 1000, 25, 25 and 1 elements
    optimizer = offload(model, lr=1e-2, states=states, **options)
    for _ in range(steps):
        model(torch.randn(8, 40).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model, optimizer


@pytest.mark.parametrize("states", FORMATS)
def test_whole_parameters_in_their_own_types(states):
    model, optimizer = train(states, chunk_size=300)
    scales = {"exp_avg_scale", "exp_avg_sq_scale"} if states == "int8" else set()
    for p, entry in zip(model.parameters(), optimizer.state_dict()["state"].values(), strict=True):
        codes = "_codes" if states == "int8" else ""
        moments = [f"exp_avg{codes}", f"exp_avg_sq{codes}"]
        assert set(entry) == {"step", "master", *moments, *scales}
        assert {entry[name].shape for name in ("master", *moments)} == {p.shape}
        assert {entry[name].shape for name in scales} <= {(-(-p.numel() // 256),)}
        first, second, *_ = (torch_dtype(part) for part in FORMATS[states].moments)
        assert tuple(entry[name].dtype for name in moments) == (first, second)
        assert entry[moments[0]].float().abs().sum() > 0
        assert entry["master"].dtype is torch.float32


@pytest.mark.parametrize("states", FORMATS)
def test_loading_gives_back_what_was_saved(states):
    _, optimizer = train(states, chunk_size=300)
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = train(states, steps=1, homes="host", chunk_size=512)
    other.load_state_dict(saved)
    loaded = other.state_dict()
    for a, b in zip(saved["state"].values(), loaded["state"].values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("kept", "saved"), [("fp32", "bf16"), ("bf16", "int8"), ("int8", "fp32")])
def test_another_format_is_refused_before_anything_changes(kept, saved):
    (_, optimizer), (_, other) = train(kept), train(saved, steps=2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RecipeError, match=f"states = '{kept}': the saved state is {saved}"):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert torch.equal(before["steps"], after["steps"])
    for a, b in zip(before["state"].values(), after["state"].values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
