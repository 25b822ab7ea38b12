"""fp8 products in the engine: the same bits wherever weights and state live, on ranks too, and never silently off."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from test_native import step, tiny
from test_streamed import GPU, assert_same, bits, build, micro_batches, recipe_of, run

from penstock.engine.packed import PackedModel
from penstock.engine.trial import full_batch
from penstock.errors import CheckpointError, ModelError, RecipeError
from penstock.model.decoder import find_decoder
from penstock.model.fp8 import Fp8Linear
from penstock.model.load import load_config
from penstock.model.matmul import check_matmul
from penstock.recipe.presets import PRESETS
from penstock.report.console import Console
from penstock.run.train import train


class _Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation is torch.ops.aten._scaled_mm.default
        return operation(*args, **kwargs or {})


def four_layers(recipe):
    return dataclasses.replace(recipe, shape=recipe.shape.replace("num_hidden_layers=2", "num_hidden_layers=4"))


def fp8(**changes):
    return four_layers(recipe_of(dtype="fp32", matmul="fp8", **changes))


def small(matmul="fp8"):
    return four_layers(tiny("llama-8b", matmul=matmul))


def test_a_step_has_three_products_a_linear_layer_and_the_line_says_how_many():
    said = []
    recipe = dataclasses.replace(small(), recompute="none")
    engine = build(recipe)
    PackedModel(engine.model, recipe, said.append)
    (line,) = said
    assert line.startswith("fp8: 14 linear layers, 42 products a micro-batch, ")
    assert "the first and the last layer, head, embedding, norms and attention stay fp32" in line
    running = [any(isinstance(m, Fp8Linear) for m in layer.modules()) for layer in find_decoder(engine.model).layers]
    assert running == [False, True, True, False]
    assert "emulated on this CPU" in line
    with _Products() as products:
        step(engine, [full_batch(4, 12, 300)])
    assert products.count == 42
    with _Products() as products:
        engine.evaluate([full_batch(4, 12, 300)])
    assert products.count == 14, "evaluation is in the same arithmetic"
    engine.release()
    assert not any(isinstance(module, Fp8Linear) for module in engine.model.modules()), "it is exported as it is loaded"


def test_a_run_in_fp8_is_another_and_learns_as_much():
    losses = {}
    for matmul in ("bf16", "fp8"):
        engine = build(small(matmul))
        losses[matmul] = [step(engine, [full_batch(4, 12, 300)]).loss for _ in range(5)]
        engine.release()
    assert losses["fp8"][0] != losses["bf16"][0]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=2e-2)


def test_recompute_changes_no_bit():
    found = [run(fp8(rows=2) if word == "full" else dataclasses.replace(fp8(rows=2), recompute=word))
             for word in ("full", "selected", "none")]  # fmt: skip
    for other in found[1:]:
        assert_same(other, found[0])


FLOWS = {
    "streamed": {"weights": "streamed"},
    "parked": {"weights": "streamed", "inputs": "parked", "homes": "gpu=0.2,stream=0.4,host=0.4"},
    "two of four": {"weights": "2", "homes": "stream"},
    "resident": {"weights": "resident"},
}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_streamed_weights_change_no_bit(device, clip):
    base = fp8(rows=1, order="layers", max_grad_norm=clip, homes="gpu")
    kept = run(base, device)
    for name, changes in FLOWS.items():
        ours = run(dataclasses.replace(base, **changes), device)
        assert ours[0] == kept[0], name
        assert_same(ours, kept)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(bad, weights):
    """One number of one product's gradient, which the cast must pass on."""

    def poison(module, inputs, product):
        if product.requires_grad:  # not in the first forward of a layer that streams
            product.register_hook(lambda g: g.index_fill(-1, torch.tensor(3), bad))

    engine, batches = build(fp8(rows=4, weights=weights)), micro_batches(4)
    assert not step(engine, batches).skipped
    before = {name: tensor.clone() for name, tensor in bits(engine).items()}
    linear = find_decoder(engine.model).layers[2].self_attn.o_proj
    assert type(linear) is Fp8Linear
    hook = linear.register_forward_hook(poison)
    result = step(engine, batches)
    hook.remove()
    assert result.skipped
    assert math.isfinite(result.loss), "forward was right"
    after = bits(engine)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert not step(engine, batches).skipped
    assert any(not torch.equal(before[name], tensor) for name, tensor in bits(engine).items())
    engine.release()
    engine.drop_weights()


def test_layer_by_layer_the_last_product_is_left_out_in_fp8_too():
    engine = build(fp8(rows=4, weights="streamed"))
    with _Products() as products:
        step(engine, micro_batches(4))
    assert products.count == 2 * (7 + 6 + 14), "forward, forward again without the last, two in backward"
    engine.release()
    engine.drop_weights()


