"""Answers from a trained model, asked the way it was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from penstock.checkpoint.run_dir import find_model, run_recipe
from penstock.data.template import prompt_text
from penstock.hardware import pick_device
from penstock.model.attention import stock_attention
from penstock.recipe import Recipe


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
) -> str:
    """What the model says to `prompt`: the likeliest tokens, or drawn ones with a temperature."""
    text = prompt_text(tokenizer, recipe, prompt)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
    was_training = model.training
    model.eval()
    with stock_attention(model):
        output = model.generate(  # type: ignore[operator]
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_p=None,
            top_k=None,
        )
    model.train(was_training)
    reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(reply).strip()


def generate(run: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int, device: str) -> str:
    """An answer from the exported model of a run."""
    directory, recipe = find_model(run), run_recipe(run)
    target = pick_device(device)
    torch.manual_seed(seed)
    trust = {"trust_remote_code": recipe.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(directory, **trust)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", device_map={"": target}, **trust)
    return answer(model, tokenizer, recipe, prompt, max_new_tokens=max_new_tokens, temperature=temperature)
