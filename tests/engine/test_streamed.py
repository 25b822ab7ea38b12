"""Weights that stream, inputs that are parked, layers before rows: the same bits as with everything on the device."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_native import TINY, step, tiny

from penstock.engine.native import NativeEngine
from penstock.engine.trial import full_batch
from penstock.engine.weights import load_to_stream, streams
from penstock.model.load import load_config, load_model

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")],
)
DEVICES = ["cpu", GPU]


def recipe_of(preset="llama-8b", rows=1, dtype="bf16", **changes):
    recipe = tiny(preset, micro_batch_size=rows, recompute="full", compile=False, attention="eager")
    return dataclasses.replace(recipe, dtype=dtype, **changes)


def build(recipe, device="cpu"):
    device, config = torch.device(device), load_config(recipe)
    if streams(recipe):
        model = load_to_stream(recipe, config, device, lambda _: None)
    else:
        model = load_model(recipe, config, device, lambda _: None)
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


def run(recipe, device="cpu", steps=3):
    """Losses and norms of the steps, the loss of an evaluation after them, and all bits."""
    engine, batches = build(recipe, device), micro_batches(recipe.micro_batch_size)
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
@pytest.mark.parametrize("preset", TINY)
def test_one_micro_batch_is_that_of_resident_weights(preset, device):
    base = run(recipe_of(preset, rows=4, homes="host"), device)
    for name, flow in FLOWS.items():
        assert_same(run(recipe_of(preset, rows=4, **flow), device), base), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_layers_before_rows_in_every_format_and_update(states, clip, device):
    changes = {"states": states, "max_grad_norm": clip}
    base = run(recipe_of(order="layers", **changes), device)
    for name, flow in FLOWS.items():
        assert_same(run(recipe_of(**changes, **flow), device), base), name


@pytest.mark.parametrize("device", DEVICES)
def test_rows_before_layers(device):
    """Sums of gradients in the order of rows, or of layers, are the same sums here."""
    base = run(recipe_of(order="rows"), device)
    for name in ("streamed", "parked", "one of two"):
        assert_same(run(recipe_of(order="rows", **FLOWS[name]), device), base), name


def test_fp32_weights_stream_too():
    base = run(recipe_of(rows=2, dtype="fp32", order="layers"))
    assert_same(run(recipe_of(rows=2, dtype="fp32", weights="streamed")), base)


def test_tied_weights():
    tied = {"shape": tiny("llama-8b").shape + ",tie_word_embeddings=true"}
    for clip in (1.0, 0.0):
        base = run(recipe_of(rows=4, max_grad_norm=clip, **tied))
        assert_same(run(recipe_of(rows=4, max_grad_norm=clip, weights="streamed", **tied)), base)