def test_tiles_have_fp8_products_with_scales_of_their_own():
    base = dataclasses.replace(fp8(rows=2, weights="streamed"), attention="auto")
    whole, tiled = (run(dataclasses.replace(base, tile=tile), steps=1) for tile in ("none", "8"))
    assert tiled[0] != whole[0]
    assert tiled[0][0] == pytest.approx(whole[0][0], rel=5e-2)


def test_homes_change_no_bit():
    base = dataclasses.replace(small(), recompute="none")
    found = []
    for homes in ("gpu", "gpu=0.3,stream=0.3,host=0.4"):
        engine = build(dataclasses.replace(base, homes=homes))
        seen = [step(engine, [full_batch(4, 12, 300)]).loss for _ in range(3)]
        found.append((seen, bits(engine)))
        engine.release()
    assert_same(*found)


@pytest.mark.slow
def test_two_ranks_compute_what_one_computes(ranks):
    """Rows one by one, so that no scale depends on what else is at hand. Sums over ranks differ in their last bits."""
    configs = [
        {"preset": "demo", "micro_batch_size": 1, **changes}  # which has four layers
        for changes in (
            {"matmul": "fp8", "max_grad_norm": 0.5},
            {"matmul": "fp8", "max_grad_norm": 0.0, "recompute": "full"},
            {"matmul": "bf16", "max_grad_norm": 0.5},
        )
    ]
    one, two = ranks("train", 1, configs=configs)[0], ranks("train", 2, configs=configs)[0]
    for ours, theirs in zip(two, one, strict=True):
        assert ours["rows"][0][:2] == pytest.approx(theirs["rows"][0][:2], rel=1e-5)
        assert ours["rows"][1][:2] == pytest.approx(theirs["rows"][1][:2], rel=1e-2)
        assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-2)
    assert two[0]["rows"][0][0] != two[2]["rows"][0][0], "fp8 is not bf16"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fp8")
    base = dataclasses.replace(PRESETS["demo"], batch_size=2, max_length=128, max_steps=4, prompt=None, matmul="fp8")
    recipe = dataclasses.replace(base, output_dir=str(directory / "run"), save_every=2, keep=2, validation=0.1)
    train(recipe, Console(quiet=True))
    return recipe


def saved(directory, number):
    (found,) = (path for path in (directory / "checkpoints").iterdir() if path.name.endswith(f"{number}"))
    return found


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(whole_run, tmp_path):
    resumed = dataclasses.replace(whole_run, output_dir=str(tmp_path / "run"))
    train(resumed, Console(quiet=True), resume=str(saved(whole_run.run_dir, 2)))
    ends = [saved(recipe.run_dir, 4) for recipe in (whole_run, resumed)]
    files = [sorted(path.name for path in end.glob("*.safetensors")) for end in ends]
    assert files[0] == files[1]
    for name in files[0]:
        theirs, ours = (load_file(end / name) for end in ends)
        assert [key for key in theirs if not torch.equal(theirs[key], ours[key])] == []
    evals = [json.loads((r.run_dir / "eval.jsonl").read_text().splitlines()[-1]) for r in (whole_run, resumed)]
    assert evals[0]["eval_loss"] == evals[1]["eval_loss"]


def test_a_run_goes_on_in_the_arithmetic_that_it_began_with(whole_run, tmp_path):
    other = dataclasses.replace(whole_run, output_dir=str(tmp_path / "run"), matmul="bf16")
    with pytest.raises(CheckpointError, match="matmul was 'fp8', is 'bf16'"):
        train(other, Console(quiet=True), resume=str(saved(whole_run.run_dir, 2)))


def test_the_exported_model_is_plain(whole_run):
    config = json.loads((whole_run.run_dir / "model" / "config.json").read_text())
    assert "quantization_config" not in config


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(recipe, device="cpu"):
    with pytest.raises((ModelError, RecipeError)) as caught:
        check_matmul(recipe, load_config(recipe), torch.device(device))
    assert "--matmul bf16" in caught.value.remedy
    return str(caught.value)


def test_a_gpu_before_ada_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    said = refusal(small(), "cuda")
    assert "Penstock has no fp8 products for NVIDIA A100 (compute capability 8.0)" in said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    recipe = small()
    check_matmul(recipe, load_config(recipe), torch.device("cuda"))


def test_a_model_without_such_products_is_refused_and_shapes_are_named():
    recipe = small()
    narrow = recipe.shape.replace("hidden_size=32,intermediate_size=48", "hidden_size=24,intermediate_size=40")
    recipe = dataclasses.replace(recipe, shape=narrow)
    assert "mlp.down_proj (24 x 40)" in refusal(recipe)
    assert "it has no other" in refusal(tiny("llama-8b", matmul="fp8")), "one is the first, one the last"


def test_deepspeed_has_none():
    with pytest.raises(RecipeError, match="only the engine penstock has fp8 products"):
        dataclasses.replace(PRESETS["llama-8b"], engine="deepspeed", mode="zerooffload", matmul="fp8")
