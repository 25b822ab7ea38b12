"""Weights that stream, inputs that are parked, layers before rows: the same bits as with everything on the device."""

import dataclasses
import sys
import threading
from collections import UserDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_native import TINY, step, tiny

from penstock.engine.layerwise import LayerByLayer
from penstock.engine.native import NativeEngine
from penstock.engine.parked import ParkedInputs
from penstock.engine.trial import full_batch
from penstock.engine.weights import load_to_stream, streams
from penstock.errors import ModelError, RecipeError
from penstock.flow.unit_slots import UnitSlots
from penstock.model.load import load_config, load_model
from penstock.offload.stream import StreamHome
from penstock.plan.layout import parked_bytes

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")],
)
DEVICES = ["cpu", GPU]


def recipe_of(preset="llama-8b", rows=1, dtype="bf16", **changes):
    recipe = tiny(preset, micro_batch_size=rows, recompute="full", compile=False, attention="eager")
    return dataclasses.replace(recipe, dtype=dtype, **changes)


def build(recipe, device="cpu", frozen=()):
    device, config = torch.device(device), load_config(recipe)
    if streams(recipe):
        model = load_to_stream(recipe, config, device, lambda _: None)
    else:
        model = load_model(recipe, config, device, lambda _: None)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(word in name for word in frozen))
    return NativeEngine(model, recipe, lambda _: None, device=device)


def micro_batches(rows):
    whole = full_batch(4, 12, 300)
    return [
        dataclasses.replace(full_batch(rows, 12, 300), input_ids=whole.input_ids[first : first + rows])
        for first in range(0, 4, rows)
    ]


def bits(engine):
    """Weights and state by name."""
    tensors = [tensor for group in engine.saved_tensors().values() for tensor in group]
    return {t.name: torch.cat([piece.view(-1) for piece in t.pieces]).cpu() for t in tensors}


def run(recipe, device="cpu", steps=3, frozen=()):
    """Losses and norms of the steps, the loss of an evaluation after them, and all bits."""
    engine, batches = build(recipe, device, frozen), micro_batches(recipe.micro_batch_size)
    seen = [step(engine, batches) for _ in range(steps)]
    seen = [(one.loss, one.grad_norm) for one in seen]
    found = [*seen, engine.evaluate(batches)], bits(engine)
    engine.release()
    engine.drop_weights()
    return found


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert [name for name in theirs[1] if not torch.equal(ours[1][name], theirs[1][name])] == []


FLOWS = {
    "streamed": {"weights": "streamed"},
    "parked": {"weights": "streamed", "inputs": "parked"},
    "one of two": {"weights": "1", "homes": "gpu=0.5,stream=0.5"},
    "stream": {"weights": "streamed", "homes": "stream"},
    "stream and host": {"weights": "streamed", "inputs": "parked", "homes": "gpu=0.2,stream=0.4,host=0.4"},
    "parked, resident": {"weights": "resident", "order": "layers", "inputs": "parked"},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[] if name == "gpt-oss-20b" else pytest.mark.slow) for name in TINY]
)
def test_one_micro_batch_is_that_of_resident_weights(preset, device):
    base = run(recipe_of(preset, rows=4, homes="host"), device)
    for name, flow in FLOWS.items():
        assert_same(run(recipe_of(preset, rows=4, **flow), device), base), name


def test_backward_goes_on_while_updates_of_a_layer_wait_for_their_places(monkeypatch):
    """All its gradients are final at once: if backward waited here, the device would have nothing to do."""
    engine = build(recipe_of(rows=4, weights="streamed", homes="stream", max_grad_norm=0.0))
    calls, again, real = [], threading.Event(), StreamHome.update

    def called(*_):
        calls.append(1)
        if len(calls) == 2:
            again.set()  # in backward, computed again from its input

    def update(home, update):
        assert update.chunk not in home._away or again.wait(20), "backward stands still"
        return real(home, update)

    monkeypatch.setattr(StreamHome, "update", update)
    engine.packed.decoder.layers[0].register_forward_pre_hook(called)
    step(engine, micro_batches(4))
    engine.release()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_layers_before_rows_in_every_format_and_update(states, clip, device):
    changes = {"states": states, "max_grad_norm": clip}
    base = run(recipe_of(order="layers", **changes), device)
    for name, flow in FLOWS.items():
        assert_same(run(recipe_of(**changes, **flow), device), base), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_inputs_of_every_other_layer(device, monkeypatch):
    """Layers between are computed again together: the same bits, from fewer inputs and slots than layers."""
    shape = tiny("llama-8b").shape.replace("num_hidden_layers=2", "num_hidden_layers=7")
    base = run(recipe_of(order="layers", shape=shape), device, steps=2)
    saved, save = [], ParkedInputs.save
    monkeypatch.setattr(ParkedInputs, "save", lambda self, key, hidden: (saved.append(key), save(self, key, hidden)))
    for every, count in ((2, 4), (5, 2)):
        for flow in ({"weights": "streamed"}, {"weights": "3", "order": "rows"}):
            saved.clear()
            ours = run(recipe_of(shape=shape, inputs=f"parked:{every}", **flow), device, steps=2)
            if flow.get("order") != "rows":
                assert_same(ours, base)
            assert len({layer for layer, _ in saved}) == count
    engine = build(recipe_of(shape=shape, order="layers", inputs="parked:2"), device)
    held = next(use.num_bytes for use in engine.memory() if use.part == "parked inputs")
    assert held == parked_bytes(4, 4, 12 * 32, 2)
    engine.release()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_rows_before_layers(device):
    """Sums of gradients in the order of rows, or of layers, are the same sums here."""
    base = run(recipe_of(order="rows"), device)
    for name in ("streamed", "parked", "one of two"):
        assert_same(run(recipe_of(order="rows", **FLOWS[name]), device), base), name


