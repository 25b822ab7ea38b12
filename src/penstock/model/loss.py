"""The loss of packed rows, without all logits in memory.

Logits are the largest tensor of a step: 16,384 tokens of Llama-8B have 8.4 GB of them in fp32. So tokens are taken in
chunks, and each chunk's gradients are computed in forward, while its logits are there; backward only scales them. Only
positions that are trained on get logits at all.

Everything between the two matrix products is fp32. Gradients stay fp32 until backward has scaled them, the weight's as
a sum over all chunks, and are rounded once.

torch 2.13 has this operation too, `F.linear_cross_entropy`. It is not used: on bf16 inputs (1,024 tokens, size 576,
vocabulary 16,384, CPU) it returns the loss itself in bf16, 3.7e-3 off the fp64 value where this one is off by 1.6e-8;
the weight's gradient is off by 3.2e-3 against 1.7e-3 (one rounding); it took 12.7 s against 6.7 s. It knows no caps on
logits, and torch 2.11 does not have it, so that two versions would train differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ModelError
from penstock.model.attention import Segments, attention_inputs
from penstock.model.decoder import Decoder, Head

_CHUNK_BYTES = {"cuda": 2**29, "cpu": 2**28}
"""fp32 logits of one chunk. The sum of the weight's gradient is read and written once a chunk, 2.1 GB in fp32 for
Llama-8B, so chunks must not be small: on an H200, 16,384 tokens take 0.106 s in chunks of 2,048 (488 TFLOP/s, 4.9 GB at
the peak, as fast as plain cross-entropy with all logits), and took 0.202 s in chunks of 512."""


def packed_loss(
    decoder: Decoder, input_ids: Tensor, position_ids: Tensor, segments: Segments, target_index: Tensor, targets: Tensor
) -> Tensor:
    """Sum of the cross-entropies of `targets`, predicted at the positions `target_index` of the flattened rows."""
    hidden = hidden_states(decoder, input_ids, position_ids, segments)
    return head_loss(decoder.head, hidden.flatten(0, 1).index_select(0, target_index), targets)


def loss_sum(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Sum of token cross-entropies in fp32, for `hidden` (tokens, size) and `targets` (tokens).

    The logits of a token are softcap(scale * (weight @ hidden + bias)).
    """
    loss: Tensor = _LossSum.apply(hidden, head_weight, head_bias, targets, scale, softcap)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def check_logits(model: PreTrainedModel, decoder: Decoder) -> None:
    """Prove on a few tokens that the loss sees the logits the model itself computes.

    Some models divide, cap or otherwise treat their logits after the head, each in its own way and under its own config
    names. A loss that misses one trains quietly in the wrong direction.

    And prove that they are the same while the model trains: what is drawn at random differs between micro-batches.
    """
    device = decoder.head.weight.device
    ids = torch.arange(8, device=device).view(1, 8) % decoder.head.weight.shape[0]
    positions = torch.arange(8, device=device).view(1, 8)
    segments = Segments.of((0, 8), device)
    was_training = model.training

    def logits() -> Tensor:
        """FSDP2 gathers the rows of the ranks in a call."""
        return call_as(model, lambda ids: _plain_logits(decoder, ids, positions, segments), ids)

    model.eval()
    try:
        ours = logits()
        inputs = attention_inputs(decoder.backbone.config, (1, 8), decoder.backbone.dtype, segments)
        theirs = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits.float()
        model.train()
        training = logits()
    finally:
        model.train(was_training)
    tolerance = (1e-4 if decoder.backbone.dtype == torch.float32 else 2e-2) * float(theirs.abs().max())
    if not torch.allclose(ours, theirs[0], rtol=0, atol=tolerance):
        raise ModelError(
            f"treats its logits in a way that is not known here: they differ from the head's by "
            f"up to {float((ours - theirs[0]).abs().max()):.3g}, so the loss would be wrong",
            where=type(model).__name__,
            remedy="It cannot be trained with this version; please report its name.",
        )
    if not torch.allclose(training, ours, rtol=0, atol=tolerance):
        raise ModelError(
            f"computes otherwise while it trains, as if it drew at random (as PhiMoE does to choose experts): its "
            f"logits differ by up to {float((training - ours).abs().max()):.3g}, so micro-batches would not add up",
            where=type(model).__name__,
            remedy="It cannot be trained with this version.",
        )


