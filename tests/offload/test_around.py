"""What others do with model and optimizer between steps: save and load weights, copy, write in place, close."""

import copy
import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from small_net import HOMES, Net, assert_same, batches, loss_of, offload, plain_run, run
from torch import nn

from penstock.errors import RecipeError
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.dropped import wait_for_dropped
from penstock.offload.stream import StreamHome
from penstock.update.host_threads import HostThreads
from penstock.update.master import split

ONE_FAST = [*(pytest.param(homes, marks=pytest.mark.slow) for homes in HOMES[:-1]), HOMES[-1]]


@pytest.fixture
def slow(monkeypatch):
    """Updates that are still to be made when `step` returns, in homes that have threads."""
    update, begin = StreamHome._update_now, HostThreads.begin

    def slowly(function):
        def wrapped(*args):
            time.sleep(0.005)
            return function(*args)

        return wrapped

    monkeypatch.setattr(StreamHome, "_update_now", slowly(update))
    monkeypatch.setattr(HostThreads, "begin", slowly(begin))


def stepped(homes, device="cpu", **options):
    """A model and its optimizer right after `step`, which nobody has waited for."""
    model = Net().to(device)
    optimizer = offload(model, lr=3e-3, homes=homes, chunk_size=100, **options)
    loss_of(model, batches(1, device)[0]).backward()
    optimizer.step()
    return model, optimizer


def masters(optimizer):
    return [entry["master"] for entry in optimizer.state_dict()["state"].values()]


def weights(model):
    return [p.detach().cpu().float() for p in model.parameters() if p.requires_grad]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("homes", HOMES)
def test_weights_loaded_right_after_a_step_are_not_written_over(homes, device, slow):
    model, optimizer = stepped(homes, device)
    fresh = Net(seed=5).to(device)
    model.load_state_dict(fresh.state_dict())
    optimizer.synchronize()
    assert same(weights(model), weights(fresh))
    assert same(masters(optimizer), weights(fresh))


@pytest.mark.parametrize("homes", HOMES)
def test_a_part_is_saved_and_loaded_like_the_whole(homes, device, slow):
    model, optimizer = stepped(homes, device)
    part = {name: tensor.clone() for name, tensor in model.layers[1][0].state_dict().items()}
    optimizer.synchronize()
    assert same(part.values(), model.layers[1][0].state_dict().values()), "saved after its update"
    before = masters(optimizer)
    fresh = Net(seed=5).to(device)
    model.layers[1].load_state_dict(fresh.layers[1].state_dict())
    loaded = {id(p) for p in model.layers[1].parameters()}
    for p, q, old, new in zip(
        optimizer._parameters, [p for p in fresh.parameters() if p.requires_grad], before, masters(optimizer),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(new, q.detach().cpu().float() if id(p) in loaded else old)
    loss_of(model, batches(1, device)[0]).backward()
    optimizer.step()
    optimizer.synchronize()
    # Rounded half away from zero, as weights are: `to(bfloat16)` rounds half to even, and ties do occur.
    assert same([split(master)[0] for master in masters(optimizer)], [weight.bfloat16() for weight in weights(model)])


@pytest.mark.parametrize("homes", ONE_FAST)
def test_of_a_few_keys_only_theirs_are_new_masters(homes, device):
    model, optimizer, _ = run(homes=homes, chunk_size=100, device=device)
    before, names = masters(optimizer), [name for name, p in model.named_parameters() if p.requires_grad]
    chosen = {"layers.1.0.bias": torch.full((41,), 0.3), "norm.weight": torch.full((24,), 0.7)}
    model.load_state_dict({name: tensor.to(device).bfloat16() for name, tensor in chosen.items()}, strict=False)
    for name, old, new in zip(names, before, masters(optimizer), strict=True):
        assert torch.equal(new, chosen[name].bfloat16().float() if name in chosen else old), name


def test_a_key_that_is_renamed_on_loading_makes_new_masters_too():
    """By a hook of the model's that comes after the optimizer's."""
    model, optimizer, _ = run(homes="host", chunk_size=100)
    before, index = masters(optimizer), [id(p) for p in optimizer._parameters].index(id(model.norm.weight))

    def rename(module, state_dict, prefix, *_):
        if prefix + "gamma" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "gamma")

    model.norm.register_load_state_dict_pre_hook(rename)
    model.load_state_dict({"norm.gamma": torch.full((24,), 0.5).bfloat16()}, strict=False)
    before[index] = torch.full((24,), 0.5)
    assert same(masters(optimizer), before)


