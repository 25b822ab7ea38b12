"""From a row of any known form to turns.

Four forms are known, told apart by their columns: Alpaca, messages, prompt/completion, and plain text. Every row is
checked, not only the first: a file in which row 48,113 lacks a column must not train on 48,112 rows and a guess.

A row that is well-formed but has nothing to learn from (no answer, or an empty one) is no error; it is dropped and
counted with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.data.files import Row
from penstock.errors import DataError

Format = Literal["alpaca", "messages", "prompt-completion", "text"]

_COLUMNS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
}
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
# Parts of a message that carry meaning and that we do not render: refused, since leaving them out would be silent.
_UNSUPPORTED = ("tool_calls", "function_call", "thinking", "reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says. `input` is Alpaca's second part of a question; its template gives it a heading of its own."""

    role: str
    content: str
    input: str = ""
    trained: bool = True
    """Of a response: False if its message says `"weight": 0`."""

    @property
    def whole(self) -> str:
        """Both parts, where no template sets them apart."""
        return f"{self.content}\n\n{self.input}" if self.input else self.content


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row with nothing to learn from, and why."""

    reason: str


def detect_format(row: Row) -> Format:
    """The form of the rows, from the columns of the first."""
    if "conversations" in row.fields:
        return "messages"
    for form, columns in _COLUMNS.items():
        if all(column in row.fields for column in columns):
            return form
    forms = "; ".join(f"{form} ({', '.join(columns)})" for form, columns in _COLUMNS.items())
    what = f"the form of the rows cannot be told from the columns {_columns(row)}"
    remedy = f"Rename the columns to those of one of: {forms}."
    for column, value in row.fields.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            remedy = f"If the rows are those in {column!r}, write this array alone to the file. Else: {remedy}"
    raise DataError(what, where=row.where, remedy=remedy)


def turns_of(row: Row, form: Format) -> list[Turn] | Dropped:
    """The turns of a row up to its last response. What follows that (an unanswered question) teaches nothing."""
    assert form != "text", "plain text has no turns"
    if form == "alpaca":
        given = _text(row, "input") if "input" in row.fields else ""
        question = Turn("user", _text(row, "instruction"), given if given.strip() else "")
        turns = [question, Turn("assistant", _text(row, "output"))]
    elif form == "prompt-completion":
        turns = [Turn("user", _text(row, "prompt")), Turn("assistant", _text(row, "completion"))]
    else:
        turns = _messages(row)
    while turns and turns[-1].role != "assistant":
        turns.pop()
    if not turns:
        return Dropped("no assistant turn")
    if any(turn.role == "assistant" and not turn.content.strip() for turn in turns):
        return Dropped("empty response")
    if not any(turn.role == "assistant" and turn.trained for turn in turns):
        return Dropped("no response with a weight")
    return turns


def text_of(row: Row) -> str | Dropped:
    """The text of a row of plain text."""
    text = _text(row, "text")
    return text if text.strip() else Dropped("empty text")


def _columns(row: Row) -> str:
    return ", ".join(row.fields) or "(none)"


def _text(row: Row, column: str) -> str:
    """A column that must be there and be text. Null counts as empty: Parquet has it where a cell is missing."""
    if column not in row.fields:
        remedy = "Every row must have the columns of the first; --data-format forces another form."
        raise DataError(f"no column {column!r}; columns found: {_columns(row)}", where=row.where, remedy=remedy)
    value = row.fields[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        what = f"column {column!r} is {_kind(value)}, not text; columns found: {_columns(row)}"
        raise DataError(what, where=row.where, remedy="Put quotes around it, or join it to one text.")
    return value


def _messages(row: Row) -> list[Turn]:
    column = "conversations" if "conversations" in row.fields and "messages" not in row.fields else "messages"
    if column not in row.fields:
        what = f"no column 'messages' or 'conversations'; columns found: {_columns(row)}"
        raise DataError(what, where=row.where, remedy="--data-format forces another form.")
    items = row.fields[column]
    if items is None:
        return []
    if not isinstance(items, list):
        remedy = 'It should be a list such as [{"role": "user", "content": "..."}, ...].'
        raise DataError(f"column {column!r} is {_kind(items)}, not a list of messages", where=row.where, remedy=remedy)
    return [_message(item, f"{column}[{i}]", row.where) for i, item in enumerate(items)]


def _message(item: object, name: str, where: str) -> Turn:
    remedy = 'A message is {"role": "user", "content": "..."} or {"from": "human", "value": "..."}.'
    if not isinstance(item, dict):
        raise DataError(f"{name} is {_kind(item)}, not an object", where=where, remedy=remedy)
    keys = next((keys for keys in (("role", "content"), ("from", "value")) if item.get(keys[0]) is not None), None)
    if keys is None or keys[1] not in item:
        what = (
            f"{name} has neither role and content nor from and value; found: {', '.join(map(str, item)) or '(nothing)'}"
        )
        raise DataError(what, where=where, remedy=remedy)
    role, content = item[keys[0]], item[keys[1]]
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(f"{name} has the unknown role {role!r}", where=where, remedy=f"Known: {', '.join(_ROLES)}.")
    if content is not None and not isinstance(content, str):
        raise DataError(f"{name}.{keys[1]} is {_kind(content)}, not text", where=where, remedy=remedy)
    for part in _UNSUPPORTED:
        if item.get(part):
            remedy = "Write it into the content, as the model should produce it, or remove it."
            raise DataError(f"{name} has {part!r}, which is not trained on", where=where, remedy=remedy)
    weight = item.get("weight")
    if weight not in (None, 0, 1):
        remedy = "1, or none, trains on the response; 0 does not."
        raise DataError(f"{name} has the weight {weight!r}", where=where, remedy=remedy)
    return Turn(_ROLES[role], content or "", trained=weight != 0)


def _kind(value: Any) -> str:
    kinds = {list: "a list", dict: "an object", str: "text", type(None): "null", bool: "true or false"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
