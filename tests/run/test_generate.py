"""A conversation with the model of a run."""

import dataclasses
import io
import json
import os
import pty
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.command.cli import main
from penstock.data.template import prompt_text
from penstock.data.turns import Turn
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.run.generate import answer, questions
from penstock.run.train import train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat") / "run"
    recipe = dataclasses.replace(
        PRESETS["demo"], output_dir=str(directory), max_steps=1, batch_size=1, keep=0, prompt=None, dtype="fp32"
    )
    train(recipe, Console(quiet=True))
    return directory


def ask(run_dir, lines, *words):
    command = [
        sys.executable,
        "-m",
        "penstock",
        "generate",
        run_dir,
        "--max-new-tokens",
        "8",
        "--device",
        "cpu",
        *words,
    ]
    return subprocess.run(command, input=lines, capture_output=True, text=True, env=dict(os.environ), timeout=200)


@pytest.mark.parametrize("words", [["--json"], []])
@pytest.mark.slow
def test_answers_in_a_file_have_nothing_between_them(run_dir, words, tmp_path):
    """Questions are typed, and answers go elsewhere."""
    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "penstock", "generate", run_dir, "--max-new-tokens", "8", *words]
    os.write(keyboard, b"Why?\nexit\n")
    with os.fdopen(terminal) as stdin, os.fdopen(keyboard):
        result = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=200, check=True)
    assert (json.loads(result.stdout)["prompt"] == "Why?") if words else not result.stdout.startswith(">")
    assert "Ask something" in result.stderr


def test_a_question_needs_no_standard_input(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", str(run_dir), "Why?", "--max-new-tokens", "1", "--device", "cpu"]) == 0
    assert main(["generate", str(run_dir)]) == 2
    assert "generate: there is no question, and standard input is closed" in capsys.readouterr().err


def test_a_question_that_is_not_utf8_is_refused(run_dir, monkeypatch, capsys):
    refused = "question 'caf\\udce9?': is not UTF-8\n  Give it in UTF-8"
    assert main(["generate", str(run_dir), os.fsdecode(b"caf\xe9?"), "--device", "cpu"]) == 2
    assert refused in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9?\n"), encoding="utf-8"))
    assert main(["generate", str(run_dir), "--device", "cpu"]) == 2
    assert refused in capsys.readouterr().err


@pytest.mark.slow
def test_lines_of_a_pipe_are_one_conversation(run_dir):
    both = ask(run_dir, "What is the capital of Italy?\n\nAnd of Japan?\nexit\nnot asked\n", "--json")
    assert both.returncode == 0, both.stderr
    answers = [json.loads(line) for line in both.stdout.splitlines()]
    assert [entry["prompt"] for entry in answers] == ["What is the capital of Italy?", "And of Japan?"]
    alone = ask(run_dir, "And of Japan?\n", "--json")
    assert json.loads(alone.stdout)["answer"] != answers[1]["answer"], "what was said before changes the answer"
    plain = ask(run_dir, "", "What is the capital of Italy?")
    assert plain.stdout.strip() == answers[0]["answer"].strip()


def test_questions_end_with_the_lines_or_with_a_word():
    assert list(questions(io.StringIO("a\n  \n b \n"))) == ["a", "b"]
    assert list(questions(io.StringIO("a\nEXIT\nb\n"))) == ["a"]
    assert list(questions(io.StringIO(""))) == []


def test_a_tokenizer_that_adds_token_types_is_not_asked_for_them(run_dir):
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    said = answer(model, tokenizer, PRESETS["demo"], "hi", max_new_tokens=4)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in tokenizer("hi")
    assert answer(model, tokenizer, PRESETS["demo"], "hi", max_new_tokens=4) == said


EARLIER = (Turn("user", "One?"), Turn("assistant", "Two."))


@pytest.mark.parametrize(
    ("template", "data_format", "expected"),
    [
        ("chat", "auto", "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"
         "<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n"),
        ("alpaca", "auto", "### Instruction:\nOne?\n\n### Response:\nTwo.END\n\n"
         "### Instruction:\nThree?\n\n### Response:\n"),
        ("none", "auto", "One?Two.ENDThree?"),
        ("auto", "text", "One?Two.Three?"),
    ],
)  # fmt: skip
def test_earlier_turns_are_rendered_as_in_training(template, data_format, expected):
    from importlib.resources import files

    tokenizer = AutoTokenizer.from_pretrained(str(files("penstock.demo") / "model"))
    text = prompt_text(tokenizer, Recipe(template=template, data_format=data_format), "Three?", EARLIER)
    assert text == expected.replace("END", tokenizer.eos_token)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
        (["--temperature", "-1"], "--temperature -1.0: must not be negative"),
        (["--temperature", "nan"], "--temperature nan: must not be negative"),
        (["--seed", "99999999999999999999"], "--seed 99999999999999999999: must be between 0 and"),
        (["--device", "cda"], "device = 'cda': is no device"),
    ],
)
def test_a_value_out_of_range_is_refused(run_dir, words, what, capsys):
    assert main(["generate", str(run_dir), "hi", *words]) == 2
    assert what in capsys.readouterr().err
