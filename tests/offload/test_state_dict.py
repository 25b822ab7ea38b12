"""A state dict holds whole parameters, whatever the chunks, in the format in which they are kept."""

import copy

import pytest
import torch
from small_net import offload
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from penstock.errors import RecipeError
from penstock.offload.adamw import OffloadAdamW
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


def pair(dtype, steps=5, groups=False):
    """A model, and the same gradients for any optimizer of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 1)).to(dtype)
    data = [torch.randn(8, 40).to(dtype) for _ in range(steps)]
    params = [{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(model.parameters())]
    return model, data, params if groups else None


def go(model, optimizer, data):
    for x in data:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


SETTINGS = {"lr": 1e-3, "weight_decay": 0.01}


@pytest.mark.parametrize("groups", [False, True])
def test_a_run_goes_from_torch_to_ours_and_back(groups):
    """In fp32 nobody can tell but by rounding."""
    model, data, params = pair(torch.float32, 12, groups)
    torchs = torch.optim.AdamW(params or model.parameters(), **SETTINGS)
    go(model, torchs, data[:4])
    ours = OffloadAdamW(model, max_grad_norm=1e30, params=params, **SETTINGS)
    ours.load_state_dict(torchs.state_dict())
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in torchs.param_groups]
    go(model, ours, data[4:8])
    again = torch.optim.AdamW(params or model.parameters(), lr=0.5)
    again.load_state_dict(ours.state_dict())
    ours.close()
    go(model, again, data[8:])
    assert {int(state["step"]) for state in again.state.values()} == {12}

    alone, data, params = pair(torch.float32, 12, groups)
    go(alone, torch.optim.AdamW(params or alone.parameters(), **SETTINGS), data)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_moments_of_torch_in_bf16_are_taken_and_weights_are_the_masters():
    model, data, _ = pair(torch.bfloat16)
    torchs = torch.optim.AdamW(model.parameters(), **SETTINGS)
    go(model, torchs, data)
    optimizer = OffloadAdamW(model)
    optimizer.load_state_dict(torchs.state_dict())
    for p, entry in zip(model.parameters(), optimizer.state_dict()["state"].values(), strict=True):
        assert torch.equal(entry["exp_avg"], torchs.state[p]["exp_avg"].float())
        assert torch.equal(entry["master"], p.float())
    assert int(optimizer.scalar_state()["steps"]) == 5


def test_a_parameter_without_gradients_has_no_moments_in_torch():
    model, data, _ = pair(torch.float32)
    model.extra = nn.Linear(3, 3)
    torchs = torch.optim.AdamW(model.parameters(), **SETTINGS)
    model[0].weight.requires_grad_(False)  # numbered there, and not trained
    go(nn.Sequential(*list(model)[:3]), torchs, data)
    optimizer = OffloadAdamW(model, params=[{"params": list(model.parameters())}])
    optimizer.load_state_dict(torchs.state_dict())
    saved = optimizer.state_dict()["state"]
    assert list(saved) == [1, 2, 3, 4, 5]
    assert not saved[4]["exp_avg"].any()
    assert saved[1]["exp_avg"].any()


def test_a_layer_that_was_frozen_since_keeps_its_state():
    model, optimizer = train("fp32")
    model[0].requires_grad_(False)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["exp_avg"] += 1
    optimizer.load_state_dict(saved)
    loaded = optimizer.state_dict()["state"]
    assert list(loaded) == [0, 1, 2, 3]
    assert all(torch.equal(loaded[i][name], entry[name]) for i, entry in saved["state"].items() for name in entry)


def test_state_of_which_some_is_not_there_is_refused():
    model, data, _ = pair(torch.float32)
    model[0].requires_grad_(False)
    optimizer = OffloadAdamW(model, params=[{"params": list(model.parameters())}])
    go(model, optimizer, data)
    saved = optimizer.state_dict()
    optimizer.close()
    model[0].requires_grad_(True)
    other = OffloadAdamW(model, params=[{"params": list(model.parameters())}])
    with pytest.raises(RecipeError, match=r"other parameters\n.*the same frozen"):
        other.load_state_dict(saved)
    go(model, other, data)
    saved = other.state_dict()
    del saved["state"][2]
    with pytest.raises(RecipeError, match="other parameters"):
        other.load_state_dict(saved)


@pytest.mark.parametrize(("change", "said"), [
    (lambda saved: saved["param_groups"][0].update(amsgrad=True), "an optimizer with amsgrad"),
    (lambda saved: saved["param_groups"][0].update(decoupled_weight_decay=False), "as in Adam"),
    (lambda saved: saved["state"][0].update(step=torch.tensor(3.0)), "have made 3 to 5 steps"),
    (lambda saved: saved["param_groups"].append(saved["param_groups"][0]), "other parameters"),
    (lambda saved: saved["param_groups"][0]["params"].pop(), "other parameters"),
    (lambda saved: saved["state"].update({9: saved["state"][0]}), "other parameters"),
    (lambda saved: saved["state"][0].update(exp_avg=torch.zeros(2)), "other parameters"),
])  # fmt: skip
def test_a_state_of_torch_that_cannot_be_taken_is_refused(change, said):
    model, data, _ = pair(torch.float32)
    torchs = torch.optim.AdamW(model.parameters(), **SETTINGS)
    go(model, torchs, data)
    saved = copy.deepcopy(torchs.state_dict())
    change(saved)
    with pytest.raises(RecipeError, match=said):
        OffloadAdamW(model).load_state_dict(saved)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_a_state_of_torch_is_exact(states):
    model, data, _ = pair(torch.float32)
    torchs = torch.optim.AdamW(model.parameters(), **SETTINGS)
    go(model, torchs, data)
    with pytest.raises(RecipeError, match="the saved state is fp32"):
        OffloadAdamW(model, states=states).load_state_dict(torchs.state_dict())


@pytest.mark.parametrize("states", FORMATS)
def test_state_in_the_form_of_before_is_read(states):
    _, optimizer = train(states)
    saved = optimizer.state_dict()
    entries = [{k.removesuffix("_codes"): v for k, v in e.items() if k != "step"} for e in saved["state"].values()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    _, other = train(states, steps=1)
    other.load_state_dict({**saved, "state": entries, "param_groups": groups, "powers": torch.ones(1, 2)})
    for a, b in zip(saved["state"].values(), other.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_state_dicts_of_distributed_checkpoint_are_refused_and_change_nothing(states):
    """They make a step of zeros, and leave out what is not of one parameter."""
    model, optimizer = train(states)
    before = copy.deepcopy(optimizer.state_dict())
    saved = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    for ask in (get_optimizer_state_dict, lambda *both: set_optimizer_state_dict(*both, saved)):
        with pytest.raises(RecipeError, match=r"^torch.distributed.checkpoint: .*\n.*own state_dict\(\)"):
            ask(model, optimizer)
    after = optimizer.state_dict()
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert torch.equal(before["steps"], after["steps"])
    for a, b in zip(before["state"].values(), after["state"].values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
