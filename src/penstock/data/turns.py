"""From a row of any known form to turns.

Four forms are known, each in one or more spellings (`forms.py`). Every row is checked, not only the first: a file in
which row 48,113 lacks a column must not train on 48,112 rows and a guess.

A row that is well-formed but has nothing to learn from (no answer, or an empty one) is no error; it is dropped and
counted with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from penstock.data.files import Row
from penstock.data.forms import (
    HISTORY,
    SYSTEM,
    WEIGHT,
    Format,
    Spelling,
    column_names,
    detect_format,
    given_of,
    spelling_of,
)
from penstock.data.messages import Call, Turn, kind_of, turn_of
from penstock.errors import DataError

__all__ = ["Call", "Dropped", "Format", "Turn", "detect_format", "refuse_placeholders", "text_of", "turns_of"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row with nothing to learn from, and why."""

    reason: str


def turns_of(row: Row, form: Format, left_out: list[Turn] | None = None) -> list[Turn] | Dropped:
    """The turns of a row up to its last response. What follows that (an unanswered question) teaches nothing.

    `left_out` gets it.
    """
    left_out = [] if left_out is None else left_out
    assert form != "text", "plain text has no turns"
    if not _has_weight(row):
        return Dropped("weight 0")
    way = spelling_of(row, form)
    if form == "alpaca":
        column = given_of(row, way)
        given = _text(row, column) if column in row.fields else ""
        question = Turn("user", _text(row, way.columns[0]), given if given.strip() else "")
        turns = [*_history(row), question, Turn("assistant", _text(row, way.columns[1]))]
    elif form == "prompt-completion":
        turns = _exchange(row, way)
    else:
        turns = _messages(row, "conversations" if way.columns == ("conversations",) else "messages")
    turns = _with_system(row, turns)
    while turns and turns[-1].role != "assistant":
        left_out.append(turns.pop())
    if not turns:
        return Dropped("no assistant turn")
    if any(turn.role == "assistant" and not turn.content.strip() and not turn.calls for turn in turns):
        return Dropped("empty response")
    if not any(turn.role == "assistant" and turn.trained for turn in turns):
        return Dropped("no response with a weight")
    return turns


def text_of(row: Row) -> str | Dropped:
    """The text of a row of plain text."""
    if not _has_weight(row):
        return Dropped("weight 0")
    text = _text(row, "text")
    return text if text.strip() else Dropped("empty text")


_PLACEHOLDER = re.compile(r"\A\s*<(image|video|audio)>|<(image|video|audio)>\s*\Z|^<(image|video|audio)>$", re.M)


def refuse_placeholders(turns: list[Turn], where: str) -> None:
    """Refuse a question with a mark for an image, a film or a sound that is not there.

    The mark stands at an end of the text or alone on its line, as data for such models has it; one within a sentence,
    or with its closing tag, is taken for a word about HTML.
    """
    for turn in turns:
        found = _PLACEHOLDER.search(turn.whole) if turn.role == "user" and "<" in turn.whole else None
        kind = next(filter(None, found.groups())) if found else ""
        if kind and f"</{kind}>" not in turn.whole:
            what = f"the question has {f'<{kind}>'!r} in it, the mark for something that is not text"
            remedy = f"Remove such rows; if it is meant as text, say so: --columns {kind}s="
            raise DataError(what, where=where, remedy=remedy)


def _text(row: Row, column: str) -> str:
    """A column that must be there and be text. Null counts as empty: Parquet has it where a cell is missing."""
    if column not in row.fields:
        remedy = "Every row must have the columns of the first; --data-format forces another form."
        raise DataError(f"no column {column!r}; columns found: {column_names(row)}", where=row.where, remedy=remedy)
    value = row.fields[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        what = f"column {column!r} is {kind_of(value)}, not text; columns found: {column_names(row)}"
        remedy = "Put quotes around it, or join it to one text."
        if isinstance(value, bytes):
            remedy = "Write the column with a type of text, such as Parquet's STRING."
        raise DataError(what, where=row.where, remedy=remedy)
    return value


def _has_weight(row: Row) -> bool:
    """Whether a row is trained on at all. From CSV, numbers come as text."""
    weight = row.fields.get(WEIGHT)
    if weight is None or weight == "":
        return True
    if isinstance(weight, str) and weight in ("0", "1", "0.0", "1.0"):
        weight = float(weight)
    if not isinstance(weight, int | float) or weight not in (0, 1):
        remedy = (
            "1 or none trains on the row and 0 drops it. Shares of files are given as --data a.jsonl:0.7,b.jsonl:0.3."
        )
        raise DataError(f"the row has the weight {weight!r}", where=row.where, remedy=remedy)
    return bool(weight)


def _history(row: Row) -> list[Turn]:
    """Alpaca's earlier exchanges. Their answers are trained on too, as where this column comes from."""
    pairs = row.fields.get(HISTORY) or []
    fits = isinstance(pairs, list) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(part is None or isinstance(part, str) for part in pair)
        for pair in pairs
    )
    if not fits:
        what = f"column {HISTORY!r} is not a list of pairs of texts"
        raise DataError(what, where=row.where, remedy='Such as [["an earlier question", "its answer"]].')
    return [Turn(role, part or "") for pair in pairs for role, part in zip(("user", "assistant"), pair, strict=True)]


def _exchange(row: Row, way: Spelling) -> list[Turn]:
    """A prompt and its completion, each a text or a list of messages. Responses in the prompt are not trained on."""
    prompt, completion = way.columns
    said: dict[str, list[Turn]] = {}
    for column, role in ((prompt, "user"), (completion, "assistant")):
        if isinstance(row.fields.get(column), list):
            said[column] = _messages(row, column)
        else:
            said[column] = [Turn(role, _text(row, column))]
    earlier = [turn._replace(trained=False) if turn.role == "assistant" else turn for turn in said[prompt]]
    return [*_history(row), *earlier, *said[completion]]


def _messages(row: Row, column: str) -> list[Turn]:
    if column not in row.fields:
        what = f"no column 'messages' or 'conversations'; columns found: {column_names(row)}"
        raise DataError(what, where=row.where, remedy="--data-format forces another form.")
    items: Any = row.fields[column]
    if items is None:
        return []
    if not isinstance(items, list):
        remedy = 'It should be a list such as [{"role": "user", "content": "..."}, ...].'
        raise DataError(
            f"column {column!r} is {kind_of(items)}, not a list of messages", where=row.where, remedy=remedy
        )
    return [turn_of(item, f"{column}[{i}]", row.where) for i, item in enumerate(items)]


def _with_system(row: Row, turns: list[Turn]) -> list[Turn]:
    """The turns after the text of the column `system`, where there is one."""
    system = _text(row, SYSTEM) if SYSTEM in row.fields else ""
    if not system.strip():
        return turns
    if turns and turns[0].role in ("system", "developer"):
        if turns[0].content == system:
            return turns
        what = f"column {SYSTEM!r} and the first message are two system texts that differ"
        raise DataError(what, where=row.where, remedy="Leave one of them.")
    return [Turn("system", system), *turns]
