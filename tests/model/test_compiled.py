"""Compiled layers compute the same to rounding, leave hooks outside, and fall back where there is no compiler."""

import os

import pytest
import torch
from tiny import SEVEN, packed, tiny_config, tiny_model
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_compiler
from transformers import AutoModelForCausalLM

from penstock.model import attention
from penstock.model.attention import Segments, stock_attention, use_attention
from penstock.model.compiled import _changes_in_place, set_compile
from penstock.model.decoder import find_decoder
from penstock.model.loss import packed_loss
from penstock.model.matmul import set_matmul
from penstock.model.recompute import set_recompute
from penstock.model.row_attention import attend_rows
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.trained import TrainedUnit
from penstock.recipe.recipe import recompute_by_layer


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_of(model, units, batch):
    return packed_loss(units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)


def gradients(model, *, on, recompute="none", say=lambda _: None):
    units = find_decoder(model)
    use_attention(model, "auto")
    num_layers = len(units.layers)
    set_recompute(units.layers, recompute_by_layer("none", num_layers))
    set_recompute(units.layers, set_compile(units.layers, on, say, recompute_by_layer(recompute, num_layers)))
    model.zero_grad()
    loss = loss_of(model, units, packed())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_plain_layers():
    """With kernels for the CPU, which take longest to make."""
    model = tiny_model("llama")
    plain = gradients(model, on=False)
    assert_close(plain, gradients(model, on=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, on=False), strict=True)), "it can be undone"


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("recompute", ["none", "full", "selected"])
def test_what_is_computed_again_changes_nothing(name, recompute):
    model = tiny_model(name)
    assert_close(gradients(model, on=False), gradients(model, on=True, recompute=recompute))


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
def test_layers_share_one_compilation_and_no_step_needs_another():
    model = tiny_model("llama")
    gradients(model, on=True)
    torch._dynamo.utils.counters.clear()
    units = find_decoder(model)
    loss_of(model, units, packed()).backward()
    with torch.no_grad(), stock_attention(model):
        model(input_ids=torch.tensor([[1, 2, 3]]))  # another shape, but the plain forward
    assert not torch._dynamo.utils.counters["frames"].get("total", 0)