@pytest.mark.parametrize("given", [False, True], ids=["all", "params"])
def test_frozen_layers_may_be_on_another_device(given, device):
    model = nn.Sequential(nn.Linear(4, 4, device="meta").requires_grad_(False), nn.Linear(4, 1, device=device))
    optimizer = OffloadAdamW(model, lr=0.1, params=[{"params": list(model.parameters())}] if given else None)
    before = model[1].weight.detach().clone()
    model[1](torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("homes", HOMES)
def test_a_default_device_changes_nothing(homes, device):
    """Of a model that was made before. Where torch puts what names no device is nobody's business."""
    model, data = Net().to(device), batches(3, device)
    elsewhere = "cuda" if device == "cuda" else "meta"
    with torch.device(elsewhere):
        ours = run(model=model, data=data, homes=homes, chunk_size=100)
        ours[1].load_state_dict(ours[1].state_dict())
        ours[1].synchronize()
    assert_same(run(data=data, homes=homes, chunk_size=100, device=device), ours)


def test_a_state_of_torch_is_loaded_with_a_default_device_too():
    model = Net()
    torchs = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_of(model, batches(1)[0]).backward()
    torchs.step()
    with torch.device("meta"):
        optimizer = OffloadAdamW(model, params=[{"params": list(model.parameters())}])
        optimizer.load_state_dict(torchs.state_dict())
    assert int(optimizer.scalar_state()["steps"]) == 1


def test_a_copy_of_the_model_is_nobodys_business():
    model, optimizer, _ = run(homes={"gpu": 0.5, "host": 0.5}, chunk_size=100)
    twin, before = copy.deepcopy(model), masters(optimizer)
    twin.load_state_dict(Net(seed=5).state_dict())
    assert same(masters(optimizer), before), "what the masters have beyond the weights is still there"
    assert any(not torch.equal(m, w) for m, w in zip(before, weights(model), strict=True))
    optimizer.close()
    twin.load_state_dict(Net(seed=6).state_dict())
    twin(batches(1)[0])


@pytest.mark.parametrize("homes", HOMES)
def test_weights_written_in_place_are_kept_once_told(homes, device):
    model, optimizer, _ = run(homes=homes, chunk_size=100, device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.05, 0.05)
    optimizer.weights_were_set()
    wanted = weights(model)
    assert same(masters(optimizer), wanted)
    loss = loss_of(model, batches(1, device)[0]) * float("nan")  # a step that changes nothing
    loss.backward()
    optimizer.step()
    optimizer.synchronize()
    assert same(weights(model), wanted)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("homes", ONE_FAST)
def test_no_gradient_is_left_after_a_step(homes, set_to_none, device, slow):
    """So that a loop that forgets to zero them, or zeroes them in place, sees no home in its bits."""
    model = Net().to(device)
    optimizer = offload(model, lr=3e-3, max_grad_norm=0.5, homes=homes, chunk_size=100)
    for ids in batches(3, device):
        loss_of(model, ids).backward()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        model.zero_grad(set_to_none=set_to_none)
    optimizer.synchronize()
    assert_same((model, optimizer, None), plain_run(steps=3, device=device))


def test_one_update_that_fails_does_not_hide_the_others(monkeypatch, slow):
    begin, calls = HostThreads.begin, iter(range(1000))
    monkeypatch.setattr(HostThreads, "begin", lambda *args: 1 / 0 if next(calls) == 1 else begin(*args))
    model, optimizer = stepped("host")
    with pytest.raises(ZeroDivisionError):
        optimizer.synchronize()
    optimizer.synchronize()
    before = weights(model)
    time.sleep(0.3)
    assert same(weights(model), before), "all were waited for"
    optimizer.close()


@pytest.mark.parametrize("homes", HOMES)
def test_closing_twice_is_fine_and_leaves_no_thread(homes):
    wait_for_dropped()  # the thread for those that nobody closes
    others = set(threading.enumerate())
    model, optimizer = stepped(homes)
    optimizer.close()
    after = weights(model)
    optimizer.close()
    assert same(weights(model), after)
    assert set(threading.enumerate()) <= others


def test_a_state_of_other_parameters_is_refused_before_anything_is_taken():
    _, optimizer, _ = run()
    saved = optimizer.state_dict()
    groups = copy.deepcopy(saved["param_groups"])
    groups[0]["lr"] = 9.0
    other = OffloadAdamW(nn.Linear(3, 3))
    with pytest.raises(RecipeError, match="of other parameters"):
        other.load_state_dict({**saved, "param_groups": groups})
    assert other.param_groups[0]["lr"] == 1e-5


@pytest.mark.parametrize("homes", ONE_FAST, ids=str)
def test_a_dropped_optimizer_gives_everything_back_and_another_takes_its_place(homes):
    """As when a cell of a notebook runs again."""
    model, optimizer, _ = run(homes=homes, chunk_size=100)
    threads, dropped = threading.active_count(), weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    again = OffloadAdamW(model, homes="gpu")
    assert threading.active_count() <= threads
    assert len(model.layers[0]._forward_pre_hooks) == 1
    for ids in batches(3):
        loss_of(model, ids).backward()
        again.step()
        again.zero_grad()
    assert int(again.scalar_state()["steps"]) == 3


@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_a_second_thread_waits_for_the_update_too(homes, monkeypatch):
    update, begin = StreamHome._update_now, HostThreads.begin
    monkeypatch.setattr(StreamHome, "_update_now", lambda *args: (time.sleep(0.1), update(*args))[1])
    monkeypatch.setattr(HostThreads, "begin", lambda *args: (time.sleep(0.1), begin(*args))[1])
    torch.manual_seed(0)
    model, x = nn.Linear(64, 1), torch.randn(4, 64)
    optimizer = offload(model, homes=homes, lr=0.1, chunk_size=32)
    model(x).square().mean().backward()
    optimizer.step()
    first = threading.Thread(target=lambda: model(x))
    first.start()
    time.sleep(0.02)
    with torch.no_grad():
        early = model(x).clone()
        first.join()
        optimizer.synchronize()
        assert torch.equal(early, model(x))


@pytest.mark.parametrize("homes", ONE_FAST, ids=str)
def test_a_model_that_holds_its_optimizer_goes_with_it(homes):
    model, optimizer, _ = run(homes=homes, chunk_size=100)
    model.optimizer = optimizer
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.embed.weight)
    del model, optimizer
    gc.collect()
    wait_for_dropped()
    assert [reference() for reference in gone] == [None, None, None]


