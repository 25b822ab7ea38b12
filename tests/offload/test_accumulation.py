"""Gradients of micro-batches add up in fp32 and are rounded once: the error does not grow with their number."""

import functools
import importlib.util
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from small_net import HOMES, assert_same, offload
from torch import nn

from penstock.offload.adamw import OffloadAdamW
from penstock.offload.step import Step
from penstock.offload.trained import TrainedUnit

spec = importlib.util.spec_from_file_location("fp64_error", Path(__file__).parents[2] / "benchmarks/fp64_error.py")
fp64_error = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fp64_error)


class Given(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.weight = nn.Parameter(torch.randn(50, 31, generator=generator).to(dtype))
            layer.forward = lambda x, layer=layer: (layer.weight * x).sum()

    def forward(self, x, use=(True, True)):
        return sum(layer(x) for layer, used in zip(self.layers, use, strict=True) if used)


def given(number, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(50, 31, generator=generator).to(dtype) for _ in range(number)]


def accumulated(model, optimizer, gradients, use=(True, True)):
    for number, gradient in enumerate(gradients):
        last = number == len(gradients) - 1
        with nullcontext() if last else optimizer.accumulate():
            model(gradient, use if last else (True, True)).backward()


@pytest.mark.parametrize("number", [2, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_is_that_of_fp32_rounded_once(number, dtype):
    model, gradients = Given(dtype), given(number, dtype)
    optimizer = OffloadAdamW(model, homes="gpu")
    accumulated(model, optimizer, gradients)
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total = total + gradient.float()
    assert all(torch.equal(p.grad, total.to(dtype)) for p in model.parameters())
    optimizer.step()
    assert not optimizer.zero_grad()


@pytest.mark.parametrize("homes", HOMES, ids=str)
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_counted_and_held_micro_batches_are_the_same_in_every_home(homes, clip):
    def train(homes, micro_batches):
        model = Given()
        optimizer = offload(
            model, homes=homes, lr=1e-2, max_grad_norm=clip, chunk_size=100, micro_batches=micro_batches
        )
        for _ in range(3):
            for number, gradient in enumerate(given(4)):
                held = micro_batches == 1 and number < 3
                with optimizer.accumulate() if held else nullcontext():
                    model(gradient).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return model, optimizer, []

    assert_same(train(homes, 4), train("gpu", 1))


def test_a_gradient_that_came_in_earlier_micro_batches_only_counts():
    """As that of an expert that no token of the last one chooses."""
    model, gradients = Given(), given(3)
    optimizer = OffloadAdamW(model, homes="gpu", max_grad_norm=1e30)
    accumulated(model, optimizer, gradients, use=(True, False))
    optimizer.step()
    sums = [gradients[0].float() + gradients[1].float(), gradients[2].float()]
    first, second = (sums[0] + sums[1]).bfloat16().double(), sums[0].bfloat16().double()
    assert float(optimizer.report.grad_norm) == pytest.approx(float((first.norm() ** 2 + second.norm() ** 2).sqrt()))


@pytest.mark.parametrize(("accumulate_dtype", "most"), [("fp32", 1.2), ("bf16", None)])
@pytest.mark.slow
def test_the_error_of_a_gradient_does_not_grow_with_the_number_of_micro_batches(accumulate_dtype, most):
    torch.manual_seed(0)
    x, target = torch.randn(64 * 32, 96).bfloat16() + 0.5, torch.randn(64 * 32, 96).bfloat16()
    start = nn.Linear(96, 96, bias=False).weight.detach().bfloat16()
    exact = start.double().requires_grad_()
    ((x.double() @ exact.t() - target.double()).square().sum() / x.numel()).backward()
    errors = {}
    for number in (1, 4, 64):
        model = nn.Linear(96, 96, bias=False).bfloat16()
        model.weight.data.copy_(start)
        optimizer = OffloadAdamW(model, homes="gpu", accumulate_dtype=accumulate_dtype)
        for part, (a, b) in enumerate(zip(x.chunk(number), target.chunk(number), strict=True), start=1):
            loss = (model(a) - b).float().square().sum() / x.numel()
            with nullcontext() if part == number else optimizer.accumulate():
                loss.backward()
        errors[number] = float((model.weight.grad.double() - exact.grad).norm() / exact.grad.norm())
    if most is not None:
        assert max(errors.values()) < most * errors[1]
    else:
        assert errors[64] > 2 * errors[1], "or the setting changes nothing"


@pytest.mark.parametrize(("dtype", "micro_batches", "lr", "decay"), [
    (torch.float32, 1, 1e-5, 0.0), (torch.float32, 1, 1e-5, 0.01), (torch.float32, 4, 1e-6, 0.1),
    (torch.bfloat16, 1, 1e-3, 0.01), (torch.bfloat16, 4, 1e-5, 0.01),
])  # fmt: skip
@pytest.mark.slow
def test_no_further_from_fp64_than_torch(dtype, micro_batches, lr, decay, monkeypatch):
    """The table of docs/numerics.md, smaller."""
    monkeypatch.setattr(fp64_error, "SIZE", 4000)
    found = fp64_error.errors(dtype, micro_batches, lr, decay)
    ours, theirs = found["OffloadAdamW"], min(found[name] for name in fp64_error.TORCH)
    assert ours <= 1.01 * theirs
    if decay and dtype is torch.float32:
        assert ours < 0.5 * theirs, "decay is not rounded away"


@pytest.mark.parametrize("order", ["layers", "rows"])
def test_sums_of_units_that_stream_take_the_place_of_those_before(order):
    parameters = [nn.Parameter(torch.zeros(50, 31, dtype=torch.bfloat16)) for _ in range(2)]
    units = [TrainedUnit(nn.Module(), (index,)) for index in range(2)]
    step, parts, places = Step(streamed=frozenset({0, 1})), given(4), []

    def hold(index):
        for gradient in parts[:-1]:
            parameters[index].grad = gradient.clone()
            step.hold(index, parameters[index])
            assert not step.spare.get(gradient.shape), "a first gradient is not there beside the place of its sum"
        places.append(step.sums[index].data_ptr())

    if order == "rows":
        hold(0), hold(1)
    for index, parameter in enumerate(parameters):
        if order == "layers":
            hold(index)
        parameter.grad = parts[-1].clone()
        step.release(index, parameter, units[index])
        in_fp32 = functools.reduce(lambda total, part: total + part.float(), parts[1:], parts[0].float())
        assert torch.equal(parameter.grad, in_fp32.bfloat16())
        if order == "rows" and not index:
            assert not step.spare, "none will come that wants it"
    assert len(set(places)) == (1 if order == "layers" else 2)


def test_what_backward_still_wants_is_not_written_to():
    """A parameter that is added shares its gradient's memory with what goes on to those before it."""

    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.linear = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
            self.linear.weight.data.copy_(torch.randn(8, 8, generator=generator))
            self.added = nn.Parameter(torch.randn(4, 8, generator=generator).bfloat16())

        def forward(self, x):
            return self.linear(x) + self.added.unsqueeze(0)

    x, out = (torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    model = Added()
    model(x).backward(out)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = OffloadAdamW(model, lr=0.0, homes="gpu", update="after-norm")
    with optimizer.accumulate():
        model(x).backward(out)
    model(x).backward(out)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, 2 * once[name]), name
    optimizer.zero_grad()
    optimizer.close()