def plain_and_compiled(model, device="cpu", compiled=True, recompute="none", say=pytest.fail):
    """Loss and gradients of two rows of one segment each: without loops over segments, the compiler sees all of it."""
    units = find_decoder(model)
    use_attention(model, "auto")
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(16, device=device).expand(2, -1)
    segments = Segments.of((0, 16, 32), torch.device(device))
    found = []
    for on in (False, True) if compiled else (False,):
        set_compile(units.layers, on, say, recompute_by_layer(recompute, len(units.layers)))
        torch._dynamo.utils.counters.clear()
        model.zero_grad()
        loss = packed_loss(units, ids, positions, segments, torch.arange(31, device=device), ids.flatten()[1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
@pytest.mark.parametrize(("recompute", "graphs"), [("none", 1), ("selected", 1), ("full", 1), ("full:4", 2)])
def test_layers_that_keep_products_share_one_compilation(monkeypatch, recompute, graphs):
    monkeypatch.setattr("penstock.model.compiled._in_one_piece", lambda layer: True)  # as on a GPU
    model = tiny_model("llama", num_hidden_layers=10)  # more than the compiler's limit for one function
    for plain, compiled in zip(*plain_and_compiled(model, recompute=recompute), strict=True):
        assert (plain - compiled).norm() <= 1e-4 * plain.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
@pytest.mark.parametrize("recompute", ["none", "selected", "full"])
@pytest.mark.parametrize("broken", [0, 1])
def test_one_layer_that_the_compiler_does_not_see_whole_is_compiled_in_pieces_alone(monkeypatch, recompute, broken):
    """Else all of one kind would run as they are written, and nobody would hear of it."""
    monkeypatch.setattr("penstock.model.compiled._in_one_piece", lambda layer: True)
    model, said = tiny_model("llama", num_hidden_layers=3), []
    mlp = find_decoder(model).layers[broken].mlp
    inner = mlp.forward

    def in_two_pieces(x):
        torch._dynamo.graph_break()
        return inner(x)

    mlp.forward = in_two_pieces
    for plain, compiled in zip(*plain_and_compiled(model, recompute=recompute, say=said.append), strict=True):
        assert (plain - compiled).norm() <= 1e-4 * plain.norm()
    assert len(said) == 1
    assert "a layer is compiled in pieces" in said[0]
    whole, pieces = 1, 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == whole + pieces


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
def test_compiled_layers_keep_less_when_products_that_widen_are_computed_again(monkeypatch):
    monkeypatch.setattr("penstock.model.compiled._in_one_piece", lambda layer: True)

    def wide_tensors_kept(recompute):
        model = tiny_model("llama", hidden_size=32, intermediate_size=96)
        units, sizes = find_decoder(model), []
        use_attention(model, "auto")
        set_compile(units.layers, True, pytest.fail, recompute_by_layer(recompute, len(units.layers)))
        ids = torch.randint(3, 90, (2, 25), generator=torch.Generator().manual_seed(0))
        positions, segments = torch.arange(25).expand(2, -1), Segments.of((0, 25, 50), torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            packed_loss(units, ids, positions, segments, torch.arange(49), ids.flatten()[1:])
        return sizes.count(50 * 96)

    gate_and_up = 2 * len(find_decoder(tiny_model("llama")).layers)
    assert wide_tensors_kept("none") == gate_and_up
    assert wide_tensors_kept("selected") == 0


PACKINGS = (((9, 1, 6), (3, 13)), ((8, 8), (2, 14)), ((1,) * 16, (16,)), ((5, 5, 6), (4, 4, 4, 4)))


def graphs_of(model, packings, device="cpu"):
    """How many graphs were compiled for a step with each packing."""
    units = find_decoder(model)
    use_attention(model, "auto")
    set_compile(units.layers, True, pytest.fail)
    torch._dynamo.utils.counters.clear()
    for rows in packings:
        batch = packed(rows=rows)
        tensors = (batch.input_ids, batch.position_ids, batch.target_index, batch.targets)
        ids, positions, index, targets = (t.to(device) for t in tensors)
        segments = Segments.of(batch.segments.boundaries, torch.device(device))
        packed_loss(units, ids, positions, segments, index, targets).backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
def test_a_new_packing_needs_no_new_compilation(monkeypatch):
    """With an operation in the place of flash attention, which a CPU has not."""

    @torch.library.custom_op("penstock_test::attend", mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        return q + 0 * offsets.sum()

    attend.register_fake(lambda q, k, v, offsets: torch.empty_like(q))
    attend.register_autograd(lambda context, gradient: (gradient, None, None, None))
    monkeypatch.setattr("penstock.model.compiled._in_one_piece", lambda layer: True)
    monkeypatch.setattr(attention, "_one_by_one", lambda q, k, v, segments, *_: attend(q, k, v, segments.offsets))
    assert graphs_of(tiny_model("llama"), PACKINGS) == 1
    torch._dynamo.reset()
    assert graphs_of(tiny_model("llama"), (*PACKINGS, ((16,), (16,)))) == 2, "whole rows are a batch"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.skipif("TORCH_CUDA_SANITIZER" in os.environ, reason="under torch's stream sanitizer nothing is compiled")
def test_gpu_packings_share_one_compilation():
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    assert graphs_of(model, PACKINGS, "cuda") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.skipif("TORCH_CUDA_SANITIZER" in os.environ, reason="under torch's stream sanitizer nothing is compiled")
@pytest.mark.parametrize("name", SEVEN)
def test_gpu_layers_are_compiled_in_one_piece(name):
    (exact,) = plain_and_compiled(tiny_model(name), compiled=False)
    model = tiny_model(name).to("cuda", torch.bfloat16)
    plain, compiled = plain_and_compiled(model, "cuda")
    for truth, *found in zip(exact, plain, compiled, strict=True):
        theirs, ours = ((x.float().cpu() - truth).norm() / truth.norm() for x in found)
        assert ours < 1.5 * theirs + 1e-2
    pieces = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert pieces == 1 or (pieces and "experts" in str(model))


def step_gradients(model, rows, length):
    """Of rows of one example each."""
    ids = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(0)).cuda()
    positions = torch.arange(length, device="cuda").expand(rows, -1)
    segments = Segments.of(range(0, rows * length + 1, length), torch.device("cuda"))
    model.zero_grad()
    index = torch.arange(rows * length - 1, device="cuda")
    (packed_loss(find_decoder(model), ids, positions, segments, index, ids.flatten()[1:]) / len(index)).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def off_by_kind(found, exact):
    """How far gradients are from exact ones, relative to these, by kinds of weights: the worst layer's."""
    off = {name: (g - exact[name]).norm().div(exact[name].norm()).nan_to_num(torch.inf) for name, g in found.items()}
    kinds = {name.split(".")[-2] for name in off}
    return {kind: float(max(off[name] for name in off if name.split(".")[-2] == kind)) for kind in kinds}


def how_it_is_off(found, exact, kinds):
    """For whoever looks for the cause: by which factor, and of how many rows and columns of the weight."""
    for name, wanted in exact.items():
        if name.split(".")[-2] in kinds and wanted.ndim == 2:
            g, scale = found[name], float((found[name] * wanted).sum() / wanted.square().sum())
            parts = [float(((g - wanted).norm(dim=d) > 0.3 * wanted.norm(dim=d)).double().mean()) for d in (1, 0)]
            yield f"{name}: {scale:.3f} times the exact one; off: {parts[0]:.2f} of rows, {parts[1]:.2f} of columns"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.skipif("TORCH_CUDA_SANITIZER" in os.environ, reason="under torch's stream sanitizer nothing is compiled")
@pytest.mark.parametrize(("attention", "matmul"), [("auto", "bf16"), ("auto", "fp8"), ("sdpa", "bf16")])
@pytest.mark.parametrize("recompute", ["none", "selected", "full", "full:1"])
@pytest.mark.parametrize(("rows", "length"), [(1, 4096), (2, 2048)])
def test_gpu_gradients_are_those_of_plain_layers_whatever_is_computed_again(attention, matmul, recompute, rows, length):
    """Of shapes for which attention has fast kernels: what is computed again hands them tensors laid out otherwise."""
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = tiny_config("llama", **shape, head_dim=128, max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda().train()
    layers = find_decoder(model).layers
    use_attention(model, attention)
    exact = step_gradients(model, rows, length)
    model.to(torch.bfloat16)
    set_matmul(model, layers, matmul)
    plain = off_by_kind(step_gradients(model, rows, length), exact)
    set_compile(layers, True, pytest.fail, recompute_by_layer(recompute, len(layers)))
    for step in range(2):  # in the first one the compiler tries its tiles
        with torch.autograd.profiler.profile() as profile:  # compiled code runs under no dispatch mode
            found = step_gradients(model, rows, length)
        off = off_by_kind(found, exact)
        wrong = {kind for kind in off if off[kind] > 1.5 * plain[kind] + 2e-3}
        assert not wrong, "\n".join([f"step {step}", *how_it_is_off(found, exact, wrong)])
    in_fp8 = sum(event.name == "aten::_scaled_mm" for event in profile.function_events)
    if matmul == "bf16":
        assert not in_fp8
    else:
        assert in_fp8 >= 21 * len(layers), "what is computed again comes on top"
        assert all(off[kind] > 0.5 * plain[kind] for kind in off), "bf16 would be a tenth as far off"


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
def test_a_compiled_layer_waits_for_its_update():
    """`module.compile()` would trace the waiting hook away, and forward would read weights that are being written."""

    def train(on):
        model = tiny_model("llama")
        units = find_decoder(model)
        use_attention(model, "auto")
        set_compile(units.layers, on, lambda _: None)
        waits = []
        real = TrainedUnit.wait
        TrainedUnit.wait = lambda unit, *where: (waits.append(not unit.was_called), real(unit, *where))[1]
        try:
            optimizer = OffloadAdamW(model, lr=1e-2, homes="stream", units=units.layers)
            losses = []
            for _ in range(4):
                loss = loss_of(model, units, packed())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        finally:
            TrainedUnit.wait = real
        optimizer.close()
        return losses, sum(waits)

    (plain, plain_waits), (compiled, compiled_waits) = train(False), train(True)
    assert compiled == pytest.approx(plain, rel=1e-3)
    assert compiled_waits == plain_waits > 0


@pytest.mark.slow
def test_without_a_compiler_layers_run_as_they_are():
    from torch._inductor import config

    said = []
    model = tiny_model("llama")
    plain = gradients(model, on=False)
    with config.patch({"force_disable_caches": True, "cpp.cxx": ("no-such-compiler",)}):
        fallback = gradients(model, on=True, say=said.append)
    assert all(torch.equal(a, b) for a, b in zip(plain, fallback, strict=True))
    assert len(said) == 1
    assert "layers run uncompiled" in said[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_backward_that_cannot_be_compiled_is_found_in_forward(monkeypatch, name, recompute):
    compile_with, said = torch.compile, []

    def backward(graph, inputs):
        raise NotImplementedError("this backward")

    backend = aot_autograd(fw_compiler=make_boxed_compiler(lambda graph, inputs: graph), bw_compiler=backward)
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_with(function, backend=backend, **how))
    model = tiny_model(name)
    plain = gradients(model, on=False)
    fallback = gradients(model, on=True, recompute=recompute, say=said.append)
    assert all(torch.equal(a, b) for a, b in zip(plain, fallback, strict=True))
    assert len(said) == 1
    assert "this backward" in said[0]


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_compiler_that_fails_later_on_leaves_nothing_half_done(monkeypatch, number):
    """In the middle of a layer, and after layers that are then computed again compiled, as they were at first."""
    compile_with, called, said = torch.compile, [], []

    def fails_in_the_middle(graph, inputs):
        called.append("graph")
        if called[-3:] == [number, "graph", "graph"]:
            raise NotImplementedError("this graph")
        return graph

    backend = aot_autograd(
        fw_compiler=make_boxed_compiler(fails_in_the_middle), bw_compiler=make_boxed_compiler(lambda graph, _: graph)
    )
    model = tiny_model("gpt_oss")  # whose second layer is of another kind
    plain = gradients(model, on=False)
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_with(function, backend=backend, **how))
    for place, layer in enumerate(find_decoder(model).layers):
        layer.register_forward_pre_hook(lambda *_, place=place: called.append(place))
    fallback = gradients(model, on=True, recompute="full", say=said.append)
    assert_close(plain, fallback)
    assert len(said) == 1
    assert "this graph" in said[0]


def test_models_of_several_shapes_are_compiled_in_one_process():
    """Whose heads are then no constants to the compiler, but the choice of a kernel wants to know them."""
    attending = torch.compile(attend_rows, backend="eager", fullgraph=True)
    for heads, kv_heads, size in ((4, 2, 16), (6, 3, 8), (4, 1, 32)):
        q, k, v = (torch.randn(32, number, size) for number in (heads, kv_heads, kv_heads))
        torch.testing.assert_close(attending(q, k, v, 16, 0.3), attend_rows(q, k, v, 16, 0.3))


def test_layers_that_change_a_product_in_place_are_not_replayed_by_the_compiler():
    layers = {kind: find_decoder(tiny_model(kind)).layers[0] for kind in ("gemma3n_text", "llama")}
    assert {kind: _changes_in_place(layer) for kind, layer in layers.items()} == {"gemma3n_text": True, "llama": False}
