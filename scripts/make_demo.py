"""Make the demo's base model and tokenizer, `src/penstock/demo/model/`, from the text in this repository.

    python scripts/make_demo.py        about four minutes with a GPU; a CPU takes most of a day

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS = Path("scripts/demo_corpus.txt")
TARGET = Path("src/penstock/demo/model")

SEED = 42
NUM_STORIES = NUM_NUMBER_FACTS = 600
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
    return rng.sample(facts, NUM_NUMBER_FACTS)


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
    """An epoch of prose in short texts: stories, every fact stated in every way, and every fact in three ways at once."""
    documents = state_number_facts(rng) + state_word_facts(tables, rng)
    for table in tables.values():
        if not table.columns:
            documents += [fill(rng.choice(table.patterns), {}, tables, rng) for _ in range(NUM_STORIES)]
        elif table.patterns:
            for row in table.rows:
                words = dict(zip(table.columns, row, strict=True))
                stated = [fill(pattern, words, tables, rng) for pattern in table.patterns]
                documents += [*stated, " ".join(rng.sample(stated, 3))]
    rng.shuffle(documents)
    return documents


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
    """Four layers, with the things that real models have and code can get wrong: grouped keys and values, a tied head."""
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
    model = LlamaForCausalLM(config)
    initialize(model)
    return model


@torch.no_grad()
def initialize(model: LlamaForCausalLM) -> None:
    """Start with heads that copy what they look at, so that only where to look must be learned.

    The output projection is the transpose of the value projection, hence their product is near a multiple of one, and with
    a tied head an attended token becomes a likely next token. From here the model learns to look facts up in its text within
    100 thousand tokens. From Llama's own start (all weights 0.02 wide) it did not within a million, which is all that a
    few minutes on a CPU allow. The idea is that of mimetic initialization (Trockman and Kolter, 2023).
    """
    config = model.config
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, config.hidden_size**-0.5)
    model.model.embed_tokens.weight.normal_(
        0, 1
    )  # tokens far apart; layers that have learned little yet do not drown them
    model.model.norm.weight.fill_(0.03)  # or such wide embeddings, as the head, would be certain of everything
    for layer in model.model.layers:
        values = layer.self_attn.v_proj.weight.view(config.num_key_value_heads, -1, config.hidden_size)
        shared = values.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0)
        layer.self_attn.o_proj.weight.copy_(0.5 * shared.reshape(-1, config.hidden_size).T)
        layer.mlp.down_proj.weight.zero_()


def make_batches(documents: list[str], tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Tensor]:
    """Batches of whole documents, each beginning at position 0 as a prompt will, padded with -1.

    Sorting by length saves padding. It is done within a pool, since over the whole epoch every batch would be of one kind.
    """
    encoded = tokenizer([text + END_OF_TEXT for text in documents])["input_ids"]
    for i in range(0, len(encoded), POOL):
        batches: list[list[Tensor]] = [[]]
        for ids in sorted(encoded[i : i + POOL], key=len):
            if len(ids) * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(torch.tensor(ids))
        rng.shuffle(batches)
        yield from (pad_sequence(batch, batch_first=True, padding_value=-1) for batch in batches)


def lr_at(step: int) -> float:
    """Linear warmup, then a cosine to a twentieth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (NUM_STEPS - WARMUP_STEPS)
    return PEAK_LR * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tables: dict[str, Table], rng: random.Random
) -> None:
    """Next-token prediction. Every epoch is written anew, so that facts can be learned by heart but texts cannot.

    In fp32: on CPUs without bf16 instructions a bf16 step takes a hundred times as long.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    epochs = (write_documents(tables, rng) for _ in itertools.count())
    batches = (batch for documents in epochs for batch in make_batches(documents, tokenizer, rng))
    start = time.monotonic()
    for step, batch in enumerate(itertools.islice(batches, NUM_STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        logits = model(input_ids=batch.clamp(min=0)).logits  # what a padded position computes, no other position sees
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == NUM_STEPS - 1:
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
    model = build_model(tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")
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
