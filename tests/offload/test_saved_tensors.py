"""What is saved under one placement and restored under another goes on to the same bits."""

import pytest
import torch
from small_net import offload
from torch import nn

from penstock.offload.adamw import OffloadAdamW
from penstock.offload.dtensors import lies_at, lies_here
from penstock.offload.saved_tensors import state_tensors, weight_tensors

HOMES = ["gpu", "stream", "host", {"gpu": 0.4, "stream": 0.3, "host": 0.3}]


def net(dtype, seed, device):
    torch.manual_seed(seed)
    layers = [nn.Linear(24, 41), nn.GELU(), nn.Linear(41, 24, bias=False), nn.LayerNorm(24)]
    return nn.Sequential(*layers).to(dtype).to(device)


def steps(model, optimizer, numbers):
    for number in numbers:
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(number)).to(model[0].weight)
        (model(x) - x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def everything(model, optimizer):
    """Name -> (dtype, shape, elements), weights and state."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        t.name: (t.dtype, t.shape, torch.cat([piece.cpu() for piece in t.pieces]))
        for t in state_tensors(optimizer, names)
    }
    weights = {n: (p.dtype, tuple(p.shape), p.detach().view(-1).cpu()) for n, p in model.named_parameters()}
    return weights | state


def put(model, optimizer, saved):
    names = {parameter: name for name, parameter in model.named_parameters()}
    for tensor in state_tensors(optimizer, names):
        for piece, part in zip(
            tensor.pieces, saved[tensor.name][2].split([len(p) for p in tensor.pieces]), strict=True
        ):
            piece.copy_(part)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.view(-1).copy_(saved[name][2])
    optimizer.restored()


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name][:2] == b[name][:2], name
        assert torch.equal(a[name][2], b[name][2]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0], ids=["after-norm", "in-backward"])
@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_any_placement_takes_up_the_state_of_any_other(dtype, max_grad_norm, homes, device):
    options = {"lr": 3e-3, "max_grad_norm": max_grad_norm}
    whole = net(dtype, 0, device)
    uninterrupted = OffloadAdamW(whole, homes="gpu", **options)
    steps(whole, uninterrupted, range(6))
    first = net(dtype, 0, device)
    before = offload(first, homes={"gpu": 0.5, "stream": 0.25, "host": 0.25}, chunk_size=100, **options)
    steps(first, before, range(3))
    saved = everything(first, before)
    second = net(dtype, 1, device)
    after = offload(second, homes=homes, chunk_size=333, **options)
    steps(second, after, [99])  # state that must not shine through
    put(second, after, saved)
    assert_equal(everything(second, after), saved)
    steps(second, after, range(3, 6))
    assert_equal(everything(second, after), everything(whole, uninterrupted))


def test_every_tensor_is_whole_and_named_after_its_parameter():
    model = net(torch.bfloat16, 0, "cpu")
    optimizer = offload(model, homes="host", chunk_size=100)
    found = everything(model, optimizer)
    assert found["0.weight.exp_avg"][:2] == (torch.float32, (41, 24))
    assert found["0.weight.exp_avg_sq"][:2] == (torch.float32, (41, 24))
    assert found["0.weight.remainder"][:2] == (torch.int16, (41, 24))
    assert found["steps"][:2] == (torch.int64, ())
    model = net(torch.float32, 0, "cpu")
    assert "0.weight.remainder" not in everything(model, OffloadAdamW(model)), "fp32 weights have none"


def test_weights_that_stream_are_listed_without_an_operation(monkeypatch):
    """Of ranks, they are DTensors of a GPU whose rows lie in host memory: detaching one fails."""
    model = nn.BatchNorm1d(3)
    at_home = {name: torch.full((3,), 7.0) for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        lies_at(parameter, at_home[name])
    monkeypatch.setattr(nn.Parameter, "detach", lambda parameter: pytest.fail("it was touched"), raising=False)
    found = {tensor.name: tensor for tensor in weight_tensors(model)}
    assert found.keys() == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert all(found[name].pieces[0].data_ptr() == home.data_ptr() for name, home in at_home.items())
    for parameter in model.parameters():
        lies_here(parameter)
