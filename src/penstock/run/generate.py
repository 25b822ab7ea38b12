"""Answers from a trained model, asked the way it was trained."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from penstock.checkpoint.export import open_model
from penstock.checkpoint.places import Place
from penstock.data.template import prompt_text
from penstock.data.turns import Turn
from penstock.errors import RecipeError
from penstock.machine.hardware import pick_device
from penstock.model.attention import stock_attention
from penstock.recipe.recipe import Recipe


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    prompt: str,
    *,
    earlier: Sequence[Turn] = (),
    max_new_tokens: int = 64,
    temperature: float = 0.0,
) -> str:
    """What the model says to `prompt` after `earlier` turns: the likeliest tokens, or drawn ones with a temperature."""
    if not prompt.isascii() and any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes that are no letters
        remedy = "Give it in UTF-8: iconv -f LATIN1 -t UTF-8 converts Latin-1."
        raise RecipeError("is not UTF-8", where=f"question {prompt!r}", remedy=remedy)
    text = prompt_text(tokenizer, recipe, prompt, earlier)
    # Some tokenizers would add token_type_ids, which `generate` refuses where the model takes none.
    inputs = tokenizer(text, add_special_tokens=False, return_token_type_ids=False, return_tensors="pt")
    inputs = inputs.to(model.device)
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
            logits_processor=LogitsProcessorList([_Together()] if isinstance(model, FSDPModule) else []),
        )
    model.train(was_training)
    reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(reply).strip()


class _Together(LogitsProcessor):
    """Ranks that hold a model together choose the first one's tokens.

    Each would choose by what it computed itself. Where GPUs of two kinds round a near tie otherwise, one would end its
    answer and the others wait for it without end.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.contiguous()
        dist.broadcast(scores, 0)
        return scores


class Chat:
    """A trained model, and a conversation with it."""

    def __init__(self, place: Place, max_new_tokens: int, temperature: float, seed: int, device: str) -> None:
        if max_new_tokens < 1:
            remedy = "256 is the default."
            raise RecipeError("must be at least 1", where=f"--max-new-tokens {max_new_tokens}", remedy=remedy)
        if not 0 <= temperature < math.inf:
            remedy = "0 takes the likeliest token every time; 0.7 draws among them."
            raise RecipeError("must not be negative", where=f"--temperature {temperature}", remedy=remedy)
        if not 0 <= seed < 2**32:
            remedy = "0 is the default."
            raise RecipeError("must be between 0 and 4294967295", where=f"--seed {seed}", remedy=remedy)
        opened = open_model(
            place,
            lambda text: print(text, file=sys.stderr),
            lambda other: shlex.join(["penstock", "generate", str(other)]),
            pick_device(device),
        )
        self._model, self._tokenizer, self._recipe = opened.model, opened.tokenizer, opened.recipe
        torch.manual_seed(seed)
        self._max_new_tokens, self._temperature = max_new_tokens, temperature
        self._turns: list[Turn] = []

    def ask(self, prompt: str) -> str:
        """The model's answer, with all that was said before in view."""
        reply = answer(
            self._model,
            self._tokenizer,
            self._recipe,
            prompt,
            earlier=self._turns,
            max_new_tokens=self._max_new_tokens,
            temperature=self._temperature,
        )
        self._turns += [Turn("user", prompt), Turn("assistant", reply)]
        return reply


END_WORDS = ("exit", "quit")


def questions(lines: TextIO, *, invite: str = "") -> Iterator[str]:
    """Lines that say something, up to `exit` or the end. From a terminal they are asked for, with line editing."""
    if invite:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines once it is imported
    while True:
        try:
            line = input(invite) if invite else lines.readline()
        except EOFError:  # Ctrl-D
            print()
            return
        if (not invite and not line) or line.strip().lower() in END_WORDS:
            return
        if line.strip():
            yield line.strip()
