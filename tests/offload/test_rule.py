"""An update rule is a seam: another one, which lives here only, runs in every home, is saved, clipped and skipped."""

import pytest
import torch
from small_net import HOMES, Net, assert_same, batches, loss_of

from penstock.offload.behaviour import Behaviour
from penstock.offload.optimizer import OffloadOptimizer
from penstock.offload.placing import find_trained, place
from penstock.plan.layout import Part, StateFormat
from penstock.plan.split import Manner, Profile
from penstock.update.master import join, split
from penstock.update.rule import GO, SCALE, device_rows

BETA, LR = 2, 3


class SignScalars:
    """Nothing but the count of steps advances."""

    def __init__(self, device):
        self._device, self._steps = device, torch.zeros((), dtype=torch.int64, device=device)

    def coefficients(self, groups):
        return device_rows([[1.0, 1.0, g["beta"], g["lr"]] for g in groups], self._device).float()

    def advance(self, groups, applied):
        self._steps = self._steps + applied

    def tensors(self):
        return {"steps": self._steps}

    def load(self, tensors):
        self._steps = tensors["steps"].to(self._device)


class SignDescent:
    """The sign of a moving mean of gradients, times the learning rate: one moment, no second one, no decay."""

    name, num_coefficients, in_stages = "sign descent", 4, False
    formats = {"fp32": StateFormat("fp32", (Part("momentum", "float32"),))}  # noqa: RUF012
    saved_names = {"momentum": "momentum_buffer"}  # noqa: RUF012

    def scalars(self, device):
        return SignScalars(device)

    def update_(self, weight, gradient, state, coefficients, stage="whole"):
        # A copy: torch's stream sanitizer forgets a read of freed memory by its first address only.
        coefficients = coefficients.clone()
        go = coefficients[GO] != 0
        g = gradient.float() * coefficients[SCALE]
        momentum = state["momentum"] * coefficients[BETA] + g * (1 - coefficients[BETA])
        halves = weight.dtype is torch.bfloat16
        master = join(weight, state["remainder"]) if halves else weight
        moved = master - coefficients[LR] * momentum.sign()
        new, remainder = split(moved) if halves else (moved, None)
        weight.copy_(torch.where(go, new, weight))
        state["momentum"].copy_(torch.where(go, momentum, state["momentum"]))
        if halves:
            state["remainder"].copy_(torch.where(go, remainder, state["remainder"]))

    def host_call(self, weight, gradient, state, coefficients, stage="whole"):
        return None


def train(homes, device="cpu", clip=0.5, bad=None, resume=None, steps=5):
    model, rule = Net().to(device), SignDescent()
    placement = place(
        find_trained(model, None, None), rule.formats["fp32"], homes, Profile(), Manner(in_backward=not clip), 100
    )
    defaults = {"lr": 1e-3, "beta": 0.9}
    optimizer = OffloadOptimizer(model, rule, defaults, Behaviour(max_grad_norm=clip), homes=placement)
    if resume:
        optimizer.load_state_dict(resume)
    for number, ids in enumerate(batches(steps, device)):
        loss = loss_of(model, ids)
        (loss * float("nan") if number == bad else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model, optimizer, []


def by_hand(steps=5, clip=0.5):
    """Plain masters and moments, one parameter at a time."""
    model = Net()
    masters = {p: p.detach().float() for p in model.parameters() if p.requires_grad}
    momenta = {p: torch.zeros_like(master) for p, master in masters.items()}
    for ids in batches(steps):
        loss_of(model, ids).backward()
        trained = [p for p in masters if p.grad is not None]
        norm = torch.stack([p.grad.double().square().sum() for p in trained]).sum().sqrt()
        scale = (clip / (norm + 1e-6)).clamp(max=1.0).float()
        for p in trained:
            momenta[p] = momenta[p] * 0.9 + p.grad.float() * scale * (1 - torch.tensor(0.9))
            masters[p] = masters[p] - torch.tensor(1e-3) * momenta[p].sign()
            p.data.copy_(split(masters[p])[0])
            p.grad = None
    return model


@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_homes_change_no_bit_of_another_rule(homes, clip, device):
    assert_same(train("gpu", device, clip), train(homes, device, clip))


def test_it_is_the_rule_that_it_says():
    model, *_ = train(HOMES[-1])
    for p, q in zip(model.parameters(), by_hand().parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing(homes):
    (before, _, _), (after, optimizer, _) = train(homes, steps=2), train(homes, bad=2, steps=3)
    assert int(optimizer.scalar_state()["steps"]) == 2
    for p, q in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(p, q)


def test_its_state_is_saved_under_its_own_names_and_taken_back():
    _, optimizer, _ = train(HOMES[-1])
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"step", "master", "momentum_buffer"}
    _, other, _ = train("host", resume=saved, steps=0)
    for a, b in zip(saved["state"].values(), other.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
