"""Loops that would train quietly in a wrong way are refused, and those that only look so are not."""

import copy
import io
import math

import pytest
import torch
from small_net import HOMES, Net, assert_same, batches, loss_of, run
from torch import nn

from penstock.errors import RecipeError
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.misuse import format_named
from penstock.offload.placing import placement_for
from penstock.plan.layout import FORMATS


@pytest.mark.parametrize("refuse", [lambda: format_named("fp8", FORMATS), lambda: OffloadAdamW(Net(), states="fp8")])
def test_an_unknown_format_is_refused_with_the_known_ones(refuse):
    with pytest.raises(RecipeError, match=r"states = 'fp8'.*\n.*fp32, bf16, int8"):
        refuse()


def test_clipping_in_backward_is_refused():
    with pytest.raises(RecipeError, match="max_grad_norm"):
        OffloadAdamW(Net(), max_grad_norm=1.0, update="in-backward")


@pytest.mark.parametrize("update", ["after-norm", "in-backward"])
def test_a_second_backward_without_accumulate_is_refused(update):
    model = Net()
    optimizer = OffloadAdamW(model, max_grad_norm=0.0, update=update)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RecipeError, match="second backward"):
        loss_of(model, batches(1)[0]).backward()
    optimizer.close()


def test_gradients_changed_after_backward_are_refused(device):
    model = Net().to(device)
    optimizer = OffloadAdamW(model)
    weights = [p.detach().clone() for p in model.parameters()]
    loss_of(model, batches(1, device)[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RecipeError, match="gradients were changed between backward and step"):
        optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)), "before any update"


def test_gradients_changed_in_a_later_step_are_refused_a_step_after(device):
    model = Net().to(device)
    optimizer = OffloadAdamW(model)
    for number, ids in enumerate(batches(2, device)):
        loss_of(model, ids).backward()
        if number:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.mul_(1e-3)  # which raises no version
        optimizer.step()
    with pytest.raises(RecipeError, match="gradients were changed between backward and step"):
        optimizer.synchronize()  # seen on the device; the host hears of it before the next step


@pytest.mark.parametrize("homes", HOMES, ids=str)
@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_is_refused_in_its_first_step(homes, clip, unscales):
    model = Net(torch.float32)
    optimizer = OffloadAdamW(model, homes=homes, max_grad_norm=clip)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    if unscales and clip:  # in-backward leaves nothing to unscale
        scaler.unscale_(optimizer)
    with pytest.raises(RecipeError, match="a GradScaler has scaled the loss"):
        scaler.step(optimizer)
    optimizer.close()


def test_a_step_in_backward_cannot_be_skipped():
    model = Net()
    optimizer = OffloadAdamW(model, max_grad_norm=0.0)
    optimizer.zero_grad()  # before a backward, as many loops do
    with optimizer.accumulate():
        loss_of(model, batches(1)[0]).backward()
    optimizer.zero_grad()  # nothing is updated yet
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RecipeError, match="updated already, so that it cannot be skipped"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert int(optimizer.scalar_state()["steps"]) == 1


def test_the_older_way_to_shard_is_refused(ranks):
    (said,) = ranks("sharded_the_older_way", 1)
    assert "sharded by FullyShardedDataParallel" in said


def test_gradients_that_were_only_measured_are_taken(device):
    def measure(number, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))

    assert_same(run(device=device, before_step=measure), run(device=device))


def test_weights_used_without_calling_their_module_are_refused():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2))
            self.hidden = nn.Linear(8, 8)

        def forward(self, x):
            for a, b in self.layers:
                x = b(a(x).relu())
            return nn.functional.linear(x, self.hidden.weight)

    model = Pairs()
    optimizer = OffloadAdamW(model, homes="host")
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RecipeError, match="weights of Linear are used without calling"):
        model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("change", [lambda p: p.grad * 0, lambda p: None])
def test_a_gradient_that_was_replaced_or_dropped_is_refused(change):
    model = Net()
    optimizer = OffloadAdamW(model)
    loss_of(model, batches(1)[0]).backward()
    model.norm.weight.grad = change(model.norm.weight)
    with pytest.raises(RecipeError, match="replaced or dropped between backward and step"):
        optimizer.step()


def test_a_gradient_of_another_type_is_refused():
    model = Net()
    optimizer = OffloadAdamW(model)
    model.norm.weight.grad_dtype = torch.float32
    with pytest.raises(RecipeError, match=r"a gradient is torch\.float32, its parameter torch\.bfloat16"):
        loss_of(model, batches(1)[0]).backward()
    optimizer.close()


def test_a_parameter_that_was_frozen_and_is_not_any_more_is_refused():
    model = Net()
    optimizer = OffloadAdamW(model, params=[{"params": list(model.parameters())}])
    model.frozen.requires_grad_(True)
    (loss_of(model, batches(1)[0]) + model.frozen.sum()).backward()
    with pytest.raises(RecipeError, match="was frozen has a gradient"):
        optimizer.step()


@pytest.mark.parametrize("given", [False, True], ids=["all", "params"])
def test_a_model_without_anything_to_train_is_refused(given):
    model = Net().requires_grad_(False)
    params = [{"params": list(model.parameters())}] if given else None
    with pytest.raises(RecipeError, match=r"no parameter is trainable.*\n.*requires_grad_"):
        OffloadAdamW(model, params=params)


def test_a_generator_of_parameters_is_no_model():
    with pytest.raises(RecipeError, match=r"the first argument is generator, not a model\n.*params="):
        OffloadAdamW(Net().parameters())


