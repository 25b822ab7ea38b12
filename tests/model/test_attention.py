"""Packed rows give every example what it gets alone, on every backend."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import COMMON, OTHERS, SEVEN, packed, tiny_config, tiny_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.command.cli import main
from penstock.errors import ModelError
from penstock.model.attention import VARLEN, Segments, attend, attention_inputs, stock_attention, use_attention
from penstock.model.decoder import find_decoder
from penstock.model.loss import packed_loss

CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# What a model cannot do is refused, not computed wrongly.
CANNOT = {
    ("gpt_oss", "sdpa"), ("gemma2", "varlen"), ("gemma2", "sdpa"), ("stablelm", "varlen"), ("gptj", "varlen"),
    ("gptj", "sdpa"),
}  # fmt: skip


def alone(model, examples):
    """Each example through the model by itself, with transformers' eager attention."""
    model.set_attn_implementation("eager")
    return [model(input_ids=example[None], use_cache=False).logits[0] for example in examples]


def losses(logits, examples):
    return [F.cross_entropy(x[:-1], e[1:], reduction="sum") for x, e in zip(logits, examples, strict=True)]


@pytest.mark.parametrize("backend", ["auto", "varlen", "sdpa", "eager"])
@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_packed_equals_alone(name, backend):
    """Logits, loss and gradients. Windows of the sliding models are shorter than the longest example."""
    model, batch = tiny_model(name), packed()
    expected = alone(model, batch.examples)
    expected_loss = sum(losses(expected, batch.examples))
    expected_loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    if (name, backend) in CANNOT:
        with pytest.raises(ModelError, match="cannot use"):
            use_attention(model, backend)
        return
    use_attention(model, backend)
    units = find_decoder(model)
    inputs = attention_inputs(units.backbone.config, tuple(batch.input_ids.shape), torch.float32, batch.segments)
    got = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **inputs).logits
    torch.testing.assert_close(got.flatten(0, 1), torch.cat(expected), rtol=0, atol=1e-5)
    loss = packed_loss(units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    loss.backward()
    for n, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[n], rtol=1e-4, atol=2e-5, msg=n)


@pytest.mark.parametrize("name", SEVEN)
def test_auto_is_varlen(name):
    assert use_attention(tiny_model(name), "auto") == "varlen"


@pytest.mark.parametrize(("name", "choice"), [("gemma2", "eager"), ("stablelm", "sdpa"), ("gptj", "eager")])
def test_auto_leaves_alone_what_varlen_would_get_wrong(name, choice):
    assert use_attention(tiny_model(name), "auto") == choice


def test_position_ids_alone_would_leak():
    """Why masks are made here: with position ids only, gpt-oss looks across boundaries."""
    model, batch = tiny_model("gpt_oss"), packed()
    expected = torch.cat(alone(model, batch.examples))
    got = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits.flatten(0, 1)
    assert (got - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2", "mistral"])
def test_generation_works_inside_stock_attention_and_training_after_it(name):
    model = tiny_model(name).eval()
    prompt = torch.tensor([[5, 6, 7, 8, 9, 10]])
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **settings)
    use_attention(model, "auto")
    training = model.config._attn_implementation
    with stock_attention(model):
        assert torch.equal(model.generate(prompt, **settings), expected)
    assert model.config._attn_implementation == training


def test_generation_outside_stock_attention_says_so():
    model = tiny_model("llama").eval()
    use_attention(model, "varlen")
    with pytest.raises(ModelError, match="without segments"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)


