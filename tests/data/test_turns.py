"""Rows of every known form become turns, and every fault in one names its line."""

import pytest

from penstock.data.files import Row
from penstock.data.turns import Dropped, Turn, detect_format, text_of, turns_of
from penstock.errors import DataError


def row(**fields):
    return Row(fields, "my.jsonl", 7)


def pairs(turns):
    return [(t.role, t.content) for t in turns]


MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca"),
        ({"instruction": "q", "output": "a", "text": "all of it"}, "alpaca"),
        ({"messages": []}, "messages"),
        ({"conversations": [], "text": ""}, "messages"),
        ({"prompt": "q", "completion": "a"}, "prompt-completion"),
        ({"text": "t", "id": 3}, "text"),
    ],
)
def test_the_form_is_told_from_the_columns(fields, form):
    assert detect_format(row(**fields)) == form


def test_unknown_columns_are_named():
    with pytest.raises(DataError) as caught:
        detect_format(row(asked="q", said="a"))
    assert caught.value.where == "my.jsonl:7"
    assert "asked, said" in caught.value.what
    assert "alpaca (instruction, output)" in caught.value.remedy
    assert "this array alone" not in caught.value.remedy
    with pytest.raises(DataError) as caught:
        detect_format(row(version=1, rows=[{"instruction": "q", "output": "a"}]))
    assert "If the rows are those in 'rows', write this array alone to the file" in caught.value.remedy


def test_alpaca():
    assert turns_of(row(instruction="q", input="x", output="a"), "alpaca") == [
        Turn("user", "q", "x"),
        Turn("assistant", "a"),
    ]
    for nothing in ({}, {"input": ""}, {"input": None}, {"input": " \n"}):
        turns = turns_of(row(instruction="q", output="a", **nothing), "alpaca")
        assert turns == [Turn("user", "q"), Turn("assistant", "a")]
    assert Turn("user", "q", "x").whole == "q\n\nx"


def test_prompt_completion_and_text():
    assert pairs(turns_of(row(prompt="q", completion="a"), "prompt-completion")) == [("user", "q"), ("assistant", "a")]
    assert text_of(row(text="t")) == "t"


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_messages_in_both_spellings(column):
    roles = row(**{column: [{"role": "system", "content": "s"}, *MESSAGES]})
    assert pairs(turns_of(roles, "messages")) == [("system", "s"), ("user", "q"), ("assistant", "a")]
    names = row(**{column: [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})
    assert pairs(turns_of(names, "messages")) == [("user", "q"), ("assistant", "a")]


def test_parquet_writes_null_for_the_other_spelling():
    item = {"role": None, "content": None, "from": "gpt", "value": "a", "tool_calls": None}
    assert pairs(turns_of(row(messages=[item]), "messages")) == [("assistant", "a")]


def test_an_unanswered_question_at_the_end_is_left_out():
    turns = turns_of(row(messages=[*MESSAGES, {"role": "user", "content": "and?"}]), "messages")
    assert pairs(turns) == [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("fields", "form", "reason"),
    [
        ({"instruction": "q", "output": ""}, "alpaca", "empty response"),
        ({"instruction": "q", "output": None}, "alpaca", "empty response"),
        ({"prompt": "q", "completion": " \n"}, "prompt-completion", "empty response"),
        ({"messages": []}, "messages", "no assistant turn"),
        ({"messages": None}, "messages", "no assistant turn"),
        ({"messages": MESSAGES[:1]}, "messages", "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages", "empty response"),
        ({"messages": [{"role": "assistant", "content": ""}, *MESSAGES]}, "messages", "empty response"),
    ],
)
def test_rows_with_nothing_to_learn_are_dropped(fields, form, reason):
    assert turns_of(row(**fields), form) == Dropped(reason)


def test_bytes_are_told_to_become_text_and_not_to_be_quoted():
    with pytest.raises(DataError, match="column 'text' is bytes, not text") as caught:
        text_of(row(text=b"t"))
    assert caught.value.remedy.startswith("Write the column with a type of text")


def test_empty_text_is_dropped():
    assert text_of(row(text="  ")) == Dropped("empty text")


@pytest.mark.parametrize(
    ("fields", "form", "says"),
    [
        ({"instruction": "q", "answer": "a"}, "alpaca", "no column 'output'; columns found: instruction, answer"),
        ({"prompt": "q"}, "prompt-completion", "no column 'completion'; columns found: prompt"),
        ({"question": "q"}, "messages", "no column 'messages' or 'conversations'; columns found: question"),
        ({"instruction": 3, "output": "a"}, "alpaca", "column 'instruction' is a number, not text"),
        ({"instruction": "q", "output": ["a"]}, "alpaca", "column 'output' is a list, not text"),
        ({"instruction": "q", "input": {}, "output": "a"}, "alpaca", "column 'input' is an object, not text"),
        ({"messages": "hello"}, "messages", "column 'messages' is text, not a list of messages"),
        ({"messages": ["hello"]}, "messages", "messages[0] is text, not an object"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0] has neither role and content"),
        ({"messages": [{"who": "user", "content": "a"}]}, "messages", "found: who, content"),
        ({"messages": [*MESSAGES, {"role": "wizard", "content": "a"}]}, "messages", "messages[2] has the unknown role"),
        ({"messages": [{"role": 3, "content": "a"}]}, "messages", "unknown role 3"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages", "messages[0].content is a list, not text"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
            "messages",
            "messages[0].tool_calls[0] is a number",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "thinking": 3}]},
            "messages",
            "thoughts that differ, or are",
        ),
    ],
)
def test_faults_name_the_line(fields, form, says):
    with pytest.raises(DataError) as caught:
        turns_of(row(**fields), form)
    assert caught.value.where == "my.jsonl:7"
    assert says in caught.value.what


def test_text_column_missing():
    with pytest.raises(DataError, match="no column 'text'; columns found: body"):
        text_of(row(body="t"))
