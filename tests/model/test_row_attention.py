"""Attention over whole rows is one operation, whose kernel sees tensors token by token whatever the compiler does."""

import cpu_rows
import pytest
import torch
from tiny import tiny_model
from torch.nn.attention import SDPBackend

from penstock.model import row_attention
from penstock.model.attention import Segments, use_attention
from penstock.model.compiled import set_compile
from penstock.model.decoder import find_decoder
from penstock.model.loss import packed_loss
from penstock.model.row_attention import attend_rows
from penstock.recipe.recipe import recompute_by_layer

aten = torch.ops.aten


@pytest.fixture
def given(monkeypatch):
    """A CPU's kernels in the place of cuDNN's, and the strides of what these were given."""
    strides = []

    def kernel(q, k, v, scale):
        strides.append([x.stride() for x in (q, k, v)])
        return cpu_rows.kernel(q, k, v, scale)

    def backward(gradient, q, k, v, out, sums, scale):
        strides.append([x.stride() for x in (gradient, q, k, v, out)])
        return cpu_rows.backward_kernel(gradient, q, k, v, out, sums, scale)

    monkeypatch.setattr(row_attention, "_kernel", kernel)
    monkeypatch.setattr(row_attention, "_backward_kernel", backward)
    monkeypatch.setattr(row_attention, "_is_cudnn", lambda *_: True)
    return strides


def by_tokens(strides):
    """Whether the second dimension (heads) lies inside of the third (tokens)."""
    return all(of_head < of_token for _, of_head, of_token, _ in strides)


def gradients(model, recompute=None):
    """Of two rows, each one example. Compiled, unless `recompute` is None."""
    units, (rows, length) = find_decoder(model), (2, 16)
    set_compile(units.layers, recompute is not None, pytest.fail, recompute_by_layer(recompute or "none", 2))
    ids = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    packed_loss(
        units, ids, torch.arange(length).expand(rows, -1), Segments.of((0, 16, 32), ids.device), torch.arange(31),
        ids.flatten()[1:],
    ).backward()  # fmt: skip
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selected", "full"])
def test_compiled_layers_hand_over_tokens_first_and_have_the_same_gradients(monkeypatch, given, recompute):
    monkeypatch.setattr("penstock.model.compiled._in_one_piece", lambda layer: True)  # as on a GPU
    model = tiny_model("llama", num_hidden_layers=2)
    use_attention(model, "auto")
    monkeypatch.setattr(row_attention, "_is_cudnn", lambda *_: False)
    plain = gradients(model)
    assert not given
    monkeypatch.setattr(row_attention, "_is_cudnn", lambda *_: True)
    for ours, theirs in zip(gradients(model, recompute), plain, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    forwards = 4 if recompute == "full" else 2
    assert sorted(map(len, given)) == [3] * forwards + [5] * 2
    assert all(map(by_tokens, given))


@pytest.mark.parametrize("first", ["heads", "tokens"])
def test_a_gradient_that_lies_otherwise_is_handed_over_tokens_first(given, first):
    torch.manual_seed(0)
    q, k, v = (torch.randn(24, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    gradient = torch.randn(24, 4, 8)
    wanted = torch.autograd.grad(attend_rows(q, k, v, 12, 0.3), (q, k, v), gradient)
    if first == "heads":
        gradient = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    found = torch.autograd.grad(attend_rows(q, k, v, 12, 0.3), (q, k, v), gradient)
    assert all(map(torch.equal, found, wanted))
    assert all(map(by_tokens, given))


def test_it_is_what_torch_computes(given):
    torch.manual_seed(0)
    q, k, v = (torch.randn(24, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    gradient = torch.randn(24, 4, 8, dtype=torch.float64)
    ours = attend_rows(q, k, v, 12, 0.3)
    rows = (x.unflatten(0, (2, 12)).transpose(1, 2) for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, scale=0.3, enable_gqa=True)
    theirs = theirs.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), gradient) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_torchs_own_checks_of_an_operation(given):
    q, k, v = (torch.randn(2, 12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    torch.library.opcheck(row_attention._attend, (q, k, v, 0.3))


def asked(monkeypatch, choice):
    """Heads of keys in each call of torch's attention, where torch is said to choose a kernel by those."""
    heads, real = [], torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **more):
        heads.append(k.shape[1])
        return real(q, k, v, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(row_attention, "_choice", lambda heads, size, kv_heads, *_: choice(heads, kv_heads).value)
    return heads


@pytest.mark.parametrize(
    ("grouped", "repeated", "seen"),
    [
        (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, [4, 4]),
        (SDPBackend.MATH, SDPBackend.MATH, [2, 4]),
        (SDPBackend.FLASH_ATTENTION, SDPBackend.FLASH_ATTENTION, [2, 4]),
    ],
)
def test_keys_and_values_are_repeated_where_only_so_there_is_a_kernel(monkeypatch, grouped, repeated, seen):
    torch.manual_seed(0)
    q, *pairs = (torch.randn(24, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2, 4, 4))
    gradient, found = torch.randn(24, 4, 8, dtype=torch.float64), []
    for by_torch in (True, False):
        with monkeypatch.context() as patch:
            heads = [] if by_torch else asked(patch, lambda q_heads, n: repeated if q_heads == n else grouped)
            for k, v in (pairs[:2], pairs[2:]):
                out = attend_rows(q, k, v, 12, 0.3)
                found.append([out, *torch.autograd.grad(out, (q, k, v), gradient)])
    assert heads == seen
    for ours, theirs in zip(found[2:], found[:2], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_repeated_keys_are_compiled(monkeypatch):
    asked(monkeypatch, lambda heads, n: SDPBackend.EFFICIENT_ATTENTION if heads == n else SDPBackend.MATH)
    torch._dynamo.reset()
    attending = torch.compile(attend_rows, backend="aot_eager", fullgraph=True)
    q, k, v = (torch.randn(24, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    ours, theirs = (torch.autograd.grad(f(q, k, v, 12, 0.3).sum(), (q, k, v)) for f in (attending, attend_rows))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "size", "error"), [(torch.float32, 128, 1e-3), (torch.bfloat16, 320, 2e-2)])
def test_gpu_no_logits_of_row_by_row(monkeypatch, dtype, size, error):
    """Fewer key heads in fp32, and heads of more than flash attention takes."""
    choices, real = [], torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **more):
        asked = {name: value for name, value in more.items() if name != "scale"}
        choices.append(torch._fused_sdp_choice(q, k, v, **asked))
        return real(q, k, v, **more)

    torch.manual_seed(0)
    q, k, v = (torch.randn(1024, n, size, device="cuda", dtype=dtype, requires_grad=True) for n in (8, 2, 2))
    gradient = torch.randn(1024, 8, size, device="cuda", dtype=dtype)
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(attend_rows(*exact, 512, 0.1), exact, gradient.double().cpu())
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found = torch.autograd.grad(attend_rows(q, k, v, 512, 0.1), (q, k, v), gradient)
    assert choices
    assert SDPBackend.MATH.value not in choices
    for a, b in zip(found, wanted, strict=True):
        assert (a.double().cpu() - b).norm() <= error * b.norm()


def test_without_cudnn_torchs_attention_runs():
    q, k, v = (torch.randn(24, heads, 8) for heads in (4, 2, 2))
    assert not row_attention._is_cudnn(4, 8, 2, 8, torch.float32, torch.device("cpu"))
    assert attend_rows(q, k, v, 12, 0.3).shape == q.shape