def test_an_optimizer_may_be_dropped_in_the_midst_of_anothers_step():
    """Wherever Python looks for what nobody holds any more: a destructor that waited there would wait for ever."""
    model, thresholds = Net(), gc.get_threshold()
    optimizer = offload(model, homes=HOMES[-1], chunk_size=100)
    gc.disable()
    for _ in range(20):
        dropped = offload(Net(), homes=HOMES[-1], chunk_size=100)
        dropped.itself = dropped  # so that counting references does not find it
    del dropped
    gc.set_threshold(1, 1, 1)
    gc.enable()
    try:
        for ids in batches(3):
            loss_of(model, ids).backward()
            optimizer.step()
        optimizer.close()
    finally:
        gc.set_threshold(*thresholds)


DROPPED_LAST = """
import sys, torch
from penstock.offload import dropped

class Optimizer: pass
class Home:
    def close(self):
        product = torch.ones(1000, 1000)
        for _ in range(40):
            product = product @ product

dropped.wait_for_dropped()
optimizer = Optimizer()
dropped.when_dropped(optimizer, [Home()], [])
del optimizer
sys.exit(3)
"""


@pytest.mark.slow
def test_a_program_that_drops_its_optimizer_last_ends_as_it_would():
    """Its thread is in the midst of a product, and would be ended there: by SIGABRT, with all that was to be told."""
    ended = subprocess.run(
        [sys.executable, "-c", DROPPED_LAST], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, "")


def test_two_optimizers_of_the_same_parameters_are_refused():
    model = Net()
    first = OffloadAdamW(model, homes="gpu")
    with pytest.raises(RecipeError, match=r"another OffloadAdamW updates these parameters\n.*close\(\)"):
        OffloadAdamW(model, homes="gpu")
    first.close()
    OffloadAdamW(model, homes="gpu").close()


def test_an_optimizer_that_was_dropped_with_what_refers_to_itself_is_gone():
    model, trainer = Net(), SimpleNamespace()
    trainer.itself, trainer.optimizer = trainer, OffloadAdamW(model, homes="gpu")
    gc.disable()
    try:
        del trainer
        OffloadAdamW(model, homes="gpu").close()
    finally:
        gc.enable()


@pytest.mark.parametrize("units", [["layers"], [nn.Linear(2, 2)]])
def test_units_that_the_model_does_not_have_are_refused(units):
    with pytest.raises(RecipeError, match=r"^units: not all of them are modules of the model\n.*units=model\.layers"):
        OffloadAdamW(Net(), homes="gpu", units=units)


def test_a_model_is_saved_whole_and_loaded_without_its_optimizer(tmp_path):
    model, optimizer, _ = run(homes="host", chunk_size=100)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert same(weights(loaded), weights(model))
    loss_of(loaded, batches(1)[0]).backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.close()