@pytest.mark.parametrize("homes", ["disk", {"gpu": 0.2, "cpu": 0.8}])
def test_a_home_that_does_not_exist_is_refused(homes):
    with pytest.raises(RecipeError, match=r"there is no home '(disk|cpu)'\n.*gpu, stream, host"):
        OffloadAdamW(Net(), homes=homes)


@pytest.mark.parametrize("homes", [{"gpu": 0.5}, {"gpu": 0.5, "host": 0.6}, {"gpu": 1.5, "host": -0.5}])
def test_shares_that_do_not_add_up_are_refused(homes):
    with pytest.raises(RecipeError, match="shares must add up to 1"):
        OffloadAdamW(Net(), homes=homes)


def test_parameters_that_come_later_are_refused():
    model = Net()
    optimizer = OffloadAdamW(model, homes="gpu")
    with pytest.raises(RecipeError, match=r"parameters cannot be added.*\n.*close\(\)"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_an_optimizer_that_was_refused_holds_no_parameters():
    """As in a notebook, where the error keeps what it was raised in alive."""
    model = Net()
    with pytest.raises(RecipeError, match="no such format") as kept:
        OffloadAdamW(model, states="fp8")
    OffloadAdamW(model, homes="gpu").close()
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("other", [{"states": "bf16"}, {"params": "reversed"}, {"params": "some"}])
def test_a_placement_of_something_else_is_refused(other):
    model = Net()
    own = [p for p in model.parameters() if p.requires_grad]
    chosen = {"reversed": own[::-1], "some": own[:-1]}
    if "params" in other:
        other = {"params": [{"params": chosen[other["params"]]}]}
    placement = placement_for(model, "gpu", **other)
    with pytest.raises(RecipeError, match=r"made for other parameters or another format\n.*params="):
        OffloadAdamW(model, homes=placement)


@pytest.mark.parametrize("given", [False, True], ids=["all", "params"])
@pytest.mark.parametrize("norm", [0.0, 1.0])
def test_a_layer_that_is_unfrozen_later_is_refused(given, norm):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    params = [{"params": list(model[1].parameters())}] if given else None
    optimizer = OffloadAdamW(model, max_grad_norm=norm, params=params)
    model[0].bias.requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RecipeError, match="was frozen has a gradient"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("norm", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_that_is_converted_later_is_refused(dtype, norm):
    model = nn.Linear(512, 512)
    optimizer = OffloadAdamW(model, max_grad_norm=norm)
    before = model.to(dtype).weight.clone()
    with pytest.raises(
        RecipeError, match=r"was torch.float32 on cpu is torch.\w+ on cpu now\n.*then make the optimizer"
    ):
        model(torch.randn(8, 512, dtype=dtype)).square().mean().backward()
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize(
    "values",
    [
        {"lr": -0.01}, {"lr": math.nan}, {"lr": "a"}, {"eps": -1}, {"weight_decay": -1}, {"betas": (1.0, 1.0)},
        {"betas": (0.9, 1.5)}, {"betas": (0.9,)}, {"betas": 0.9}, {"max_grad_norm": -1}, {"max_grad_norm": math.nan},
        {"micro_batches": 0}, {"micro_batches": -1}, {"micro_batches": 1.5}, {"update": "in_backward"},
        {"accumulate_dtype": "float32"}, {"accumulate_dtype": torch.float32},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_would_train_in_a_wrong_way_are_refused(values):
    (name,) = values
    model = nn.Linear(2, 2)
    with pytest.raises(RecipeError, match=rf"^{name} = .*: out of range\n"):
        OffloadAdamW(model, **values)
    if name not in ("max_grad_norm", "micro_batches", "update", "accumulate_dtype"):
        with pytest.raises(RecipeError, match="out of range"):
            OffloadAdamW(model, params=[{"params": list(model.parameters()), **values}])
    OffloadAdamW(model, lr=0.0, eps=0.0, weight_decay=0, betas=[0, 0.5], max_grad_norm=math.inf).close()


def test_a_closed_optimizer_says_so():
    model = nn.Linear(2, 2)
    optimizer = OffloadAdamW(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.close()
    optimizer.close()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RecipeError, match="the optimizer is closed"):
        optimizer.step()
    with pytest.raises(RecipeError, match="the optimizer is closed"):
        optimizer.state_dict()


@pytest.mark.parametrize("state", [None, {}, "sgd"])
def test_the_state_of_another_kind_of_optimizer_is_refused(state):
    model = nn.Linear(2, 2)
    if state == "sgd":
        sgd = torch.optim.SGD(model.parameters(), momentum=0.9, lr=1e-3)
        model(torch.ones(1, 2)).sum().backward()
        sgd.step()
        state = sgd.state_dict()
        sgd.zero_grad()
    optimizer = OffloadAdamW(model)
    with pytest.raises(RecipeError, match="not the state of an AdamW"):
        optimizer.load_state_dict(state)
    optimizer.close()


def test_an_optimizer_is_not_pickled_without_its_state():
    optimizer = OffloadAdamW(nn.Linear(2, 2))
    with pytest.raises(RecipeError, match=r"would lose its state\n.*state_dict\(\)"):
        torch.save({"optimizer": optimizer}, io.BytesIO())


def test_a_copy_of_an_optimizer_says_that_it_is_none():
    model = nn.Linear(2, 2)
    model.optimizer = OffloadAdamW(model)
    twin = copy.deepcopy(copy.deepcopy(model))
    with pytest.raises(RecipeError, match=r"a copy of an optimizer is none\n.*for the copied model"):
        twin.optimizer.zero_grad()
    twin(torch.ones(1, 2)).sum().backward()
    OffloadAdamW(twin).step()
