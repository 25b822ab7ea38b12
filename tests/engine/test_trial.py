"""What a trial reads off the allocator, with one that is played by the test."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.engine.trial import (
    _as_documents_are,
    _length_to_compile,
    _period,
    _timed_layers,
    _Watch,
    _with_sums,
    full_batch,
    with_examples,
)
from penstock.model.attention import Segments, attend
from penstock.model.tiles import spans
from penstock.plan.split import Manner, Profile
from penstock.recipe.presets import PRESETS

MB = 1024**2


@pytest.fixture
def allocator(monkeypatch):
    """`allocator[0]` is in use, `allocator[1]` the most since somebody asked for it anew."""
    taken = [10 * MB, 10 * MB]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: taken[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: taken[1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: taken.__setitem__(1, taken[0]))
    return taken


@pytest.mark.parametrize("kept", [True, False])
def test_a_pass_that_keeps_its_gradients_shows_what_activations_take(allocator, kept):
    """Forward fills 12 MB; backward frees 4 for each of three gradients of 1, 6 and 2 MB, and needs 2 meanwhile."""
    watch = _Watch(torch.device("cuda"))
    parameters = [nn.Parameter(torch.zeros(size * MB // 4)) for size in (1, 6, 2)]

    def take(size):
        allocator[0] += size
        allocator[1] = max(allocator)

    watch.start()
    take(12 * MB)
    for parameter in parameters:
        take(parameter.nbytes + 2 * MB)
        take(-6 * MB)
        watch.came(parameter)
        if not kept:
            take(-parameter.nbytes)
    watch.stop()
    assert watch.peak() == (17 if kept else 16) * MB  # 8 + 6 + 2, and the first gradient
    assert (watch.peak_without_gradients() if kept else watch.peak()) == 16 * MB
    if not kept:
        assert watch.peak_with_gradients() == 17 * MB
        assert watch.peak_with_gradients() < watch.peak() + sum(p.nbytes for p in parameters)


def test_kinds_of_layers_that_repeat():
    assert [_period(kinds) for kinds in ("aaaa", "abab", "ababa", "aaabaaabaa", "a", "abc")] == [1, 2, 2, 4, 1, 3]


@pytest.mark.parametrize(("micro_batches", "held"), [(1, 0), (2, 2), (3, 4), (8, 4)])
def test_row_by_row_gradients_of_streamed_weights_wait_for_the_last_row(micro_batches, held):
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    found = _with_sums(Profile(1000, 1100), model.parameters(), Manner(in_backward=False), micro_batches)
    assert (found.activation_bytes, found.kept_bytes) == (1000 + held * 64, max(1100, 1000 + held * 64))


class Clock:
    """A device whose time passes as a test says, with events that remember it."""

    now = 0.0

    def __init__(self, **_):
        self.then = 0.0

    def record(self):
        self.then = Clock.now

    def elapsed_time(self, other):
        return 1e3 * (other.then - self.then)


class Peaks:
    def of(self, run):
        run(done=lambda layer: None)
        return 7


class Layer(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        Clock.now += self.seconds
        return x


@pytest.mark.parametrize(("kinds", "tried", "period"), [([1], 2, 1), ([1, 5], 4, 2), ([1], 1, 1)])
@pytest.mark.parametrize("calls", [1, 3])
def test_what_happens_once_is_not_taken_for_every_layer(monkeypatch, kinds, tried, period, calls):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    layers = [Layer(seconds) for seconds in kinds * 4]
    x = torch.zeros(1)

    def run(done):
        Clock.now += 40  # what the first forward asks for
        for layer in layers[-tried:]:
            for _ in range(calls):
                layer(x)
        Clock.now += 60  # the head
        for layer in reversed(layers[-tried:]):
            for _ in range(calls):
                layer(x)
                Clock.now += 2 * layer.seconds
            done(layer)

    mean = calls * sum(kinds) / len(kinds)
    expected = (mean, 3 * mean) if tried > 1 else (0, 0)
    assert _timed_layers(Peaks(), run, layers, calls, period) == (7, *(pytest.approx(s) for s in expected))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_short_examples_take_what_is_added_for_them():
    heads, size, tokens = 8, 128, 16_384
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=heads, head_dim=size))
    peaks = []
    for ends in ((0, 8_000, tokens), (0, 16, *range(32, tokens + 1, 32))):
        q, k, v = (
            torch.randn(1, n, tokens, size, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (heads, 2, 2)
        )
        segments = Segments.of(ends, q.device)
        assert not segments.alike
        out, _ = attend(nn.Module(), q, k, v, None, segments=segments)
        gradient = torch.randn_like(out)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, (q, k, v), gradient)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    added = with_examples(Profile(0.0, 0.0), config, 513 - 2).activation_bytes
    assert peaks[1] - peaks[0] == pytest.approx(added, rel=0.1)


def test_short_examples_take_more_than_the_trials():
    """Of llama-8b 2.1 MB each, in whatever way gradients are kept."""
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=32, hidden_size=4096))
    before = Profile(1e9, 3e9, {"a": 2e9}, forward_seconds=1.0)
    after = with_examples(before, config, 1_310)
    more = 1_310 * 128 * 4_096 * 4
    assert (after.activation_bytes, after.kept_bytes) == (1e9 + more, 3e9 + more)
    assert after.bytes_after == {"a": 2e9 + more}
    assert after.forward_seconds == 1.0
    assert with_examples(Profile(), config, 5) == Profile()


def test_long_rows_are_tried_as_documents_fill_them():
    """Not to the last token: attention of a row of several examples takes more memory than of a whole one."""
    found = _as_documents_are(full_batch(2, 65_536, 100))
    assert found.boundaries == (0, 65_280, 65_536, 130_816, 131_072)
    segments = Segments.of(found.boundaries, torch.device("cpu"))
    assert segments.has_long
    assert not segments.alike


@given(length=st.integers(65_536, 500_000), tile=st.sampled_from([4096, 8192, 16_384]))
def test_what_is_compiled_has_tiles_of_the_same_lengths(length, tile):
    recipe = dataclasses.replace(PRESETS["llama-8b"], max_length=length, order="layers", tile=str(tile))
    short = _length_to_compile(recipe)
    assert short <= length
    lengths = [{span.stop - span.start for span in spans(tokens, tile)} for tokens in (short, length)]
    assert lengths[0] == lengths[1]
    if length % tile == 0:
        assert short == 2 * tile
