"""The engine on tiny models: micro-batches add up, bad losses change nothing, decay spares norms and biases."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from penstock.data.loader import Position, prepare
from penstock.engine import native
from penstock.engine.native import NativeEngine, decay_groups, for_long_rows, out_of_memory
from penstock.engine.trial import full_batch
from penstock.errors import DoesNotFit
from penstock.model.load import load_config, load_model, load_tokenizer
from penstock.offload import placing
from penstock.plan.layout import FORMATS, Chunk
from penstock.plan.split import Manner, ModelBytes, Profile, Rates, requirements
from penstock.recipe.presets import PRESETS
from penstock.update.master import join

TINY = {
    "llama-8b": "num_attention_heads=4,num_key_value_heads=2",
    "qwen3-14b": "num_attention_heads=4,num_key_value_heads=2,head_dim=8",
    "phi-4": "num_attention_heads=4,num_key_value_heads=2,pad_token_id=0",
    "gpt-oss-20b": "num_attention_heads=4,num_key_value_heads=2,head_dim=8,num_local_experts=4,num_experts_per_tok=2",
    "seed-oss-36b": "num_attention_heads=4,num_key_value_heads=2,head_dim=8",
    "qwen3-30b-a3b": "num_attention_heads=4,num_key_value_heads=2,head_dim=8,num_experts=4,num_experts_per_tok=2,"
    "moe_intermediate_size=16",
    "llama-70b": "num_attention_heads=4,num_key_value_heads=2",
}


def tiny(preset, **changes):
    shape = f"num_hidden_layers=2,hidden_size=32,intermediate_size=48,vocab_size=300,{TINY[preset]}"
    return dataclasses.replace(
        PRESETS[preset], init="random", shape=shape, dtype="fp32", batch_size=4, max_length=12, **changes
    )


def build(recipe):
    model = load_model(recipe, load_config(recipe), torch.device("cpu"), lambda _: None)
    return model, NativeEngine(model, recipe, lambda _: None)


def step(engine, batches):
    engine.begin(1e-2)
    trained = sum(batch.num_trained for batch in batches)
    for number, batch in enumerate(batches, start=1):
        engine.accumulate(batch, trained, last=number == len(batches))
    return engine.step()


@pytest.mark.parametrize("preset", TINY)
def test_every_preset_trains_a_step_and_learns(preset):
    _, engine = build(tiny(preset))
    batch = full_batch(2, 12, 300)
    losses = [step(engine, [batch]).loss for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.isfinite(torch.tensor(losses)))


def test_the_recipe_says_in_what_gradients_add_up():
    """Four micro-batches in bf16: the sums of both kinds differ by roundings, and so do the weights after a step."""
    weights = {}
    for kind in ("fp32", "bf16"):
        recipe = dataclasses.replace(tiny("llama-8b", accumulate_dtype=kind, micro_batch_size=1), dtype="bf16")
        model, engine = build(recipe)
        whole = full_batch(4, 12, 300)
        rows = [dataclasses.replace(full_batch(1, 12, 300), input_ids=ids[None]) for ids in whole.input_ids]
        for _ in range(2):  # the first step of AdamW hardly sees a gradient's size
            step(engine, rows)
        weights[kind] = torch.cat([p.detach().float().view(-1) for p in model.parameters()])
    assert 0 < (weights["fp32"] - weights["bf16"]).abs().max() < 4e-2


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_micro_batches_add_up_to_a_batch(clip):
    recipe = tiny("llama-8b", max_grad_norm=clip)
    whole, parts = build(recipe), build(recipe)
    batch = full_batch(4, 12, 300)
    pieces = [
        dataclasses.replace(
            full_batch(1, 12, 300), input_ids=batch.input_ids[i : i + 1], targets=batch.input_ids[i, 1:]
        )
        for i in range(4)
    ]
    for _ in range(3):
        a, b = step(whole[1], [batch]), step(parts[1], pieces)
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    for engine in (whole[1], parts[1]):
        engine.release()
    for p, q in zip(whole[0].parameters(), parts[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_bad_weight_makes_a_step_that_changes_nothing():
    model, engine = build(tiny("llama-8b"))
    batch = full_batch(2, 12, 300)
    step(engine, [batch])
    engine.optimizer.synchronize()
    good = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    result = step(engine, [batch])
    engine.optimizer.synchronize()
    assert result.skipped
    assert all(torch.equal(p.nan_to_num(), q.nan_to_num()) for p, q in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        model.model.norm.weight.copy_(good)
    assert not step(engine, [batch]).skipped


def test_evaluation_changes_nothing_and_is_the_mean_over_trained_tokens():
    _, engine = build(tiny("llama-8b"))
    batch = full_batch(3, 12, 300)
    expected = float(engine.packed.loss_sum(batch).detach()) / batch.num_trained
    assert engine.evaluate([batch, batch]) == pytest.approx(expected, rel=1e-6)
    assert step(engine, [batch]).loss == pytest.approx(expected, rel=1e-6)


def test_norms_biases_and_sinks_do_not_decay():
    model, _ = build(tiny("gpt-oss-20b"))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = ([names[id(p)] for p in group["params"]] for group in decay_groups(model, 0.1))
    assert all(not name.endswith("bias") and "norm" not in name and "sinks" not in name for name in decayed)
    assert any(name.endswith("gate_up_proj_bias") for name in plain)
    assert any(name.endswith("sinks") for name in plain)
    assert len(decayed) + len(plain) == len(names)


@pytest.mark.slow
def test_packed_and_unpacked_runs_give_every_example_the_same_loss():
    """The demo's own examples and weights, in fp32, read through the loader both ways."""
    packed, alone = (example_losses(packing) for packing in (True, False))
    assert len(packed) == len(alone) > 30
    assert max(abs(packed[i] - alone[i]) for i in packed) < 1e-3


