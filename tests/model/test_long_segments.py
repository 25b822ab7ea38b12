"""Attention over segments of which some are long: as over each alone, by the rows' kernel and by that of segments."""

import itertools

import cpu_rows
import pytest
import torch
from tiny import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.model import attention, long_segments, row_attention
from penstock.model.attention import Segments, attend, use_attention
from penstock.model.compiled import set_compile
from penstock.model.decoder import find_decoder
from penstock.model.long_segments import attend_segments
from penstock.model.loss import packed_loss
from penstock.model.segment_attention import attend_segment
from penstock.recipe.recipe import recompute_by_layer

LAID_OUT = [
    (0, 40, 48),
    (0, 3, 40, 48),
    (0, 5, 9, 41, 48),
    (0, 20, 40, 48),
    (0, 4, 8, 28, 30, 33, 48),
    (0, 16, 32, 48),
]


def alone(q, k, v, boundaries, scale):
    """By the definition, segment by segment."""
    spans = itertools.pairwise(boundaries)
    return torch.cat([attend_segment(q[a:b], k[a:b], v[a:b], scale, None, None) for a, b in spans])


@pytest.fixture
def calls(monkeypatch):
    """Kernels of a CPU in the place of a GPU's, segments that are long from 16 tokens on, and which kernel had what."""
    found = []

    def kernel(q, k, v, scale):
        found.append(("row", q.shape[2]))
        return cpu_rows.kernel(q, k, v, scale)

    def backward(*saved):
        found.append(("row back", saved[1].shape[2]))
        return cpu_rows.backward_kernel(*saved)

    def short(q, k, v, boundaries, scale):
        found.append(("segments", boundaries))
        assert q.shape[0] == boundaries[-1]
        parts = [rows(cpu_rows.kernel, (q[a:b], k[a:b], v[a:b]), scale) for a, b in itertools.pairwise(boundaries)]
        outs, sums = zip(*parts, strict=True)
        return [torch.cat(outs), torch.cat(sums, dim=1)]

    def short_backward(saved, boundaries, scale):
        found.append(("segments back", boundaries))
        *tokens, sums = saved
        parts = [
            rows(cpu_rows.backward_kernel, [x[a:b] for x in tokens], sums[None, :, a:b].contiguous(), scale)
            for a, b in itertools.pairwise(boundaries)
        ]
        return [torch.cat(whole) for whole in zip(*parts, strict=True)]

    def rows(of_heads, tokens, *more):
        """That kernel, which wants a row with heads first, of tokens; tokens first again, if it is of tokens."""
        made = of_heads(*(x[None].transpose(1, 2).contiguous() for x in tokens), *more)
        return [x[0].transpose(0, 1) if x.ndim == 4 else x[0] for x in made]

    monkeypatch.setattr(long_segments, "LONG_SEGMENT", 16)
    monkeypatch.setattr(row_attention, "_kernel", kernel)
    monkeypatch.setattr(row_attention, "_backward_kernel", backward)
    monkeypatch.setattr(row_attention, "_is_cudnn", lambda *_: True)
    monkeypatch.setattr(long_segments, "_short", short)
    monkeypatch.setattr(long_segments, "_short_backward", short_backward)
    return found


def tokens(count=48, dtype=torch.float32, device="cpu", heads=(4, 2, 2), size=8):
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(count, number, size, generator=generator).to(device, dtype) for number in heads]
    return [x.requires_grad_() for x in found]


@pytest.mark.parametrize("boundaries", LAID_OUT)
def test_each_segment_is_attended_to_as_if_it_were_alone(calls, boundaries):
    q, k, v = tokens()
    gradient = torch.randn_like(q)
    ours = attend_segments(q, k, v, torch.tensor(boundaries), 0.3)
    theirs = alone(q, k, v, boundaries, 0.3)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), gradient) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)
    lengths = [b - a for a, b in itertools.pairwise(boundaries)]
    assert [size for name, size in calls if name == "row"] == [size for size in lengths if size >= 16]


def test_short_segments_side_by_side_are_one_call(calls):
    attend_segments(*tokens(), torch.tensor((0, 2, 6, 26, 30, 33, 48)), 0.3)
    assert calls == [("segments", (0, 2, 6)), ("row", 20), ("segments", (0, 4, 7, 22))]


@pytest.mark.parametrize(
    ("boundaries", "asked", "expected"),
    [
        ((0, 40, 48), {}, "long segments"),
        ((0, 24, 48), {}, "rows"),
        ((0, 8, 20, 32, 48), {}, "long segments"),
        ((0, 8, 20, 34, 48), {}, "others"),
        ((0, 40, 48), {"sliding_window": 8}, "others"),
        ((0, 40, 48), {"sliding_window": 40}, "long segments"),
        ((0, 40, 48), {"s_aux": torch.zeros(4)}, "others"),
    ],
)
def test_which_rows_are_attended_to_so(monkeypatch, calls, boundaries, asked, expected):
    ways = {"attend_rows": "rows", "attend_segments": "long segments", "_one_by_one": "others"}
    taken = []
    for name, way in ways.items():
        monkeypatch.setattr(attention, name, lambda q, *_, way=way: taken.append(way) or q)
    q, k, v = (x[None].transpose(1, 2) for x in tokens())
    attend(torch.nn.Module(), q, k, v, None, segments=Segments.of(boundaries, q.device), **asked)
    assert taken == [expected]


