"""A layer in tiles gives what it gives at once, in forward and backward, and never has a whole row of what is wide."""

import gc

import pytest
import torch
from tiny import OTHERS, SEVEN, Largest, packed, tiny_model

from penstock.errors import ModelError
from penstock.model import unneeded
from penstock.model.attention import Before, use_attention
from penstock.model.compiled import set_compile
from penstock.model.decoder import find_decoder
from penstock.model.fp8 import Fp8Linear
from penstock.model.loss import hidden_states
from penstock.model.matmul import set_matmul
from penstock.model.tiles import Tiled, _Sums, check_tiles, set_tiles, spans
from penstock.model.unneeded import keep_last_products, leave_out_last_product

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")]
CALLS_ONCE = [name for name in OTHERS if name not in ("gemma2", "gptj", "stablelm")]  # those have no varlen attention
ROWS = {"packed": ((9, 1, 6), (3, 13)), "long": ((40,),), "half": ((20,),), "alike": ((8, 8), (8, 8))}
LONG_ROWS = {"one": ((256,),), "nearly one": ((210, 46),), "many": ((9, 60, 1, 186), (3, 128, 125))}
ROWS |= LONG_ROWS


def called_with(model, rows="packed"):
    """Every layer with what it is called with."""
    device = next(model.parameters()).device
    decoder, batch, calls = find_decoder(model), packed(rows=ROWS[rows], device=device), []
    use_attention(model, "varlen")
    hooks = [
        layer.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True) for layer in decoder.layers
    ]
    with torch.no_grad():
        hidden_states(decoder, batch.input_ids, batch.position_ids, batch.segments)
    for hook in hooks:
        hook.remove()
    found = []
    for layer, args, kwargs in calls:
        kwargs = dict(kwargs)
        hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        found.append((layer, hidden, args, kwargs))
    return found


def at_once(layer, hidden, args, kwargs, gradient):
    """Result, gradient of the input, and of every weight that has one."""
    layer.zero_grad()
    x = hidden.detach().requires_grad_()
    result = layer.forward(x, *args, **kwargs)
    result.backward(gradient)
    return [result.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def in_tiles(layer, hidden, args, kwargs, gradient, tile=5, compiled=False):
    layer.zero_grad()
    set_tiles([layer], tile, pytest.fail, compiled=compiled)
    with torch.no_grad():
        result = layer.forward(hidden, *args, **kwargs)
    of_input = layer.forward.gradient(gradient.clone(), hidden, *args, **kwargs)
    set_tiles([layer], 0, pytest.fail)
    return [result, of_input, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def assert_close(ours, theirs, error=2e-6):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= error * b.norm() + 3e-5  # what should be zero, as of keys' biases, is roundings


@pytest.mark.parametrize("name", [*SEVEN, *CALLS_ONCE])
def test_result_and_gradients_are_those_of_the_whole_layer(name):
    for call in called_with(tiny_model(name)):
        gradient = torch.randn(call[1].shape, generator=torch.Generator().manual_seed(1))
        assert_close(in_tiles(*call, gradient), at_once(*call, gradient))


@pytest.mark.parametrize(
    ("tile", "rows"),
    [
        pytest.param(tile, rows, marks=pytest.mark.slow if tile == 1 and rows in LONG_ROWS else ())
        for tile in (1, 7, 8, 1000)
        for rows in ROWS
    ],
)
def test_of_any_length(tile, rows):
    for call in called_with(tiny_model("gpt_oss"), rows):
        gradient = torch.randn(call[1].shape, generator=torch.Generator().manual_seed(1))
        assert_close(in_tiles(*call, gradient, tile=tile), at_once(*call, gradient))


@pytest.mark.parametrize(
    ("name", "compiled", "device"),
    [
        pytest.param("gpt_oss", False, "cpu", marks=pytest.mark.slow),
        *(
            pytest.param(name, compiled, "cuda", marks=GPU)
            for name in SEVEN
            if name != "llama-tied"
            for compiled in (False, True)
        ),
    ],
)
def test_in_bf16_tiles_are_as_exact_as_whole_rows(monkeypatch, name, compiled, device):
    """Beside fp32. Every token has all experts: near two that are equal, a rounding would choose.

    Of a router's bias and of sinks, four numbers each, roundings do not average out: one way's may be three times
    the other's.
    """
    monkeypatch.setattr("penstock.model.long_segments.LONG_SEGMENT", 100)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 512}
    if "moe" in name or name == "gpt_oss":
        sizes |= {"num_experts_per_tok": 4, "moe_intermediate_size": 64, "sliding_window": 16}
    model = tiny_model(name, **sizes).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.mul(0.3).bfloat16())
    for rows in ROWS.keys() & LONG_ROWS:
        model.float()
        for layer, hidden, args, kwargs in called_with(model, rows):
            gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
            hidden = hidden.bfloat16()
            exact = at_once(layer, hidden.float(), args, kwargs, gradient.float())
            layer.bfloat16()
            kwargs["position_embeddings"] = tuple(x.bfloat16() for x in kwargs["position_embeddings"])
            whole = at_once(layer, hidden, args, kwargs, gradient)
            tiles = in_tiles(layer, hidden, args, kwargs, gradient, tile=48, compiled=compiled)
            set_compile([layer], False, pytest.fail)
            layer.float()
            for exactly, usual, ours in zip(exact, whole, tiles, strict=True):
                off = [(x.float() - exactly).norm() / exactly.norm() for x in (usual, ours)]
                assert off[1] <= 1.3 * off[0] + (2e-3 if exactly.numel() > 4 else 0.02), (rows, off, exactly.shape)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