def example_losses(packing):
    """Mean loss of each example, by its number in the data."""
    recipe = dataclasses.replace(PRESETS["demo"], packing=packing, dtype="fp32", data_percent=10.0)
    config, tokenizer = load_config(recipe), load_tokenizer(recipe)
    loader = prepare(recipe, tokenizer, config.vocab_size, lambda _: None).train
    model = load_model(recipe, config, torch.device("cpu"), lambda _: None)
    engine = NativeEngine(model, recipe, lambda _: None)
    losses, position = {}, Position()
    while position.epoch == 0:
        rows = loader._rows(0)[position.row : position.row + recipe.batch_size]
        numbers = [int(i) for r in rows for i in loader.packing.row(r)]
        (batch,), position = loader.step_at(position)
        rows = engine.packed.rows(batch)
        with torch.no_grad():
            hidden = engine.packed.chosen(engine.packed.hidden_states(rows), rows)
            for start, end in itertools.pairwise(batch.boundaries):
                own = (batch.target_index >= start) & (batch.target_index < end)
                if own.any():  # padding has no targets
                    loss = engine.packed.head_loss(hidden[own], batch.targets[own])
                    losses[numbers.pop(0)] = float(loss / own.sum())
    engine.release()
    return losses


def test_out_of_memory_names_the_largest_parts_and_what_to_change(monkeypatch):
    _, engine = build(tiny("llama-8b", homes="gpu", recompute="none"))
    batch = full_batch(4, 12, 300)

    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(engine.packed, "loss_sum", full)
    with pytest.raises(DoesNotFit) as caught:
        engine.accumulate(batch, 44, last=True)
    assert re.search(r"with 4 rows of \d+ tokens at once: resident state .* GiB, weights .* GiB", caught.value.what)
    flags = re.findall(r"--[a-z-]+", caught.value.remedy)
    streamed = ["--weights", "--recompute"]
    assert flags == ["--homes", "--micro-batch-size", "--recompute", *streamed, "--states", "--max-length"]
    assert caught.value.exit_code == 3
    engine.release()
    assert "--weights" not in out_of_memory({}, tiny("llama-8b", mode="zerooffload"), 1).remedy, "which it refuses"


