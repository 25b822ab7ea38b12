"""Make the demo's base model and tokenizer, `src/penstock/demo/model/`, from the text in this repository.

    python scripts/make_demo.py        two minutes with an H200, hours without a GPU

`penstock train demo` must show a real fine-tuning run in a minute, with no GPU and no network. So the model is small
(3.2 M parameters), and it is pretrained here on a world as small as itself: the facts of `demo_corpus.txt`, each stated
in many ways, and little stories. It has read that the capital of France is Paris. It has never seen a question
with its answer, nor the chat form; that is what the examples in `src/penstock/demo/examples.jsonl` then teach it.

Rejected: random weights (a minute is enough to learn how to answer, not English as well); a published model (the
smallest useful one is 40 times as large and needs the network); scraped text (licences, and no penstocks in it).

The same machine gives the same bytes. Another sums in another order: another model, as good. Much shorter training
was tried and rejected: the model then knows its facts but cannot carry a word from a question into its answer.
"""

import itertools
import math
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS = Path("scripts/demo_corpus.txt")
TARGET = Path("src/penstock/demo/model")

SEED = 42
NUM_STORIES = 500
VOCAB_SIZE = 2048
END_OF_TEXT, START, END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ROW_LENGTH, NUM_ROWS, NUM_STEPS = 256, 64, 3000
PEAK_LR, WARMUP_STEPS, WEIGHT_DECAY = 3e-3, 100, 0.1

UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


@dataclass(frozen=True)
class Table:
    """Facts of one kind, and the ways to state one of them. A table with one column and no patterns is a word list."""

    name: str
    columns: list[str]
    rows: list[list[str]]
    patterns: list[str]


def read_tables(path: Path) -> dict[str, Table]:
    """Parse the corpus file; its head says how it is written."""
    tables: dict[str, Table] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("@ "):
            name, _, columns = line[2:].partition(":")
            table = tables[name] = Table(name, [c.strip() for c in columns.split(",") if c.strip()], [], [])
        elif line.startswith("> "):
            table.patterns.append(line[2:])
        elif line and not line.startswith("#"):
            table.rows.append(line.split(" | "))
    return tables


def in_words(number: int) -> str:
    """Up to one hundred."""
    if number < 20:
        return UNITS[number]
    ten, unit = divmod(number, 10)
    return "one hundred" if ten == 10 else TENS[ten] + (f"-{UNITS[unit]}" if unit else "")


def state_number_facts(rng: random.Random) -> list[str]:
    """Sums, differences, products and halves of small numbers, in digits and words, and numbers put in order."""
    facts = []
    for a, b in itertools.product(range(1, 11), repeat=2):
        plus, minus, times = (a, "+", "plus", b, a + b), (a + b, "-", "minus", b, a), (a, "x", "times", b, a * b)
        for x, sign, word, y, z in (plus, minus, times):
            digits, words = f"{x} {sign} {y}", f"{in_words(x)} {word} {in_words(y)}"
            facts += [f"{digits} = {z}.", f"The class had to work out {digits}. {digits} = {z}."]
            for said in ("", f"The class had to work out {words}. "):
                facts.append(said + f"{words} is {in_words(z)}.".capitalize())
    for a in range(1, 11):
        facts.append(f"Half of {in_words(2 * a)} is {in_words(a)}.")
    for _ in range(200):
        numbers = rng.sample(range(1, 21), 3)
        low, mid, high = sorted(numbers)
        given = ", ".join(map(str, numbers))
        facts.append(f"The numbers are {given}. From smallest to largest they are {low}, {mid}, {high}.")
        facts.append(f"The numbers are {given}. From largest to smallest they are {high}, {mid}, {low}.")
        facts.append(f"The numbers are {given}. The largest number is {high}. The smallest number is {low}.")
    return facts


def state_word_facts(tables: dict[str, Table], rng: random.Random) -> list[str]:
    """Words of the lists put in alphabetical order, so that a list can be an answer too."""
    words = [row[0] for name in ("animal", "place", "thing", "colour") for row in tables[name].rows]
    facts = []
    for _ in range(200):
        chosen = rng.sample(words, 3)
        facts.append(f"The words are {', '.join(chosen)}. In alphabetical order they are {', '.join(sorted(chosen))}.")
    return facts