@pytest.mark.parametrize(
    ("name", "matmul"),
    [(name, "bf16") for name in ("llama", "qwen3", "gpt_oss", "qwen3_moe")] + [("qwen3_moe", "fp8")],
)
def test_compiled(name, matmul):
    """Both parts of the layer; layers of one kind share what is compiled, and nothing is compiled again."""
    torch._dynamo.reset()
    model = tiny_model(name, num_hidden_layers=4)
    set_matmul(model, find_decoder(model).layers, matmul)
    calls = called_with(model, "long")
    for number, call in enumerate(calls):
        gradient = torch.randn(call[1].shape, generator=torch.Generator().manual_seed(1))
        torch._dynamo.utils.counters.clear()
        with torch.autograd.profiler.profile() as profile:  # compiled code runs under no dispatch mode
            ours = in_tiles(*call, gradient, tile=10, compiled=True)
        set_compile([call[0]], False, pytest.fail)
        in_fp8 = sum(event.name == "aten::_scaled_mm" for event in profile.function_events)
        if matmul == "fp8":  # each tile has scales of its own
            assert_close(ours, in_tiles(*call, gradient, tile=10), error=2e-2)  # a last bit may be another fp8 number
            assert in_fp8 >= 4 * 3 * sum(isinstance(part, Fp8Linear) for part in call[0].modules()) > 0, "four tiles"
        else:
            assert_close(ours, at_once(*call, gradient), error=2e-5)
            assert not in_fp8
        if number >= 2:
            assert not torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