def _plain_logits(decoder: Decoder, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
    """Logits of the first row, as the loss sees them."""
    head = decoder.head
    hidden = hidden_states(decoder, input_ids, position_ids, segments)
    return call_as(head.module, lambda x: _logits(x[0], head.weight, head.bias, head.scale, head.softcap), hidden)


def hidden_states(decoder: Decoder, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
    """What the head is given, of packed rows."""
    shape = (input_ids.shape[0], input_ids.shape[1])
    inputs = attention_inputs(decoder.backbone.config, shape, decoder.backbone.dtype, segments)
    output = decoder.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, **inputs)
    hidden: Tensor = output.last_hidden_state
    return hidden


def head_loss(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """The loss, computed inside a call of the head's module."""

    def forward(hidden: Tensor) -> Tensor:
        return loss_sum(hidden, head.weight, head.bias, targets, scale=head.scale, softcap=head.softcap)

    return call_as(head.module, forward, hidden)


def call_as(module: nn.Module, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Run `forward` inside a call of the module, with at least one input: on a GPU, FSDP2 fails without any.

    A hook that waits for the module's update, or that gathers its rows, runs when the module is called; reading the
    weights from outside would pass it by.
    """
    with forward_replaced(module, forward):
        result: Tensor = module(*inputs)
    return result


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Calls of the module run another function inside; its hooks run as ever."""
    overridden = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if overridden is None:
            del module.forward
        else:
            module.forward = overridden


class _LossSum(torch.autograd.Function):
    """Chunked over tokens; gradients are made in forward, where the logits are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        weight = weight.detach()
        if weight.is_cpu:  # products of bf16 are emulated on most CPUs, and round: one copy in fp32 is faster and exact
            weight = weight.float()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if need_bias else None
        rows = _rows_at_once(weight)
        for start in range(0, hidden.shape[0], rows):
            chunk, target = hidden[start : start + rows].detach(), targets[start : start + rows, None]
            logits = _logits(chunk, weight, bias, scale, softcap)
            lse = logits.logsumexp(dim=-1, keepdim=True)
            loss += (lse - logits.gather(-1, target)).sum()
            if grad_hidden is None and grad_weight is None and grad_bias is None:
                continue
            grad = _grad_logits(logits, lse, target, scale, softcap)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = _product(grad, weight)
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), chunk)
        ctx.grads = [grad_hidden, grad_weight, grad_bias]
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.grads is not None, "backward of the loss runs once"
        (grad,) = grads
        unscaled, ctx.grads = ctx.grads, None
        rounded: list[Tensor | None] = []
        while unscaled:  # one after another: the weight's is large in fp32
            g, dtype = unscaled.pop(0), ctx.dtypes[len(rounded)]
            rounded.append(None if g is None else g.mul_(grad).to(dtype))
        return (*rounded, None, None, None)


def _rows_at_once(weight: Tensor) -> int:
    return max(1, _CHUNK_BYTES.get(weight.device.type, 2**28) // (4 * weight.shape[0]))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """In fp32, also from bf16: rounding them to bf16 would put an error of 2^-9 of the logit on every token's loss."""
    logits = _product(hidden, weight.t())
    if bias is not None:
        logits += bias.detach()
    if scale != 1.0:
        logits *= scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def _grad_logits(logits: Tensor, lse: Tensor, target: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Gradient by the head's plain output: softmax minus one-hot, through cap and scale."""
    slope = scale if softcap is None else scale * (1 - (logits / softcap) ** 2)  # of tanh, from its value
    grad = logits.sub_(lse).exp_() if softcap is None else (logits - lse).exp_()
    grad.scatter_add_(-1, target, grad.new_full((), -1.0).expand_as(target))
    return grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product in fp32. On a GPU 16-bit operands stay as they are and only the result is fp32."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product to `total`, in fp32."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
