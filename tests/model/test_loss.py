"""The chunked loss is plain cross-entropy, and sees the logits that the model itself computes."""

import dataclasses

import pytest
import torch
from tiny import COMMON, OTHERS, SEVEN, packed, tiny_config, tiny_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import ModelError
from penstock.model import loss as loss_module
from penstock.model.attention import use_attention
from penstock.model.decoder import find_decoder
from penstock.model.load import drop_dropout
from penstock.model.loss import check_logits, loss_sum, packed_loss
from penstock.model.recompute import set_recompute
from penstock.recipe.recipe import recompute_by_layer

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def plain(hidden, weight, bias, targets, scale, softcap):
    logits = hidden @ weight.t()
    logits = (logits if bias is None else logits + bias) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="sum")


def inputs(tokens, size=24, vocab=50, *, with_bias=False, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * 0.5
    bias = torch.randn(vocab, generator=generator) if with_bias else None
    targets = torch.randint(vocab, (tokens,), generator=generator)
    leaves = [None if x is None else x.to(device, dtype).requires_grad_() for x in (hidden, weight, bias)]
    return leaves, targets.to(device)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, None), (1.0, 5.0), (2.0, 4.0)])
def test_equals_cross_entropy_with_gradients(monkeypatch, chunk, with_bias, scale, softcap):
    monkeypatch.setattr(loss_module, "_rows_at_once", lambda _: chunk)
    leaves, targets = inputs(20, with_bias=with_bias)
    expected = plain(*leaves, targets, scale, softcap)
    (expected * 0.5).backward()
    gradients = [None if x is None else x.grad for x in leaves]
    again, _ = inputs(20, with_bias=with_bias)
    got = loss_sum(*again, targets, scale=scale, softcap=softcap)
    (got * 0.5).backward()
    torch.testing.assert_close(got, expected)
    for leaf, gradient in zip(again, gradients, strict=True):
        if leaf is not None:
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-5)


def relative_errors(dtype, device):
    """Loss and gradients by bf16 inputs, against fp64 on the same inputs."""
    leaves, targets = inputs(300, 64, 1000, dtype=dtype, device=device)
    exact = [x.detach().double().requires_grad_() if x is not None else None for x in leaves]
    expected = plain(*exact, targets, 1.0, None)
    expected.backward()
    got = loss_sum(*leaves, targets)
    got.backward()
    assert got.dtype == torch.float32
    pairs = [(got, expected), *((a.grad, b.grad) for a, b in zip(leaves[:2], exact[:2], strict=True))]
    return [float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs]


def test_bf16_inputs_lose_only_the_last_rounding(monkeypatch):
    """fp32 between: the loss is exact to 1e-6, gradients to one rounding (2^-9 at most, 1.7e-3 on average)."""
    monkeypatch.setattr(loss_module, "_rows_at_once", lambda _: 16)
    loss, hidden, weight = relative_errors(torch.bfloat16, "cpu")
    assert loss < 1e-6
    assert hidden < 2e-3
    assert weight < 2e-3


@pytest.mark.parametrize("trained", [512, 500, 777])
def test_the_mean_over_any_number_of_tokens_rounds_gradients_once(trained):
    """Rounded in forward and again when backward divides, they were 1.4 times as far off."""
    errors = {}
    for divisor in (1, trained):
        leaves, targets = inputs(300, 64, 1000, dtype=torch.bfloat16)
        exact = [x.detach().double().requires_grad_() if x is not None else None for x in leaves]
        (plain(*exact, targets, 1.0, None) / divisor).backward()
        (loss_sum(*leaves, targets) / divisor).backward()
        pairs = [(a.grad.double(), b.grad) for a, b in zip(leaves[:2], exact[:2], strict=True)]
        errors[divisor] = [float((a - b).norm() / b.norm()) for a, b in pairs]
    assert errors[trained] == pytest.approx(errors[1], rel=0.03)


@pytest.mark.gpu
@NEEDS_GPU
def test_gpu_bf16_inputs_lose_little(monkeypatch):
    """There the gradient of the logits is rounded too, for the tensor cores; the sum over chunks is still fp32."""
    monkeypatch.setattr(loss_module, "_rows_at_once", lambda _: 16)
    loss, hidden, weight = relative_errors(torch.bfloat16, "cuda")
    assert loss < 1e-5
    assert hidden < 4e-3
    assert weight < 4e-3