def test_out_of_memory_of_long_rows_names_what_takes_less_of_them():
    """Above a shorter row, and only what is not given yet; on one GPU, where it goes."""
    long = dataclasses.replace(tiny("llama-8b"), max_length=65_536)
    by_layer = {"order": "layers", "recompute": "full"}
    for given, flags in (
        ({"recompute": "selected:1"}, "--order layers --recompute full --inputs parked --tile 16384"),
        ({"recompute": "full"}, "--order layers --inputs parked --tile 16384"),
        (by_layer, "--inputs parked --tile 16384"),
        ({"weights": "streamed", "inputs": "parked:2"}, "--tile 16384"),
        ({**by_layer, "tile": "4096"}, "--inputs parked"),
        ({**by_layer, "attention": "sdpa"}, "--inputs parked"),
        ({**by_layer, "inputs": "parked", "tile": "4096"}, ""),
    ):
        recipe = dataclasses.replace(long, **given)
        assert for_long_rows(recipe, 1) == flags
        assert not for_long_rows(recipe, 2)
        assert not for_long_rows(dataclasses.replace(recipe, max_length=65_535), 1)
        last = f"{flags}, or --max-length 32768." if flags else "--max-length 32768."
        assert out_of_memory({}, recipe, 1).remedy.endswith(f", or {last}")
        assert "--tile" not in out_of_memory({}, recipe, 2).remedy


def test_state_that_does_not_fit_beside_long_rows_has_the_same_remedy(monkeypatch):
    """Where the engine makes room, on a GPU that is not there and has none."""
    given, place = [], native.place
    monkeypatch.setattr(native, "place", lambda *args, **more: (given.append(more["remedy"]), place(*args, **more))[1])
    _, engine = build(dataclasses.replace(tiny("llama-8b", recompute="full"), max_length=65_536))
    engine.release()
    assert given == ["--order layers --inputs parked --tile 16384"]
    gpu, format = SimpleNamespace(device=torch.device("cuda"), sharded=False), FORMATS["fp32"]
    for name, value in {"gpu_room": (0, 10**9), "gpu_left": 0, "describe": "a GPU"}.items():
        monkeypatch.setattr(placing, name, lambda *_, value=value: value)
    manner, nothing = Manner(in_backward=False), {"gpu": [], "stream": [], "host": []}
    need = requirements(ModelBytes(1000, 10.0, 2.0), Profile(500, 2500), manner, 1.0, None)
    known = (need, gpu, [Chunk(0, 0, 1000, format, 2)], 0, manner, lambda: Rates(5e10, 3e9), None, nothing)
    for remedy in ("", *given):
        with pytest.raises(DoesNotFit) as caught:
            placing._choose(*known, remedy)
        others = f"{remedy}, " if remedy else ""
        assert caught.value.remedy.endswith(f"GiB), {others}--recompute full, or a smaller --micro-batch-size.")


def test_out_of_memory_does_not_count_weights_that_stream(monkeypatch):
    _, engine = build(tiny("llama-8b", weights="streamed", order="layers", inputs="kept", recompute="full"))

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(engine._layerwise, "run", full)
    with pytest.raises(DoesNotFit) as caught:
        engine.accumulate(full_batch(4, 12, 300), 44, last=True)
    resident = sum(p.nbytes for p in engine.model.parameters() if p not in engine._weights.parameters)
    assert f"weights {resident / 2**30:.1f} GiB" in caught.value.what
    assert "--weights" not in caught.value.remedy
    engine.release()


def test_weights_are_rounded_before_anything_is_compiled_or_tried(monkeypatch):
    """Loaded in fp32, trained in bf16: layers are compiled, and memory is tried, as they will run."""
    seen = []

    def compiled(layers, on, say, chosen=(), **_):
        seen.append({p.dtype for layer in layers for p in layer.parameters()})
        return chosen

    monkeypatch.setattr("penstock.engine.packed.set_compile", compiled)
    recipe = tiny("llama-8b")
    model = load_model(recipe, load_config(recipe), torch.device("cpu"), lambda _: None)
    exact = [p.detach().clone().flatten() for p in model.parameters()]
    recipe = dataclasses.replace(recipe, dtype="bf16", recompute="none")
    engine = NativeEngine(model, recipe, lambda _: None)
    assert seen == [{torch.bfloat16}] * 2, "undone first, then set"
    masters = {
        parameter: join(parameter.detach().flatten(), torch.cat([view["remainder"] for view in views]))
        for parameter, views in engine.optimizer.chunk_states()
    }
    assert all(torch.equal(masters[p], e) for p, e in zip(model.parameters(), exact, strict=True)), "no bit is lost"
    engine.release()
