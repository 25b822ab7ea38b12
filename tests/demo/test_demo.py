"""The embedded demo: its examples are clean, its tokenizer is lossless, its model is small and does not answer yet."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

DEMO = Path(__file__).parents[2] / "src/penstock/demo"
MODEL = DEMO / "model"

Example = dict[str, str]


@cache
def load_examples() -> list[Example]:
    return [json.loads(line) for line in (DEMO / "examples.jsonl").read_bytes().decode("utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    # fp32: without bf16 instructions one bf16 forward of this model takes a minute
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


def prompt_of(example: Example) -> str:
    return "\n\n".join(part for part in (example["instruction"], example["input"]) if part)


def render(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[str, str]:
    """The prompt as it is when an answer is due, and the prompt with its answer."""
    user = {"role": "user", "content": prompt_of(example)}
    assistant = {"role": "assistant", "content": example["output"]}
    apply: Callable[..., Any] = tokenizer.apply_chat_template
    return apply([user], tokenize=False, add_generation_prompt=True), apply([user, assistant], tokenize=False)


def test_examples_have_exactly_the_three_columns() -> None:
    examples = load_examples()
    assert 320 <= len(examples) <= 400
    for example in examples:
        assert list(example) == ["instruction", "input", "output"], example
        assert all(isinstance(value, str) and value == value.strip() for value in example.values()), example
        assert example["instruction"], example
        assert example["output"], example


def test_examples_have_no_duplicates() -> None:
    prompts = [(example["instruction"], example["input"]) for example in load_examples()]
    assert len(set(prompts)) == len(prompts)


def test_some_examples_have_an_input() -> None:
    examples = load_examples()
    assert 0.15 <= sum(bool(example["input"]) for example in examples) / len(examples) <= 0.25


def test_examples_hold_no_broken_or_invisible_characters() -> None:
    for example in load_examples():
        text = "".join(example.values())
        assert text.isprintable(), example
        assert "\ufffd" not in text, example


def test_tokenizer_is_lossless(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in [value for example in load_examples() for value in example.values()] + ["naïve 水 \n\t 3.14"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|pad|>", None)
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"):
        assert tokenizer(token)["input_ids"] == [tokenizer.convert_tokens_to_ids(token)]
    assert tokenizer.decode(tokenizer("<|im_start|>a<|im_end|>")["input_ids"], skip_special_tokens=True) == "a"


def test_prompt_is_a_prefix_of_the_full_rendering(tokenizer: PreTrainedTokenizerFast) -> None:
    for example in load_examples():
        prompt, full = render(tokenizer, example)
        assert full == prompt + example["output"] + "<|im_end|>\n"
        prompt_ids, full_ids = tokenizer(prompt)["input_ids"], tokenizer(full)["input_ids"]
        assert full_ids[: len(prompt_ids)] == prompt_ids
        assert len(full_ids) <= 128


def test_model_is_small_and_its_ids_are_the_tokenizers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert 2e6 <= model.num_parameters() <= 6e6
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) < 12e6
    assert json.loads((MODEL / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.vocab_size == len(tokenizer)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.generation_config.do_sample is False


@pytest.mark.parametrize(("start", "end"), [("The capital of France is", " Paris."), ("Bees make", " honey.")])
def test_base_model_knows_its_world(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, start: str, end: str
) -> None:
    assert complete(model, tokenizer, start, max_new_tokens=6).startswith(end)


def test_base_model_does_not_answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    examples = load_examples()
    for example in examples[:: len(examples) // 5]:
        prompt, _ = render(tokenizer, example)
        reply = complete(model, tokenizer, prompt, max_new_tokens=32)
        assert not reply.startswith(example["output"])  # it may say the fact while it rambles on, but not as an answer
        assert "<|im_end|>" not in reply


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, max_new_tokens: int) -> str:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        reply = cast(Any, model).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens)
    return str(tokenizer.decode(reply[0, ids.shape[1] :]))