@pytest.mark.parametrize(("size", "of_values"), [(24, 16), (12, 12), (264, 264)])
def test_heads_that_the_kernel_of_segments_does_not_take(monkeypatch, size, of_values):
    """Those of multi-head latent attention have values of another size; cuDNN's kernel of whole rows takes them."""
    taken = []
    monkeypatch.setattr(long_segments, "LONG_SEGMENT", 16)
    monkeypatch.setattr(row_attention, "_is_cudnn", lambda *_: True)
    monkeypatch.setattr(attention, "attend_segments", lambda *_: pytest.fail("it was called"))
    monkeypatch.setattr(attention, "_flash", lambda *_: pytest.fail("it was called"))
    monkeypatch.setattr(attention, "_one_by_one", lambda q, k, v, *_: taken.append(v.shape) or v)
    with FakeTensorMode():  # which may say that it is on a GPU
        q, k, v = (torch.empty(1, 2, 48, n, device="cuda", dtype=torch.bfloat16) for n in (size, size, of_values))
        attend(torch.nn.Module(), q, k, v, None, segments=Segments((0, 40, 48), None, 40, False, None, True))
    assert taken == [(48, 2, of_values)]


def test_torchs_own_checks_of_the_operation(calls):
    torch.library.opcheck(long_segments._attend, (*tokens(), torch.tensor((0, 4, 40, 48)), 0.3))


def gradients(model, packings, recompute=None):
    """Of rows of 48 tokens. Compiled, unless `recompute` is None."""
    units = find_decoder(model)
    set_compile(units.layers, recompute is not None, pytest.fail, recompute_by_layer(recompute or "none", 2))
    ids = torch.randint(3, 90, (1, 48), generator=torch.Generator().manual_seed(0))
    found = []
    for boundaries in packings:
        model.zero_grad()
        packed_loss(
            units, ids, torch.arange(48)[None], Segments.of(boundaries, ids.device), torch.arange(47),
            ids.flatten()[1:],
        ).backward()  # fmt: skip
        found.append([p.grad.clone() for p in model.parameters()])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_only")
@pytest.mark.parametrize("recompute", ["none", "selected", "full"])
def test_compiled_layers_have_the_same_gradients_and_one_graph_for_all_packings(monkeypatch, calls, recompute):
    monkeypatch.setattr("penstock.model.compiled._in_one_piece", lambda layer: True)  # as on a GPU
    model = tiny_model("llama", num_hidden_layers=2)
    use_attention(model, "auto")
    packings = [*LAID_OUT[:3], (0, 17, 21, 22, 25, 48)]
    monkeypatch.setattr(row_attention, "_is_cudnn", lambda *_: False)
    plain = gradients(model, packings)
    assert not calls
    monkeypatch.setattr(row_attention, "_is_cudnn", lambda *_: True)
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for found, wanted in zip(gradients(model, packings, recompute), plain, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2
    forwards = 2 if recompute == "full" else 1
    rows = sum(b - a >= 16 for boundaries in packings for a, b in itertools.pairwise(boundaries))
    assert sum(name == "row" for name, _ in calls) == 2 * forwards * rows
    assert sum(name == "row back" for name, _ in calls) == 2 * rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.parametrize("boundaries", [(0, 900, 1024), (0, 30, 50, 500, 1024), (0, 300, 700, 1000, 1024)])
def test_gpu_kernels_equal_the_definition(monkeypatch, boundaries):
    """As near to fp32 as flash attention alone comes."""
    monkeypatch.setattr(long_segments, "LONG_SEGMENT", 256)
    device, scale = torch.device("cuda"), 64**-0.5
    exact = tokens(1024, torch.float32, device, (8, 2, 2), 64)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    gradient = torch.randn_like(exact[0])
    segments = Segments.of(boundaries, device)
    assert segments.has_long
    assert row_attention.is_fast(rounded[0], rounded[2])
    ways = {
        "exact": lambda: (exact, alone(*exact, boundaries, scale)),
        "ours": lambda: (rounded, attend_segments(*rounded, segments.on_host, scale)),
        "flash": lambda: (rounded, attention._flash(*rounded, segments.offsets, 1024, scale, None, None)),
    }
    found = {}
    for name, way in ways.items():
        leaves, out = way()
        found[name] = [out, *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]
    for exactly, ours, flash in zip(*found.values(), strict=True):
        off, usual = ((x.float() - exactly).norm() / exactly.norm() for x in (ours, flash))
        assert off <= 1.3 * usual + 1e-4
