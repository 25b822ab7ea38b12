"""Steps in tiles: those of whole rows to rounding, and the same bits wherever weights and inputs are."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_native import TINY, step
from test_streamed import DEVICES, assert_same, bits, build, micro_batches, recipe_of, run

from penstock.engine.trial import drop_gradient
from penstock.errors import ModelError, RecipeError
from penstock.model.tiles import check_tiles

FLOWS = [{"weights": "streamed"}, {"weights": "1", "inputs": "parked"}, {"order": "layers", "inputs": "parked"}]


def tiled(preset="llama-8b", tile="5", **changes):
    return recipe_of(preset, attention="auto", tile=tile, **changes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=[] if name in ("llama-8b", "gpt-oss-20b") else pytest.mark.slow) for name in TINY],
)
def test_three_steps_are_those_of_whole_rows(preset, device):
    """Rows of twelve tokens, two at once, in tiles of five and of all."""
    whole, *others = (
        run(tiled(preset, tile, rows=2, dtype="fp32", order="layers"), device) for tile in ("none", "5", "24")
    )
    for ours in others:
        for one, other in zip(ours[0], whole[0], strict=True):
            assert one == pytest.approx(other, rel=1e-4)
        for name, there in whole[1].items():
            if there.is_floating_point() and "second" not in name:
                torch.testing.assert_close(ours[1][name].float(), there.float(), rtol=1e-2, atol=2e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", ["llama-8b", pytest.param("gpt-oss-20b", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_streamed_and_parked_are_the_same_bits(preset, device):
    base = run(tiled(preset, order="layers"), device)
    for flow in FLOWS:
        assert_same(run(tiled(preset, **flow), device), base)


@pytest.mark.slow
def test_frozen_layers_stay():
    base, ours = (run(tiled(tile=tile, order="layers"), frozen=("layers.0",)) for tile in ("none", "5"))
    names = [name for name in base[1] if "layers.0" in name]
    assert names
    assert all(torch.equal(base[1][name], ours[1][name]) for name in names)


def test_an_engine_of_whole_rows_after_one_in_tiles():
    """What tiles put in the place of a forward is taken back."""
    from penstock.engine.native import NativeEngine

    engine = build(tiled(order="layers"))
    engine.release()
    after = NativeEngine(engine.model, tiled(tile="none", order="layers"), lambda _: None)
    assert all("forward" not in vars(layer) for layer in after.packed.decoder.layers)
    step(after, micro_batches(1))
    assert bits(after)


def test_evaluation_and_answers():
    """Evaluation goes in tiles, where rows are long too; an answer with a cache does not."""
    whole, ours = (build(tiled(tile=tile, order="layers", dtype="fp32")) for tile in ("none", "5"))
    batches = micro_batches(2)
    assert ours.evaluate(batches) == pytest.approx(whole.evaluate(batches), rel=1e-5)
    from penstock.model.attention import stock_attention

    ids = torch.arange(7)[None]
    with torch.no_grad(), stock_attention(whole.model), stock_attention(ours.model):
        torch.testing.assert_close(ours.model(ids).logits, whole.model(ids).logits)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(RecipeError, match="computed one by one, on one GPU"):
        recipe_of(attention="auto", tile="64")
    with pytest.raises(RecipeError, match="varlen"):
        recipe_of(order="layers", tile="64")
    with pytest.raises(RecipeError, match="auto, none or a number"):
        tiled(tile="0", order="layers")
    engine = build(tiled(order="layers"))
    engine.model.config._attn_implementation = "eager"
    with pytest.raises(ModelError, match="tiles need varlen"):
        engine.packed._try_layers(check_tiles)


@pytest.mark.slow
def test_a_trial_of_fewer_layers_runs_the_last_ones():
    """And leaves all of them to the next step, with the bits of a run without a trial."""
    recipe = tiled(weights="streamed", inputs="parked")
    base = run(recipe)
    engine = build(recipe)
    layerwise, called = engine._layerwise, []
    layers = engine.packed.decoder.layers
    hooks = [layer.register_forward_hook(lambda layer, *_: called.append(layers.index(layer))) for layer in layers]
    gradients = [p.register_post_accumulate_grad_hook(drop_gradient) for p in engine.model.parameters()]
    with layerwise.fewer(1) as tried, engine.optimizer.accumulate():
        assert tried == 1
        layerwise.run(micro_batches(1)[:1], 1, nullcontext)
    assert set(called) == {1}
    for hook in (*hooks, *gradients):
        hook.remove()
    engine.release()
    engine.drop_weights()
    assert_same(run(recipe), base)


@pytest.mark.parametrize("tile", ["5", "none"])
def test_the_final_norm_sees_a_tile(tile):
    engine, seen = build(tiled(tile=tile, rows=2, order="layers")), []
    engine.model.model.norm.register_forward_hook(lambda module, args, result: seen.append(result.shape[1]))
    step(engine, micro_batches(2))
    assert max(seen) == (4 if tile == "5" else 12)  # of 24, in parts that are as long as one another
    engine.release()
