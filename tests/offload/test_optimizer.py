"""The contracts of the numbers: homes, chunks, update times and threads change no bit in any format; AdamW is AdamW."""

import copy
import re
import threading
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_net import HOMES, Net, assert_same, batches, loss_of, offload, plain_run, run
from torch import nn

from penstock.offload.adamw import OffloadAdamW
from penstock.plan.layout import FORMATS
from penstock.update.formats import view_state
from penstock.update.host_threads import HostThreads
from penstock.update.master import round_to_bf16_

all_formats = pytest.mark.parametrize("states", FORMATS)


@all_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("homes", HOMES[1:])
def test_homes_give_the_same_bits(homes, clip, dtype, states, device):
    options = {"dtype": dtype, "max_grad_norm": clip, "states": states, "device": device}
    plain = plain_run(update="after-norm", **options)
    other = run(homes=homes, chunk_size=100, **options)
    assert_same(plain, other)
    assert plain[2] == other[2]


@all_formats
@settings(max_examples=15, deadline=None)
@given(
    chunk_size=st.integers(1, 2000), homes=st.sampled_from(HOMES), overlap=st.booleans(), cores=st.floats(0.1, 1.0),
    part=st.sampled_from([256, 512, 1 << 15]),
)  # fmt: skip
@example(chunk_size=2000, homes="host", overlap=True, cores=1.0, part=256)
@pytest.mark.slow
def test_chunking_overlap_and_threads_change_no_bit(states, chunk_size, homes, overlap, cores, part):
    plain = run(steps=3, states=states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.update.host_threads.PART", part)  # elements that one thread takes at a time
        options = {"homes": homes, "chunk_size": chunk_size, "overlap": overlap, "cpu_adam_cores": cores}
        assert_same(plain, run(steps=3, states=states, **options))


def reference(model, data, max_grad_norm, lr=3e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for ids in data:
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        if max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    return model


@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.slow
def test_a_hundred_steps_against_torch_and_fp64(clip):
    data = batches(100)
    start = Net(torch.float32)
    ours, *_ = run(dtype=torch.float32, model=copy.deepcopy(start), data=data, max_grad_norm=clip)
    theirs = reference(copy.deepcopy(start), data, clip)
    exact = reference(copy.deepcopy(start).double(), data, clip)
    flat = [torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (start, ours, theirs, exact)]
    begin, ours, theirs, exact = flat
    assert (ours - theirs).abs().max() <= 1e-4 * (exact - begin).abs().max()
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


@pytest.mark.parametrize("homes", HOMES)
def test_the_working_weight_is_the_rounded_master(homes):
    model, optimizer, _ = run(homes=homes, chunk_size=100)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p, entry in zip(parameters, optimizer.state_dict()["state"].values(), strict=True):
        bits = entry["master"].view(torch.int32)
        rounded = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        assert torch.equal(p.detach().cpu(), rounded)


@all_formats
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("homes", HOMES)
def test_a_gradient_that_is_not_finite_changes_nothing(homes, bad, states, device):
    data = batches(4, device)

    def poison(number, model, optimizer):
        if number == 2:
            optimizer._norm._sums[0] = bad  # what a bad gradient leaves

    def check(number, model, optimizer):
        poison(number, model, optimizer)

    model, options = Net().to(device), {"states": states, "device": device}
    skipped = run(model=model, data=data, homes=homes, chunk_size=100, before_step=check, **options)
    assert int(skipped[1].state_dict()["steps"]) == 3
    assert_same(skipped, run(data=[data[0], data[1], data[3]], homes="gpu", **options))


@pytest.mark.parametrize("update", ["after-norm", "in-backward"])
@pytest.mark.parametrize("homes", HOMES)
def test_a_loss_that_is_not_finite_skips_the_step(homes, update, device):
    model = Net().to(device)
    optimizer = offload(model, lr=1e-2, max_grad_norm=0.0, update=update, homes=homes, chunk_size=100)
    before = copy.deepcopy(model.state_dict())
    (loss_of(model, batches(1, device)[0]) * float("nan")).backward()
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert int(optimizer.state_dict()["steps"]) == 0
    assert not bool(optimizer.report.applied)


@pytest.mark.parametrize("update", ["after-norm", "in-backward"])
@pytest.mark.parametrize("homes", HOMES)
def test_accumulated_micro_batches_equal_one_batch(homes, update):
    data = batches(5, rows=8)
    options = {"max_grad_norm": 0.0, "update": update, "homes": homes, "chunk_size": 64}
    whole, *_ = run(dtype=torch.float32, data=data, **options)
    model = Net(torch.float32)
    optimizer = offload(model, lr=3e-3, **options)
    for ids in data:
        *first, last = ids.split(2)
        for part in first:
            with optimizer.accumulate():
                (loss_of(model, part) / 4).backward()
        (loss_of(model, last) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    for p, q in zip(whole.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_without_the_remainder_a_small_learning_rate_moves_nothing():
    """The negative control: rounding the master away each step stalls the weights; keeping it does not."""
    model, data = Net(), batches(30)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = OffloadAdamW(model, lr=1e-5, weight_decay=0.0)
    for ids in data:
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.synchronize()
        for home, chunks in optimizer._housing.homes:
            for chunk in chunks:
                view_state(chunk, home.state(chunk))["remainder"].zero_()
        optimizer.zero_grad()
    large = [(p, q) for p, q in zip(model.parameters(), start, strict=True) if p.requires_grad]
    moved = sum(int(((p != q) & (q.abs() > 0.1)).sum()) for p, q in large)
    assert moved == 0
    kept, *_ = run(data=data, lr=1e-5, weight_decay=0.0, max_grad_norm=1.0)
    assert sum(int((p != q).sum()) for p, q in zip(kept.parameters(), start, strict=True)) > 100


@all_formats
@pytest.mark.parametrize("homes", HOMES)
def test_state_moves_between_homes_and_chunkings_to_the_bit(homes, states, device):
    data = batches(6, device)
    straight = run(data=data, device=device, states=states)
    _, optimizer, _ = run(data=data[:3], homes=homes, chunk_size=100, device=device, states=states)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    other = Net(seed=9).to(device)
    options = {"max_grad_norm": 0.5, "homes": {"host": 0.5, "stream": 0.5}, "chunk_size": 333, "states": states}
    resumed = offload(other, lr=1.0, **options)
    resumed.load_state_dict(saved)
    for ids in data[3:]:
        loss_of(other, ids).backward()
        resumed.step()
        resumed.zero_grad()
    resumed.synchronize()
    other.unused.data.copy_(straight[0].unused)
    assert_same(straight, (other, resumed, None))


def test_fp32_weights_keep_their_precision_in_the_master():
    start = Net(torch.float32)
    model = copy.deepcopy(start)
    remainders = round_to_bf16_(model.parameters())
    optimizer = offload(model, homes="host", chunk_size=50)
    optimizer.take_remainders(remainders)
    assert model.embed.weight.dtype is torch.bfloat16
    masters = [entry["master"] for entry in optimizer.state_dict()["state"].values()]
    trained = [p.detach() for p in start.parameters() if p.requires_grad]
    assert all(torch.equal(p, m) for p, m in zip(trained, masters, strict=True))


def test_betas_that_a_schedule_changes_count_as_in_torch():
    """OneCycleLR moves them in every step: the correction is by the beta of the step, to the power of their number."""
    data, results = batches(20), []
    for make in (
        lambda model: OffloadAdamW(model, lr=3e-3, weight_decay=0.0, max_grad_norm=1e30),
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0),
    ):
        model = Net(torch.float32)
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
        for ids in data:
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule.last_epoch < 19:
                schedule.step()
        model.state_dict()
        results.append(model)
    for p, q in zip(*(model.parameters() for model in results), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_resumed_schedule_of_betas_ends_with_the_same_bits():
    def train(resumed):
        model = Net(torch.float32)
        optimizer = OffloadAdamW(model, lr=3e-3)
        for step, ids in enumerate(batches(8)):
            for group in optimizer.param_groups:
                group["betas"] = (0.95 - step / 50, 0.999 - step / 1000)
            if step == 4 and resumed:
                saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
                optimizer.close()
                model = Net(torch.float32, seed=3)
                model.load_state_dict(weights)
                optimizer = OffloadAdamW(model, lr=1e-5)
                optimizer.load_state_dict(saved)
            loss_of(model, ids).backward()
            optimizer.step()
        optimizer.synchronize()
        return model, optimizer, []

    assert_same(train(False), train(True))


def test_parameter_groups_and_schedulers_reach_the_update():
    data = batches(5)
    model, twin = Net(torch.float32), Net(torch.float32)

    def groups(m):
        decayed = [m.embed.weight, *(p for p in m.layers.parameters() if p.ndim == 2)]
        ids = {id(p) for p in decayed}
        rest = [p for p in m.parameters() if p.requires_grad and id(p) not in ids]
        return [{"params": decayed, "weight_decay": 0.3, "lr": 1e-2}, {"params": rest, "betas": (0.5, 0.9)}]

    ours = OffloadAdamW(model, lr=3e-3, params=groups(model), weight_decay=0.0, max_grad_norm=0.0)
    theirs = torch.optim.AdamW(groups(twin), lr=3e-3, weight_decay=0.0)
    for optimizer, net in ((ours, model), (theirs, twin)):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
        for ids in data:
            loss_of(net, ids).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    ours.synchronize()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_a_learning_rate_set_before_step_is_the_one_that_counts():
    """As in torch: whoever sets it between backward and step gets it."""
    data = batches(3)
    model, twin = Net(torch.float32), Net(torch.float32)
    ours = OffloadAdamW(model, lr=1.0, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1.0, weight_decay=0.01)
    for number, ids in enumerate(data):
        for optimizer, net in ((ours, model), (theirs, twin)):
            loss_of(net, ids).backward()
            if optimizer is theirs:
                nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            optimizer.param_groups[0]["lr"] = 1e-3 * (number + 1)
            optimizer.step()
            optimizer.zero_grad()
    ours.synchronize()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_model_state_dict_waits_for_the_updates():
    a, b = Net(), Net()
    for model, homes in ((a, "gpu"), (b, "host")):
        optimizer = offload(model, lr=1e-2, homes=homes, chunk_size=16)
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
    saved_a, saved_b = a.state_dict(), b.state_dict()
    assert all(torch.equal(saved_a[k], saved_b[k]) for k in saved_a)


class HeadFirst(Net):
    """The same, but the head has the tied weight first, and the embedding, which is called first, has it too."""

    def __init__(self):
        super().__init__()
        embedding = self.embed
        del self.embed
        self.embed = embedding


@pytest.mark.parametrize("homes", ["host", "stream"])
def test_whoever_has_a_tied_weight_waits_for_its_update(monkeypatch, homes):
    """In whatever order they were registered, and are called."""

    def read(homes):
        model, found = HeadFirst(), []
        optimizer = offload(model, lr=1e-2, homes=homes)
        model.embed.register_forward_pre_hook(lambda module, _: found.append(module.weight.clone()))
        for ids in batches(3):
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return found

    expected, begin = read("gpu"), HostThreads.begin
    monkeypatch.setattr(HostThreads, "begin", lambda *args: time.sleep(0.05) or begin(*args))
    for ours, theirs in zip(read(homes), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_that_comes_in_accumulate_only_counts():
    model, twin = Net(torch.float32), Net(torch.float32)
    ours, theirs = OffloadAdamW(model, lr=1e-2, max_grad_norm=0.5), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    with ours.accumulate():
        model.unused.sum().backward()
    loss_of(model, batches(1)[0]).backward()
    ours.step()
    ours.synchronize()
    twin.unused.sum().backward()
    loss_of(twin, batches(1)[0]).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    theirs.step()
    assert not torch.equal(model.unused, torch.ones(5))
    torch.testing.assert_close(model.unused, twin.unused)


@pytest.mark.parametrize("update", ["after-norm", "in-backward"])
def test_counted_micro_batches_are_those_of_accumulate(update):
    data = batches(6)

    def train(counted):
        model = Net(torch.float32)
        options = {"micro_batches": 2} if counted else {}
        optimizer = OffloadAdamW(model, lr=3e-3, max_grad_norm=0.0, update=update, homes="stream", **options)
        for first, second in zip(data[::2], data[1::2], strict=True):
            if counted:
                (loss_of(model, first) / 2).backward()
            else:
                with optimizer.accumulate():
                    (loss_of(model, first) / 2).backward()
            (loss_of(model, second) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        if counted:  # a last step of fewer micro-batches than were promised
            loss_of(model, data[0]).backward()
            optimizer.step()
        optimizer.synchronize()
        return model, optimizer, []

    counted, plain = train(True), train(False)
    loss_of(plain[0], data[0]).backward()
    plain[1].step()
    plain[1].synchronize()
    assert_same(counted, plain)


@pytest.mark.parametrize("homes", HOMES)
def test_a_fresh_optimizer_has_no_state_to_tell(homes):
    model = Net()
    optimizer = OffloadAdamW(model, homes=homes, lr=3e-3, max_grad_norm=0.5)
    fresh = optimizer.state_dict()
    assert fresh["state"] == {}
    start = copy.deepcopy(model.state_dict())
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert optimizer.state_dict()["state"]
    optimizer.load_state_dict(fresh)  # back to the beginning: no moments, and the weights as they are
    model.load_state_dict(start)
    for ids in batches(2):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
    optimizer.synchronize()
    assert_same((model, optimizer, []), run(steps=2, homes=homes))


def test_rounded_masters_are_state_from_the_start():
    model = Net(torch.float32)
    remainders = round_to_bf16_(model.parameters())
    optimizer = OffloadAdamW(model)
    optimizer.take_remainders(remainders)
    assert optimizer.state_dict()["state"]


@pytest.mark.parametrize("homes", HOMES)
def test_zero_grad_without_step_forgets_the_backward(homes):
    data = batches(3)
    model = Net()
    optimizer = offload(model, lr=3e-3, max_grad_norm=0.5, homes=homes, chunk_size=100)
    for number, ids in enumerate(data):
        loss_of(model, ids).backward()
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert_same((model, optimizer, None), run(data=[data[0], data[2]]))


@pytest.mark.parametrize("update", ["after-norm", "in-backward"])
def test_zero_grad_forgets_a_micro_batch_of_a_step_that_was_given_up(update):
    first, *data = batches(5)

    def train(given_up):
        model = Net()
        optimizer = OffloadAdamW(model, lr=3e-3, max_grad_norm=0.0, update=update, homes="gpu", micro_batches=2)
        if given_up:
            loss_of(model, first).backward()
            optimizer.zero_grad()
        for pair in (data[:2], data[2:]):
            for ids in pair:
                loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return model, optimizer, []

    assert_same(train(given_up=True), train(given_up=False))


def test_gradients_outlive_a_loaded_state(device):
    """Of `host` they are no longer on a GPU by then."""

    def load(number, model, optimizer):
        if number == 2:
            optimizer.load_state_dict(optimizer.state_dict())

    ours = run(homes={"gpu": 0.4, "stream": 0.3, "host": 0.3}, chunk_size=100, before_step=load, device=device)
    assert_same(run(homes="gpu", device=device), ours)


@pytest.mark.parametrize("homes", HOMES)
def test_weights_loaded_into_the_model_are_the_new_masters(homes, device):
    model, optimizer, _ = run(homes=homes, chunk_size=100, device=device)
    fresh = Net(seed=5).to(device)
    model.load_state_dict(fresh.state_dict())
    masters = [entry["master"] for entry in optimizer.state_dict()["state"].values()]
    wanted = [p.detach().cpu().float() for p in fresh.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(masters, wanted, strict=True))


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch):
    others, model = set(threading.enumerate()), Net()
    optimizer = offload(model, homes={"host": 0.5, "stream": 0.5}, chunk_size=100)
    monkeypatch.setattr("penstock.update.host_threads.HostThreads.begin", lambda *_: 1 / 0)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(ZeroDivisionError):
        optimizer.close()
    assert set(threading.enumerate()) <= others


@pytest.mark.parametrize(("homes", "taken"), [("gpu", False), ("stream", True), ({"gpu": 0.5, "host": 0.5}, True)])
def test_start_up_says_what_host_memory_took(homes, taken):
    optimizer = OffloadAdamW(nn.Linear(4000, 1000), homes=homes)
    told = optimizer.describe_host_memory()
    assert bool(re.fullmatch(r"0\.0\d GB of host memory taken in \d\.\d s, \d+\.\d GB/s", told)) == taken
    assert taken or told == ""
    assert ("beside the weights" in optimizer.describe()) == (homes != "stream")
    optimizer.close()