def test_flash_attention_without_its_package_names_the_remedy():
    with pytest.raises(ModelError, match=r"needs the package flash-attn\n.*--attention varlen"):
        use_attention(tiny_model("llama"), "flash_attention_2")


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_flash_attention_without_its_package_is_refused_before_anything_is_loaded(more, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("penstock.run.train.load_engine", None)
    words = ["train", "demo", "--attention", "flash_attention_2", "--output-dir", str(tmp_path / "run"), *more]
    assert main(words) == 2
    assert "--attention flash_attention_2: needs the package flash-attn" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_dropout_is_refused_by_varlen():
    config = tiny_config("llama")
    config.attention_dropout = 0.1
    model, batch = AutoModelForCausalLM.from_config(config).train(), packed()
    use_attention(model, "varlen")
    with pytest.raises(ModelError, match="dropout"):
        model.model(input_ids=batch.input_ids, position_ids=batch.position_ids, segments=batch.segments)


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        (
            "mamba",
            {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
            "(state|linear_attention)",
        ),
        ("lfm2", COMMON | {"layer_types": ["conv", "full_attention"]}, "conv"),
        (
            "falcon",
            {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "interface",
        ),
        ("bloom", {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2}, "interface"),
    ],
)
def test_models_that_mix_examples_by_other_ways_are_refused(kind, values, reason):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    with pytest.raises(ModelError, match=rf"cannot be trained on packed rows: .*{reason}"):
        use_attention(model, "auto")


def test_segments_must_rise_and_rows_begin_segments():
    with pytest.raises(AssertionError, match="must rise"):
        Segments.of((0, 3, 3), CPU)
    config = tiny_model("llama").config
    with pytest.raises(AssertionError, match="every row must begin a segment"):
        attention_inputs(config, (2, 4), torch.float32, Segments.of((0, 3, 8), CPU))
    with pytest.raises(AssertionError, match="segments end at 8, not 12"):
        attention_inputs(config, (3, 4), torch.float32, Segments.of((0, 4, 8), CPU))


def plain_attention(q, k, v, boundaries, window, sinks):
    """The definition: softmax over the allowed keys of the segment, the sink in the sum. fp64, (tokens, heads, d)."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64, device=q.device)
    for start, end in itertools.pairwise(boundaries):
        for token in range(start, end):
            first = start if window is None else max(start, token - window + 1)
            for head in range(q.shape[1]):
                logits = k[first : token + 1, head // groups] @ q[token, head] * q.shape[-1] ** -0.5
                total = torch.cat([logits, sinks[head : head + 1].double()]) if sinks is not None else logits
                weights = (logits - total.logsumexp(0)).exp()
                out[token, head] = weights @ v[first : token + 1, head // groups]
    return out


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 8),
    sink=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_attention_is_its_definition(lengths, window, sink, kv_heads):
    boundaries = [0, *itertools.accumulate(lengths)]
    total = boundaries[-1]
    q, k, v = (torch.randn(1, heads, total, 6) for heads in (4, kv_heads, kv_heads))
    sinks = torch.randn(4) if sink else None
    segments = Segments.of(boundaries, CPU)
    out, _ = attend(torch.nn.Module(), q, k, v, None, sliding_window=window, s_aux=sinks, segments=segments)
    flat = (x[0].transpose(0, 1) for x in (q, k, v))
    expected = plain_attention(*flat, boundaries, window, sinks)
    torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_layers_can_be_compiled():
    """Segments are plain inputs of a layer, so a compiled layer takes them (with breaks on the CPU, for now)."""
    model, batch = tiny_model("llama"), packed()
    units = find_decoder(model)
    use_attention(model, "auto")
    args = (units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    expected = packed_loss(*args)
    for layer in units.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    torch.testing.assert_close(packed_loss(*args), expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("boundaries", [(0, 1, 130, 384, 512, 1024), (0, 512, 1024)], ids=["packed", "alike"])
def test_gpu_kernels_equal_the_definition(head_dim, window, sink, boundaries):
    """bf16 on the GPU, forward and backward, against the same function in fp32, segment by segment."""
    shape = {"q": (2, 8, 512, head_dim), "k": (2, 2, 512, head_dim), "v": (2, 2, 512, head_dim)}
    low = {n: torch.randn(s, device="cuda").bfloat16().requires_grad_() for n, s in shape.items()}
    high = {n: x.detach().float().requires_grad_() for n, x in low.items()}
    sinks = torch.randn(8, device="cuda") if sink else None
    segments = Segments.of(boundaries, torch.device("cuda"))
    results = []
    for tensors in (low, high):
        s = sinks.clone().to(tensors["q"].dtype).requires_grad_() if sinks is not None else None
        out, _ = attend(torch.nn.Module(), *tensors.values(), None, sliding_window=window, s_aux=s, segments=segments)
        (out.float() * torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)).sum().backward()
        grads = [x.grad for x in tensors.values()] + ([s.grad] if s is not None else [])
        results.append([out.detach(), *grads])
    largest = max(expected.norm() for expected in results[1])  # with a window of one, queries have no gradient at all
    for got, expected in zip(*results, strict=True):
        error = (got.float() - expected).norm() / max(expected.norm(), 1e-2 * largest)
        assert error < 1e-2, f"relative error {error:.2e}"


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", SEVEN)
def test_gpu_packed_equals_alone(name):
    """A bf16 model on the GPU, packed, is as near to its fp32 self as transformers' own attention on each example."""
    model, batch = tiny_model(name), packed()
    exact = torch.cat(alone(model, batch.examples)).detach()
    model = model.to("cuda", torch.bfloat16)
    stock = torch.cat(alone(model, [e.cuda() for e in batch.examples])).detach().float().cpu()
    assert use_attention(model, "auto") == "varlen"
    segments = Segments.of(batch.segments.boundaries, torch.device("cuda"))
    inputs = {"input_ids": batch.input_ids.cuda(), "position_ids": batch.position_ids.cuda(), "segments": segments}
    got = model(**inputs, use_cache=False).logits.flatten(0, 1).float().cpu()
    assert model.config._attn_implementation == VARLEN
    # Token by token, in the middle: rounding sends a few tokens to another expert, a leak would reach most of them.
    theirs, ours = ((x - exact).norm(dim=-1).median() / exact.norm(dim=-1).median() for x in (stock, got))
    assert ours < 1.5 * theirs + 1e-3, f"{ours:.1e} against {theirs:.1e}"