@pytest.mark.slow
def test_fp32_weights_stream_too():
    base = run(recipe_of(rows=2, dtype="fp32", order="layers"))
    assert_same(run(recipe_of(rows=2, dtype="fp32", weights="streamed")), base)


@pytest.mark.parametrize("more", ["", ",tie_word_embeddings=true"], ids=["own head", "tied"])
def test_layers_and_rows_train_the_same_embedding(more):
    """Its gradient is made of all micro-batches at once in one of them, and adds up one by one in the other."""
    shape = tiny("llama-8b").shape + more
    ours, theirs = (run(recipe_of(dtype="fp32", shape=shape, order=order))[1] for order in ("layers", "rows"))
    names = [name for name in theirs if "embed" in name]
    assert len(names) >= 3, "the weight and its moments"
    for name in names:
        torch.testing.assert_close(ours[name].float(), theirs[name].float(), rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_tied_weights():
    tied = {"shape": tiny("llama-8b").shape + ",tie_word_embeddings=true"}
    for clip in (1.0, 0.0):
        base = run(recipe_of(rows=4, max_grad_norm=clip, **tied))
        assert_same(run(recipe_of(rows=4, max_grad_norm=clip, weights="streamed", **tied)), base)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_a_streamed_run_goes_on_resident_and_the_other_way_round(device):
    """Two steps, saved, restored into an engine of the other kind, and two more: the bits of four steps at once."""
    straight = run(recipe_of(rows=4), device, steps=4)[1]
    kinds = [recipe_of(rows=4, weights="streamed", inputs="parked"), recipe_of(rows=4)]
    for first, second in (kinds, reversed(kinds)):
        engine, other = build(first, device), build(second, device)
        batches = micro_batches(4)
        for _ in range(2):
            step(engine, batches)
        step(other, batches)  # what it has of its own is written over
        saved = {t.name: t for group in engine.saved_tensors().values() for t in group}
        for tensor in (t for group in other.saved_tensors().values() for t in group):
            whole = torch.cat([piece.view(-1) for piece in saved[tensor.name].pieces])
            for piece, part in zip(tensor.pieces, whole.split([len(p) for p in tensor.pieces]), strict=True):
                piece.copy_(part)
        other.restored()
        for _ in range(2):
            step(other, batches)
        found = bits(other)
        assert [name for name in straight if not torch.equal(found[name], straight[name])] == []
        for one in (engine, other):
            one.release()
            one.drop_weights()


@pytest.mark.parametrize(("count", "slots"), [("1", 1), ("streamed", 2)])
def test_there_are_no_more_slots_than_layers_that_stream(count, slots):
    engine = build(recipe_of(weights=count, order="layers"))
    weights = engine._weights
    assert weights.slot_bytes == slots * weights.num_bytes / len(weights._layers)
    engine.release()


def test_answers_and_evaluations_pass_through_the_same_slots():
    """Without gradients, in any order, also after the engine has given its state back."""
    recipe = recipe_of(rows=4)
    resident, streamed = build(recipe), build(dataclasses.replace(recipe, weights="streamed"))
    ids = torch.arange(7)[None]
    for engine in (resident, streamed):
        step(engine, micro_batches(4))
        engine.optimizer.synchronize()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(resident.model(ids).logits, streamed.model(ids).logits)
        layer = streamed.packed.decoder.layers[1]
        called = []
        hook = layer.register_forward_hook(lambda *_: called.append(layer.self_attn.q_proj.weight.data_ptr()))
        streamed.release()
        assert torch.equal(resident.model(ids).logits, streamed.model(ids).logits)
        hook.remove()
    assert called, "it was called"
    streamed.drop_weights()


def test_a_slot_that_is_used_too_early_is_noticed(monkeypatch):
    """The negative control: the next unit comes into a slot while this one still computes there."""
    base, fetch = run(recipe_of(rows=4)), UnitSlots._fetch

    def too_early(slots, unit, memory, free):
        arrived = fetch(slots, unit, memory, free)
        following = slots._sources[(unit + 1) % len(slots._sources)]
        memory[: following.nbytes].copy_(following)
        return arrived

    monkeypatch.setattr(UnitSlots, "_fetch", too_early)
    assert run(recipe_of(rows=4, weights="streamed"))[0] != base[0]


def test_more_layers_than_there_are():
    with pytest.raises(RecipeError, match="the model has 2 layers"):
        build(recipe_of(weights="3"))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [("layers.0",), ("embed_tokens", "layers.1.mlp"), ("layers.0", "layers.1")], ids=str)
def test_frozen_parameters_stream_and_stay(frozen, device):
    base = run(recipe_of(rows=2, order="layers"), device, frozen=frozen)
    for flow in ("streamed", "stream and host"):
        assert_same(run(recipe_of(rows=2, **FLOWS[flow]), device, frozen=frozen), base)


def test_layers_that_leave_keys_and_values_for_others_are_not_computed_one_by_one():
    """Their gradients would be lost: what a layer reads there was made without any."""
    engine = SimpleNamespace(_packed=SimpleNamespace(model=torch.nn.Identity()))
    for shared, refused in ((UserDict(), True), ({}, False)):
        calls = [SimpleNamespace(args=(), kwargs={"shared_kv_states": shared})]
        with pytest.raises(ModelError, match="one by one") if refused else nullcontext():
            LayerByLayer._refuse_other_gradients(engine, calls)
