"""fp8 products against a reference that casts number by number, and never silently in another type."""

import math

import pytest
import torch
from tiny import packed, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.model.attention import Segments, stock_attention, use_attention
from penstock.model.compiled import set_compile
from penstock.model.decoder import find_decoder
from penstock.model.fp8 import Fp8Linear, _cast
from penstock.model.loss import packed_loss
from penstock.model.matmul import set_matmul
from penstock.model.recompute import set_recompute
from penstock.recipe.recipe import recompute_by_layer

FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}


class Products(TorchDispatchMode):
    """Counts products by the type of what goes in."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default):
            kind = "fp8" if operation is torch.ops.aten._scaled_mm.default else "plain"
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return operation(*args, **kwargs or {})


def rounded(x, name):
    """The nearest numbers of a type with so many bits of fraction: ties to even, below the least exponent in steps."""
    fraction, least, largest = FORMATS[name]
    x = x.double()
    exponent = torch.floor(torch.log2(x.abs().clamp(min=1e-300))).clamp(min=least)
    step = torch.exp2(exponent - fraction)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def quantized(x, name):
    """As a product sees it: scaled so that the largest is the type's largest, cast, and scaled back, in fp64."""
    largest = x.abs().max().float()
    scale = (FORMATS[name][2] / largest).float()
    return rounded(x.float() * scale, name) * (largest / FORMATS[name][2]).double()


def reference(x, weight, gradient):
    """The product and its gradients, in fp64 on numbers that were cast."""
    a, b = quantized(x.flatten(0, -2), "e4m3"), quantized(weight, "e4m3")
    g = quantized(gradient.flatten(0, -2), "e5m2")
    product, by_x = a @ b.T, g @ b
    return product.view(*x.shape[:-1], -1), by_x.view(x.shape), g.T @ a


def gradients_of(linear, x, gradient):
    x = x.detach().requires_grad_()
    linear.zero_grad()
    product = linear(x)
    product.backward(gradient)
    return product.detach(), x.grad, linear.get_parameter("weight").grad.clone()


def case(tokens=32, dtype=torch.float32, bias=False):
    torch.manual_seed(tokens)
    linear = nn.Linear(48, 64, bias=bias).to(dtype)
    spread = torch.exp(2 * torch.randn(2, tokens, 1))  # numbers of many sizes, so that small ones fall below the type
    return linear, (torch.randn(2, tokens, 48) * spread).to(dtype), (torch.randn(2, tokens, 64) * spread).to(dtype)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("tokens", [32, 5, 1])
def test_products_are_those_of_numbers_that_were_cast(tokens):
    linear, x, gradient = case(tokens)
    plain = gradients_of(linear, x, gradient)
    linear.__class__ = Fp8Linear
    for ours, theirs, exact in zip(
        gradients_of(linear, x, gradient), reference(x, linear.weight.detach(), gradient), plain, strict=True
    ):
        assert ours.shape == exact.shape
        assert relative(ours, theirs) < 1e-6, "fp32 sums of the same numbers"
        assert 0.01 < relative(ours, exact) < 0.1, "and not of those that were not cast"


def test_results_have_the_type_of_the_model():
    linear, x, gradient = case(dtype=torch.bfloat16)
    linear.__class__ = Fp8Linear
    found = gradients_of(linear, x, gradient)
    assert {t.dtype for t in found} == {torch.bfloat16}
    for ours, theirs in zip(found, reference(x, linear.weight.detach(), gradient), strict=True):
        assert relative(ours, theirs) < 2**-8


def test_a_bias_is_added_and_trained():
    linear, x, gradient = case(bias=True)
    without = nn.Linear(48, 64, bias=False)
    without.weight = linear.weight
    for module in (linear, without):
        module.__class__ = Fp8Linear
    assert torch.equal(linear(x), without(x) + linear.bias)
    linear(x).backward(gradient)
    assert torch.equal(linear.bias.grad, gradient.sum((0, 1)))


def test_zeros_stay_zeros_and_what_is_no_number_shows():
    linear, x, gradient = case()
    linear.__class__ = Fp8Linear
    assert [float(t.abs().max()) for t in gradients_of(linear, torch.zeros_like(x), gradient)[::2]] == [0.0, 0.0]
    assert not any(t.count_nonzero() for t in gradients_of(linear, x, torch.zeros_like(gradient))[1:])
    for wrong in (math.nan, math.inf, -math.inf):
        bad_x, bad_gradient = x.clone(), gradient.clone()
        bad_x[0, 3, 7] = bad_gradient[0, 3, 7] = wrong
        product, _, by_weight = gradients_of(linear, bad_x, gradient)
        assert not product.isfinite().all()
        assert not by_weight.isfinite().all()
        product, by_x, by_weight = gradients_of(linear, x, bad_gradient)
        assert product.isfinite().all()
        assert not by_x.isfinite().all()
        assert not by_weight.isfinite().all()


def test_the_largest_number_is_cast_to_the_largest_and_never_beyond():
    """Whatever its size: two roundings may bring it over the type's largest, and the cast brings it back."""
    linear = nn.Linear(16, 16, bias=False)
    linear.__class__ = Fp8Linear
    with torch.no_grad():
        linear.weight.copy_(torch.eye(16))
    for size in torch.exp(torch.linspace(-60, 60, 3001)):
        x = torch.zeros(1, 16)
        x[0, 0] = size
        assert linear(x)[0, 0].item() == pytest.approx(size.item(), rel=1e-6)