def test_logits_are_never_all_in_memory(monkeypatch):
    """Nothing that autograd keeps, and no tensor made on the way, has tokens x vocabulary elements."""
    monkeypatch.setattr(loss_module, "_rows_at_once", lambda _: 8)
    leaves, targets = inputs(64)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor))
            return out

    with Watch():
        loss_sum(*leaves, targets).backward()
    assert max(sizes) <= max(8 * 50, 64 * 24)


def test_no_targets_give_zero_and_zero_gradients():
    leaves, targets = inputs(0)
    loss = loss_sum(*leaves, targets)
    loss.backward()
    assert loss == 0
    assert torch.equal(leaves[1].grad, torch.zeros_like(leaves[1]))


def test_without_gradients_only_the_loss_is_computed():
    leaves, targets = inputs(20)
    with torch.no_grad():
        loss = loss_sum(*leaves, targets)
    torch.testing.assert_close(loss, plain(*leaves, targets, 1.0, None).detach())


@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_models_logits_are_understood(name):
    model = tiny_model(name)
    units = find_decoder(model)
    use_attention(model, "auto")
    for mode in (True, False):
        check_logits(model.train(mode), units)
        assert model.training == mode


def test_logits_treated_in_an_unknown_way_are_refused():
    model = tiny_model("granite")
    units = find_decoder(model)
    use_attention(model, "auto")
    ignorant = dataclasses.replace(units, head=dataclasses.replace(units.head, scale=1.0))
    with pytest.raises(ModelError, match="treats its logits in a way that is not known"):
        check_logits(model, ignorant)


def test_a_model_that_draws_at_random_while_it_trains_is_refused(said):
    """PhiMoE draws which of the experts with nearly equal scores it takes; by its own code, not by a setting."""
    near = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.5}
    config = AutoConfig.for_model("phimoe", **COMMON | near)
    drop_dropout(config, said.append)
    assert (config.router_jitter_noise, said) == (0.5, []), "it weighs experts in inference too"
    with pytest.raises(ModelError, match="computes otherwise while it trains"):
        checked(config)


def test_noise_that_a_setting_adds_is_switched_off(said):
    noisy = tiny_config("mixtral", router_jitter_noise=0.1)
    with pytest.raises(ModelError, match="computes otherwise while it trains"):
        checked(noisy)
    drop_dropout(noisy, said.append)
    assert noisy.router_jitter_noise == 0.0
    assert said == ["  router_jitter_noise = 0.1 in the model's config is set to 0: Penstock trains without noise"]
    checked(noisy)


def checked(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    units = find_decoder(model)
    use_attention(model, "auto")
    check_logits(model, units)


@pytest.mark.parametrize("recompute", [pytest.param("full", marks=pytest.mark.slow), "none", "selected:1"])
@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_one_training_step_lowers_the_loss(name, recompute):
    model, batch = tiny_model(name), packed()
    units = find_decoder(model)
    use_attention(model, "auto")
    set_recompute(units.layers, recompute_by_layer(recompute, len(units.layers)))
    args = (units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = packed_loss(*args)
    before.backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None]
    assert not unused
    optimizer.step()
    assert packed_loss(*args) < before


def test_only_trained_positions_count():
    model, batch = tiny_model("llama"), packed()
    units = find_decoder(model)
    use_attention(model, "auto")
    ids = (batch.input_ids, batch.position_ids, batch.segments)
    parts = [packed_loss(units, *ids, batch.target_index[i], batch.targets[i]) for i in (slice(5), slice(5, None))]
    whole = packed_loss(units, *ids, batch.target_index, batch.targets)
    torch.testing.assert_close(sum(parts), whole)


def test_hooks_of_the_head_run_though_the_loss_bypasses_its_forward():
    """An engine waits for the head's update in such a hook, and FSDP gathers its shards in one."""
    model, batch = tiny_model("llama"), packed()
    units = find_decoder(model)
    use_attention(model, "auto")
    calls = []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.lm_head.register_forward_hook(lambda *_: calls.append("after"))
    packed_loss(units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    assert calls == ["before", "after"]
    assert "forward" not in vars(model.lm_head)
