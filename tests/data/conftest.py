"""Small real tokenizers, and chat templates in the manner of the models that Penstock trains."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from penstock.recipe.recipe import Recipe

LINES = ["The capital of France is Paris.", "Two and two make four.", "### Instruction:\n### Input:\n### Response:\n"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Thoughts are shown in the last answer only, where an empty block stands for none.
QWEN3 = r"""
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set thought, answer = '', m.content -%}
    {%- if '</think>' in m.content -%}
      {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set answer = m.content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {%- if loop.index0 > ns.last -%}
      {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + answer + '<|im_end|>\n' -}}
    {%- else -%}
      {{- '<|im_start|>assistant\n' + answer + '<|im_end|>\n' -}}
    {%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
HARMONY = (
    "{{ '<|start|>system<|message|>You are a model.<|end|>' }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content + eos_token }}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "harmony": HARMONY,
    "no-end": NO_END,
    "strict": STRICT,
}
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
}
NAMED = {
    "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen3": {"eos_token": "<|im_end|>"},
    "harmony": {"eos_token": "<|return|>"},
}


def build_tokenizer(kind=None, *, adds_bos=False, **named):
    """A byte-level BPE tokenizer with a few merges; `kind` names a chat template, None has none."""
    named = named or NAMED.get(kind, {"eos_token": "</s>"})
    special = list(dict.fromkeys([*SPECIAL.get(kind, []), *named.values()]))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    if adds_bos:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATES.get(kind)
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer():
    return build_tokenizer


@pytest.fixture(scope="session")
def chatml():
    return build_tokenizer("chatml")


@pytest.fixture(scope="session")
def plain():
    """No chat template; `</s>` ends a text."""
    return build_tokenizer(None)


@pytest.fixture
def write(tmp_path):
    """Write rows as JSONL, or bytes or text as they are, and return the path."""

    def write_file(content, name="my.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


@pytest.fixture
def recipe_for():
    def make(path, **fields):
        return Recipe(data=str(path), **fields)

    return make


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of this test's own."""
    root = tmp_path / "own-cache"
    monkeypatch.setenv("PENSTOCK_CACHE", str(root))
    return root


def alpaca(i, words=3):
    return {"instruction": f"Question {i}?", "input": "", "output": " ".join(["word"] * words) + f" {i}"}


@pytest.fixture(scope="session")
def alpaca_rows():
    """n rows of varying length."""
    return lambda n: [alpaca(i, words=1 + i * 7 % 23) for i in range(n)]
