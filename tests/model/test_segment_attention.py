"""Attention of long segments: what it is by definition, and never a mask or logits of row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_attention import plain_attention
from tiny import SEVEN, Largest, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from penstock.model import attention, segment_attention
from penstock.model.attention import Segments, attend, use_attention
from penstock.model.decoder import find_decoder
from penstock.model.loss import hidden_states
from penstock.model.recompute import keeping_narrow
from penstock.model.segment_attention import attend_segment


@given(length=st.integers(1, 40), window=st.none() | st.integers(1, 12), sink=st.booleans(), most=st.integers(1, 300))
def test_blocks_are_the_whole(length, window, sink, most):
    """Result and gradients, by blocks of any size."""
    found = []
    for limit in (2**24, most):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(length, heads, 6, generator=generator).requires_grad_() for heads in (4, 2, 2))
        sinks = torch.randn(4, generator=generator).requires_grad_() if sink else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segment_attention, "_MOST_LOGITS", limit)
            out = attend_segment(q, k, v, 0.4, window, sinks)
            out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        found.append([out.detach(), *(x.grad for x in (q, k, v, sinks) if x is not None)])
    for whole, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-4, atol=1e-5)


class Given(TorchDispatchMode):
    """Bytes of new memory that operations give, all together."""

    num_bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = [[x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in ((args, kwargs), result)]
        had, gives = ({x.untyped_storage()._cdata: x.untyped_storage() for x in some} for some in tensors)
        self.num_bytes += sum(storage.nbytes() for key, storage in gives.items() if key not in had)
        return result


@pytest.mark.parametrize("sink", [False, True])
def test_with_a_window_twice_the_tokens_take_twice_the_memory(sink, monkeypatch):
    """Of all that is ever made, forward and backward: no block answers with gradients of the whole segment."""
    monkeypatch.setattr(segment_attention, "_MOST_LOGITS", 2048)
    taken = []
    for length in (512, 1024):
        q, k, v = (torch.randn(length, 2, 4, requires_grad=True) for _ in range(3))
        sinks = torch.zeros(2, requires_grad=True) if sink else None
        with Given() as given:
            attend_segment(q, k, v, 0.4, 16, sinks).sum().backward()
        taken.append(given.num_bytes)
    assert taken[1] < 2.1 * taken[0]


@pytest.mark.parametrize("trained", [(0,), (1,), (1, 2), (0, 3), (3,)])
def test_gradients_of_some_of_what_goes_in(trained, monkeypatch):
    """Of queries, keys, values and sinks, by blocks, as they are of one block."""
    torch.manual_seed(0)
    given, found = [torch.randn(30, 2, 4) for _ in range(3)] + [torch.randn(2)], []
    for most in (2**24, 64):
        monkeypatch.setattr(segment_attention, "_MOST_LOGITS", most)
        leaves = [x.clone().requires_grad_(number in trained) for number, x in enumerate(given)]
        out = attend_segment(*leaves[:3], 0.4, 5, leaves[3])
        found.append(torch.autograd.grad(out.square().sum(), [leaves[number] for number in trained]))
    for whole, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, whole)


@pytest.mark.parametrize("how", ["full", "selected", "compiled"])
def test_blocks_where_a_layer_is_computed_again_or_compiled(how, monkeypatch):
    """The same gradients, to the bit."""
    monkeypatch.setattr(segment_attention, "_MOST_LOGITS", 64)
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 30, 4, requires_grad=True) for heads in (4, 2, 2)]
    sinks, segments = torch.randn(4, requires_grad=True), Segments.of((0, 11, 30), torch.device("cpu"))

    def layer(q, k, v, sinks):
        out, _ = attend(torch.nn.Module(), q * 2, k, v, None, sliding_window=5, s_aux=sinks, segments=segments)
        return out.sin()

    def recomputed(*inputs):
        more = {"context_fn": keeping_narrow} if how == "selected" else {}
        return checkpoint(layer, *inputs, use_reentrant=False, **more)

    other = torch.compile(layer, backend="eager") if how == "compiled" else recomputed
    inputs = [*tensors, sinks]
    ours, theirs = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (other, layer))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.slow
def test_a_long_segment_has_no_logits_of_row_by_row(sink):
    """8,192 tokens with a window, forward and backward; and with sinks over all of them."""
    length, heads = 8192, 2
    for window in (64, None) if sink else (64,):
        q, k, v = (torch.randn(length, heads, 8).requires_grad_() for _ in range(3))
        sinks = torch.zeros(heads, requires_grad=True) if sink else None
        with Largest() as largest:
            attend_segment(q, k, v, 0.4, window, sinks).sum().backward()
        assert largest.numel <= 2 * segment_attention._MOST_LOGITS < length * length


@pytest.mark.parametrize("name", SEVEN)
@pytest.mark.slow
def test_no_preset_makes_a_mask_of_131072_tokens_squared(name, monkeypatch):
    """The whole model, one row, one example. The kernel itself is left out; that it gets no mask counts."""
    length, masks = 131_072, []
    small = {
        "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": length,
        "moe_intermediate_size": 16,
    }  # fmt: skip
    if name == "phi3":
        small |= {"original_max_position_embeddings": length}
    if name == "gpt_oss":  # full attention with sinks is looked at above: without a GPU it takes minutes at this length
        small |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 128}

    def kernel(q, k, v, attn_mask=None, **_):
        masks.append(attn_mask)
        return q * 1

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    model = tiny_model(name, **small)
    assert use_attention(model, "auto") == "varlen"
    ids, places = torch.zeros(1, length, dtype=torch.long), torch.arange(length)[None]
    with torch.no_grad(), Largest() as largest:
        hidden_states(find_decoder(model), ids, places, Segments.of((0, length), torch.device("cpu")))
    assert masks == ([] if name == "gpt_oss" else [None, None])
    assert largest.numel <= 256 * length


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_heads_that_are_too_many_elements_go_in_groups(monkeypatch, kv_heads):
    """The same, forward and backward, where several groups share a key too."""
    found, sizes, one_by_one = [], [], attention._one_by_one
    monkeypatch.setattr(attention, "_one_by_one", lambda q, *rest: sizes.append(q.numel()) or one_by_one(q, *rest))
    for most in (2**31, 200, 100, 1):
        monkeypatch.setattr(attention, "_MOST_ELEMENTS", most)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, n, 10, 6, generator=generator).requires_grad_() for n in (8, kv_heads, kv_heads))
        sinks = torch.randn(8, generator=generator).requires_grad_()
        segments = Segments.of((0, 7, 10), torch.device("cpu"))
        out, _ = attend(torch.nn.Module(), q, k, v, None, sliding_window=3, s_aux=sinks, segments=segments)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        found.append([out.detach(), *(x.grad for x in (q, k, v, sinks))])
        flat = (x[0].transpose(0, 1).detach() for x in (q, k, v))
        torch.testing.assert_close(
            out[0].double(), plain_attention(*flat, [0, 7, 10], 3, sinks.detach()), rtol=0, atol=1e-5
        )
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert sorted(set(sizes)) == [60, 120, 480]


@pytest.mark.parametrize("most", [64, 63])
def test_what_a_kernel_of_some_heads_gets_lies_together(most, monkeypatch):
    """Queries and the gradient of the result: where all heads have exactly as many elements as are too many, too."""
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", most)
    seen, rows = [], attention.attend_rows

    def watched(q, k, v, *others):
        out = rows(q, k, v, *others)
        out.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
        seen.append(q.is_contiguous())
        return out

    monkeypatch.setattr(attention, "attend_rows", watched)
    q, k, v = (torch.randn(1, heads, 4, 4).requires_grad_() for heads in (4, 2, 2))
    out, _ = attend(torch.nn.Module(), q, k, v, None, segments=Segments.of((0, 4), torch.device("cpu")))
    out.backward(torch.randn(out.shape))
    assert seen == [True] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("length", [393_216, 524_288])
def test_gpu_the_end_of_a_very_long_row(length):
    """llama-8b's heads. The last queries see all keys, and the last keys are seen by them alone: both by definition."""
    if torch.cuda.get_device_properties(0).total_memory < 100e9:
        pytest.skip("takes 60 GB of GPU memory")
    heads, kv_heads, size, last = 32, 8, 128, 64
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    q, k, v = (drawn(1, n, length, size).requires_grad_() for n in (heads, kv_heads, kv_heads))
    out, _ = attend(torch.nn.Module(), q, k, v, None, segments=Segments.of((0, length), torch.device("cuda")))
    gradient = drawn(*out.shape)
    out.backward(gradient)
    later = torch.ones(last, last, dtype=torch.bool, device="cuda").triu(1)
    for kv in (0, kv_heads - 1):
        own = slice(kv * heads // kv_heads, (kv + 1) * heads // kv_heads)
        queries = q[0, own, -last:].detach().float().requires_grad_()
        keys, values = (x[0, kv].detach().float().requires_grad_() for x in (k, v))
        logits = queries @ keys.T * size**-0.5
        logits = torch.cat([logits[..., :-last], logits[..., -last:].masked_fill(later, -torch.inf)], dim=-1)
        exact = logits.softmax(dim=-1) @ values
        exact.backward(gradient[0, -last:, own].transpose(0, 1).float())
        pairs = {
            "result": (out[0, -last:, own].transpose(0, 1), exact),
            "queries": (q.grad[0, own, -last:], queries.grad),
            "keys": (k.grad[0, kv, -last:], keys.grad[-last:]),
            "values": (v.grad[0, kv, -last:], values.grad[-last:]),
        }
        for name, (ours, theirs) in pairs.items():
            assert (ours.float() - theirs).norm() < 0.02 * theirs.norm(), f"{name} of group {kv}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (40, 8, 128), (40, 10, 128), (80, 8, 128)])
def test_gpu_whole_rows_have_a_kernel_without_a_mask(heads, kv_heads, head_dim):
    """llama-8b and others, qwen3-14b, phi-4, seed-oss-36b: torch does not fall back to logits written out."""
    q, k, v = (
        torch.empty(1, n, 131_072, head_dim, dtype=torch.bfloat16, device="cuda") for n in (heads, kv_heads, kv_heads)
    )
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    assert choice != int(torch.nn.attention.SDPBackend.MATH)