def test_what_is_compiled_serves_rows_of_any_length():
    """Of one tile: no graph knows how many others there are. Two layers, since there are two kinds."""
    torch._dynamo.reset()
    for rows in ("half", "long"):
        torch._dynamo.utils.counters.clear()
        for call in called_with(tiny_model("gpt_oss"), rows):
            gradient = torch.randn(call[1].shape, generator=torch.Generator().manual_seed(1))
            assert_close(in_tiles(*call, gradient, tile=10, compiled=True), at_once(*call, gradient), error=2e-5)
        graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        assert (graphs > 0) == (rows == "half")
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_nothing_is_computed_that_is_not_used(monkeypatch):
    """Before attention no MLP, and after it no projections of queries, keys and values."""
    torch._dynamo.reset()
    graphs = []

    def noted(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def kept(module, _):
            graphs.append(sum("mm" in str(node.target) for node in module.graph.nodes))
            return module.forward

        return aot_autograd(fw_compiler=kept)(graph, inputs)

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_with(function, backend=noted))
    layer, hidden, args, kwargs = called_with(tiny_model("llama"), "long")[0]
    set_tiles([layer], 10, pytest.fail, compiled=True)
    with torch.no_grad():
        layer.forward(hidden, *args, **kwargs)
    assert graphs == [3, 4], "queries, keys, values; output, gate, up, down"
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_moe"])
def test_nothing_but_attention_is_as_long_as_the_row_and_wide(name):
    """An MLP eight times as wide as the model: at once it makes that for every token, in tiles for a tile."""
    wide = {"intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 8}
    tokens, hidden = 480, 32
    ROWS["wide"] = ((tokens // 16,) * 16,)
    call = called_with(tiny_model(name, **wide), "wide")[0]
    gradient = torch.ones(call[1].shape)
    with Largest() as whole:
        at_once(*call, gradient)
    with Largest() as tiled:
        in_tiles(*call, gradient, tile=20)
    weights = max(p.numel() for p in call[0].parameters())
    assert whole.numel >= 256 * tokens
    assert tiled.numel <= max(tokens * hidden, weights)


def test_sums_over_tiles_are_rounded_once():
    """In bf16: the error against fp64 is that of one rounding, however many tiles there are."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(4096, 16, generator=generator).bfloat16() for _ in range(2))
    exact = g.double().t() @ x.double()
    errors = {}
    for tiles in (1, 4, 64):
        weight = torch.nn.Parameter(torch.zeros(16, 16, dtype=torch.bfloat16))
        sums = _Sums([weight])
        for tokens in spans(4096, 4096 // tiles):
            sums.add([torch.nn.functional.linear(x[tokens], weight)], [], [g[tokens]])
        sums.deliver()
        errors[tiles] = float((weight.grad.double() - exact).norm() / exact.norm())
    assert errors[4] < 1.5 * errors[1]
    assert errors[64] < 1.5 * errors[1]


def test_the_last_product_is_left_out_of_backward_here_too():
    (layer, *call), _ = called_with(tiny_model("llama"))
    gradient = torch.randn(call[0].shape)
    whole = at_once(layer, *call, gradient)
    assert leave_out_last_product(layer, (call[0],), call[2])
    assert_close(in_tiles(layer, *call, gradient), whole)
    keep_last_products([layer])


def test_tiles_have_one_length_where_they_can():
    assert spans(12, 5) == [slice(0, 4), slice(4, 8), slice(8, 12)]
    assert spans(13, 5) == [slice(0, 5), slice(5, 10), slice(10, 13)]
    assert spans(393_216, 16_384) == [slice(n, n + 16_384) for n in range(0, 393_216, 16_384)]
    assert spans(3, 16) == [slice(0, 3)]


def test_what_cannot_be_computed_in_tiles_is_refused():
    layer, hidden, args, kwargs = called_with(tiny_model("llama"), "long")[0]
    check_tiles(layer, (hidden, *args), kwargs)
    assert not isinstance(layer.forward, Tiled)
    norm = layer.post_attention_layernorm
    norm.forward = lambda x: x - x.mean(1, keepdim=True)
    with pytest.raises(ModelError, match="tokens meet outside of attention"):
        check_tiles(layer, (hidden, *args), kwargs)
    del norm.forward
    once = layer.self_attn.forward
    layer.self_attn.forward = lambda **asked: once(**asked) and once(**asked)
    with pytest.raises(ModelError, match="2 times"):
        check_tiles(layer, (hidden, *args), kwargs)
    with pytest.raises(ModelError, match="varlen"):
        check_tiles(layer, (hidden, *args), {})


def test_nothing_of_a_tile_waits_for_the_garbage_collector():
    """Where it did, queries, keys and values of seventy tiles were there at once."""
    call = called_with(tiny_model("llama"))[0]
    gc.collect()
    gc.disable()
    try:
        in_tiles(*call, torch.ones(call[1].shape))
        assert not [thing for thing in gc.get_objects() if isinstance(thing, Before)]
    finally:
        gc.enable()


def test_a_product_that_is_needed_is_not_left_out_though_its_memory_still_holds_it(monkeypatch):
    class Squares(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.product = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.product(x) ** 2

    monkeypatch.setattr(unneeded, "_shaped", torch.nn.functional.linear)  # as if it were given the very same memory
    assert not leave_out_last_product(Squares(), (torch.ones(3, 4),), {})