@pytest.mark.parametrize(("dtype", "over"), [(torch.float8_e4m3fn, 1.035), (torch.float8_e5m2, 1.07)])
def test_a_number_may_be_a_little_over_the_largest(dtype, over):
    """As where a compiled layer keeps the scale and rounds what it computes again in another order."""
    largest = torch.tensor(3.0)
    assert _cast(over * largest, largest, dtype).float() == torch.finfo(dtype).max


def test_it_is_what_torchao_computes():
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    for tokens in (32, 5):
        linear, x, gradient = case(tokens, torch.bfloat16)
        config = float8.Float8LinearConfig(emulate=True)
        theirs = gradients_of(float8.convert_to_float8_training(nn.Sequential(linear), config=config)[0], x, gradient)
        linear.__class__ = Fp8Linear
        for a, b in zip(gradients_of(linear, x, gradient), theirs, strict=True):
            assert relative(a, b) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.parametrize("tokens", [2048, 1000, 5])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_multiplies_the_same_numbers(tokens, compiled):
    """Compiled at a size at which kernels store fp8 transposed: garbage there would be infinities and no numbers."""
    torch.manual_seed(tokens)
    linear = nn.Linear(1024, 1536, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, tokens, 1024, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(2, tokens, 1536, device="cuda", dtype=torch.bfloat16)
    linear.__class__ = Fp8Linear
    found = gradients_of(torch.compile(linear) if compiled else linear, x, gradient)
    for ours, theirs in zip(found, reference(x, linear.weight.detach(), gradient), strict=True):
        assert relative(ours, theirs) < 2**-7, "sums of forward have fewer bits"


# --- in a model -------------------------------------------------------------------------------------------------------


def losses_and_gradients(model, recompute="none"):
    units, batch = find_decoder(model), packed()
    use_attention(model, "auto")
    set_recompute(units.layers, recompute_by_layer(recompute, len(units.layers)))
    model.zero_grad()
    loss = packed_loss(
        units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets
    )  # fmt: skip
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_every_product_of_the_layers_runs_in_fp8_and_no_other():
    model = tiny_model("llama")
    layers, names = find_decoder(model).layers, list(model.state_dict())
    with Products() as before:
        plain = losses_and_gradients(model)
    set_matmul(model, layers, "fp8")
    with Products() as after:
        fp8 = losses_and_gradients(model)
    assert "fp8" not in before.counts
    linears = 7 * len(layers)
    assert after.counts["fp8"] == 3 * linears
    assert before.counts["plain"] - after.counts["plain"] == 3 * linears
    assert 1e-3 < relative(fp8[0], plain[0]) + relative(fp8[1], plain[1]) < 0.5
    assert list(model.state_dict()) == names
    with Products() as evaluated, torch.no_grad(), stock_attention(model):
        model.eval()(input_ids=torch.tensor([[1, 2, 3]]))
    assert evaluated.counts["fp8"] == linears
    set_matmul(model, layers, "bf16")
    assert all(torch.equal(a, b) for a, b in zip(plain, losses_and_gradients(model), strict=True)), "it can be undone"


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "phi3"])
def test_what_is_computed_again_has_the_same_bits(name):
    model = tiny_model(name, intermediate_size=96)  # wide enough that `selected` computes something again
    set_matmul(model, find_decoder(model).layers, "fp8")
    kept = losses_and_gradients(model)
    for recompute in ("selected", "full", "selected:1", "full:1"):
        again = losses_and_gradients(model, recompute)
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True)), recompute


def test_selected_keeps_narrow_products_and_scales_and_computes_wide_ones_again():
    counts = {}
    for recompute in ("none", "selected", "full"):
        model = tiny_model("llama", hidden_size=32, intermediate_size=96)
        set_matmul(model, find_decoder(model).layers, "fp8")
        losses_and_gradients(model, recompute)  # the first is watched
        with Products() as products:
            losses_and_gradients(model, recompute)
        counts[recompute] = products.counts["fp8"]
    layers = len(find_decoder(model).layers)
    assert counts["selected"] - counts["none"] == 2 * layers, "gate and up"
    assert counts["full"] - counts["none"] == 7 * layers


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
@pytest.mark.parametrize("recompute", ["none", "selected", "full"])
def test_compiled_layers_have_the_products_too(monkeypatch, recompute):
    monkeypatch.setattr("penstock.model.compiled._in_one_piece", lambda layer: True)  # as on a GPU
    torch._dynamo.reset()
    model = tiny_model("llama")
    units = find_decoder(model)
    use_attention(model, "auto")
    set_matmul(model, units.layers, "fp8")
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    positions, segments = torch.arange(16).expand(2, -1), Segments.of((0, 16, 32), torch.device("cpu"))
    found, counts = [], []
    for on in (False, True):
        set_compile(units.layers, on, pytest.fail, recompute_by_layer(recompute, len(units.layers)))
        for _ in range(2):  # in the first it is compiled
            model.zero_grad()
            with torch.autograd.profiler.profile() as profile:  # compiled code runs under no dispatch mode
                loss = packed_loss(units, ids, positions, segments, torch.arange(31), ids.flatten()[1:])
                loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        counts.append(sum(event.name == "aten::_scaled_mm" for event in profile.function_events))
    again = {"none": 0, "selected": 0, "full": 6}[recompute]  # nothing here widens, and the last product is left out
    assert counts == [21 * len(units.layers), (21 + again) * len(units.layers)]
    for plain, compiled in zip(*found, strict=True):
        assert (plain - compiled).norm() <= 2e-2 * plain.norm(), "a last bit may be another fp8 number"
