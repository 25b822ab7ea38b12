"""The same step again and again with compiled layers, to see whether its gradient ever is another one.

    python benchmarks/compiled_steps.py bf16|fp8 RECOMPUTE ROWS STEPS

A small llama with shapes for which kernels are fast; 4,096 tokens in ROWS rows. To be run beside others of its kind: a
race inside of a kernel shows where it is held up. The line has every step and weight whose gradient is off by more than
0.3, with the factor by which it is, and the shares of its rows and columns that are.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.model.attention import Segments, use_attention
from penstock.model.compiled import set_compile
from penstock.model.decoder import find_decoder
from penstock.model.loss import packed_loss
from penstock.model.matmul import set_matmul
from penstock.recipe.recipe import recompute_by_layer

TOKENS, MOST_OFF = 4096, 0.3


def gradients(model, rows):
    ids = torch.randint(3, 90, (rows, TOKENS // rows), generator=torch.Generator().manual_seed(0)).cuda()
    places = torch.arange(TOKENS // rows, device="cuda").expand(rows, -1)
    segments = Segments.of(range(0, TOKENS + 1, TOKENS // rows), torch.device("cuda"))
    index = torch.arange(TOKENS - 1, device="cuda")
    model.zero_grad()
    (packed_loss(find_decoder(model), ids, places, segments, index, ids.flatten()[1:]) / len(index)).backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def how(found, wanted):
    off = (found - wanted).norm() / wanted.norm()
    if off <= MOST_OFF:
        return None
    scale = (found * wanted).sum() / wanted.square().sum()
    parts = [((found - wanted).norm(dim=d) > MOST_OFF * wanted.norm(dim=d)).float().mean() for d in range(found.ndim)]
    return [round(float(x), 3) for x in (off, scale, *parts)]


def main(matmul, recompute, rows, steps):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
    layers = find_decoder(model).layers
    use_attention(model, "auto")
    set_matmul(model, layers, matmul)
    wanted = gradients(model, int(rows))
    set_compile(layers, True, print, recompute_by_layer(recompute, len(layers)))
    bad = []
    for step in range(int(steps)):
        found = gradients(model, int(rows))
        bad += [(step, name, off) for name in found if (off := how(found[name], wanted[name])) is not None]
    print(json.dumps({"matmul": matmul, "recompute": recompute, "rows": int(rows), "steps": int(steps),
                      "bad": len({step for step, *_ in bad}), "first": bad[:8]}))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