def fill(pattern: str, words: dict[str, str], tables: dict[str, Table], rng: random.Random) -> str:
    """The pattern with `words` in its slots; {name} and {name2} get different words of the table `name`."""
    words = dict(words)
    for slot in re.findall(r"{(\w+)}", pattern):
        if slot not in words:
            kind = slot.rstrip("2")
            table = tables.get(kind) or next(table for table in tables.values() if kind in table.columns)
            column = table.columns.index(kind)
            words[slot] = rng.choice([row[column] for row in table.rows if row[column] not in words.values()])
    return re.sub(r"(^|[.!?] )([a-z])", lambda match: match[1] + match[2].upper(), pattern.format(**words))


def write_documents(tables: dict[str, Table], rng: random.Random) -> list[str]:
    """An epoch of prose: every fact in every way, next to facts of its kind; then every fact in three ways at once."""
    documents = group(state_number_facts(rng), rng) + group(state_word_facts(tables, rng), rng)
    for table in tables.values():
        if not table.columns:
            documents += [fill(rng.choice(table.patterns), {}, tables, rng) for _ in range(NUM_STORIES)]
        elif table.patterns:
            rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            for pattern in table.patterns:
                documents += group([fill(pattern, row, tables, rng) for row in rows], rng)
            for row in rows:
                documents.append(" ".join(fill(pattern, row, tables, rng) for pattern in rng.sample(table.patterns, 3)))
    rng.shuffle(documents)
    return documents


def group(sentences: list[str], rng: random.Random) -> list[str]:
    """Documents of three sentences, in random order."""
    shuffled = rng.sample(sentences, len(sentences))
    return [" ".join(shuffled[i : i + 3]) for i in range(0, len(shuffled), 3)]


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string round-trips, and most words of this small world are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, START, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = ["user", "assistant"] * 100  # words of the chat template, which no prose has at the start of a text
    tokenizer.train_from_iterator(documents + roles, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[END_OF_TEXT, START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        add_bos_token=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Wide rather than deep: on a CPU four layers of 256 are faster than eight of 192."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def cut_rows(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """The documents end to end, each with its separator, cut into rows of equal length."""
    stream = [token for ids in tokenizer([text + END_OF_TEXT for text in documents])["input_ids"] for token in ids]
    num_rows = len(stream) // ROW_LENGTH
    return torch.tensor(stream[: num_rows * ROW_LENGTH]).view(num_rows, ROW_LENGTH)


def lr_at(step: int) -> float:
    """Linear warmup, then a cosine to a twentieth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (NUM_STEPS - WARMUP_STEPS)
    return PEAK_LR * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tables: dict[str, Table], rng: random.Random
) -> None:
    """Next-token prediction. Every epoch is written anew, so that facts can be learned by heart but texts cannot."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    epochs = (cut_rows(write_documents(tables, rng), tokenizer) for _ in itertools.count())
    batches = (batch for rows in epochs for batch in rows.split(NUM_ROWS) if len(batch) == NUM_ROWS)
    start = time.monotonic()
    for step, batch in zip(range(NUM_STEPS), batches, strict=False):
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_at(step)
        batch = batch.to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == NUM_STEPS - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.monotonic() - start:4.0f} s", flush=True)


def main() -> None:
    """Tokenizer, model, pretraining, files."""
    torch.manual_seed(SEED)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    rng = random.Random(SEED)
    tables = read_tables(CORPUS)
    documents = write_documents(tables, rng)
    tokenizer = train_tokenizer(documents)
    num_tokens = sum(map(len, tokenizer(documents)["input_ids"]))
    model = build_model(tokenizer)
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")  # mypy cannot read model.to
    print(
        f"{len(documents)} documents, {sum(map(len, documents)) / 1e3:.0f} kB, {num_tokens} tokens; "
        f"{len(tokenizer)} tokens in the vocabulary; {model.num_parameters() / 1e6:.2f} M parameters"
    )
    pretrain(model, tokenizer, tables, rng)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.bfloat16().save_pretrained(TARGET)
    tokenizer.save_pretrained(TARGET)


if __name__ == "__main__":
    main()
