"""Which columns make which form, and what becomes of every other one.

Every key of a row is used, refused, or listed as not used; nothing falls through. What carries meaning is never only
listed: `Keys` sorts the keys of a row before a turn is read from it, and `turns.py` reads exactly those that are used
here. Rejected: a list of columns to ignore, which is always one column behind what people have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from penstock.data.files import Row
from penstock.errors import DataError

Format = Literal["alpaca", "messages", "prompt-completion", "text"]
Verdict = Literal["used", "refused", "listed"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """The columns by which a form is known. `given` is a second part of the question and may be missing."""

    name: str
    format: Format
    columns: tuple[str, ...]
    given: str = ""


SPELLINGS = (
    Spelling("messages", "messages", ("conversations",)),
    Spelling("messages", "messages", ("messages",)),
    Spelling("alpaca", "alpaca", ("instruction", "output"), "input"),
    Spelling("prompt-completion", "prompt-completion", ("prompt", "completion")),
    Spelling("text", "text", ("text",)),
    Spelling("dolly", "alpaca", ("instruction", "response"), "context"),
    Spelling("prompt-response", "prompt-completion", ("prompt", "response")),
    Spelling("question-answer", "prompt-completion", ("question", "answer")),
)
"""In the order in which they are looked for. Those after `text` came later: rows with both are still text."""

SYSTEM, SYSTEM_PROMPT, HISTORY, WEIGHT = "system", "system_prompt", "history", "weight"
MORE = ("input", "context")
"""A second part of the question."""
TALKS = ("messages", "conversations")
TOOLS = ("tools", "functions")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
PREFERENCE = ("chosen", "rejected", "preferred_output", "non_preferred_output", "kto_tag", "label")
BESIDE = (SYSTEM, HISTORY, *TOOLS, WEIGHT)
"""Columns that go with a form that has turns."""
TARGETS = sorted({*(c for s in SPELLINGS for c in (*s.columns, s.given) if c), *BESIDE})
"""Names that --columns can give."""
OPTIONAL = (*MORE, *BESIDE)
"""Of them, those that a row may do without."""

FLAGS = ("weight", "train", "loss", "loss_weight")
"""Keys of a message that say whether it is trained on."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
RESPONSE_KEYS = ("tool_calls", "function_call", "refusal", *THOUGHTS)
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Both spellings of every role, and the one that templates are given."""
PAIRS = (("role", "content"), ("from", "value"))


def filled(value: Any) -> bool:
    """Whether a value says something. Parquet has null, or an object of nulls, where a row has no such key."""
    if isinstance(value, dict):
        return any(filled(item) for item in value.values())
    if isinstance(value, list):
        return any(filled(item) for item in value)
    return value is not None and value != ""


def spelling_of(row: Row, form: Format) -> Spelling:
    """How a row of this form spells its columns; the first way of all if it lacks them."""
    way = _spelling(tuple(row.fields), form)
    if way.columns == ("messages",) and not filled(row.fields.get("messages")) and "conversations" in row.fields:
        return _spelling(("conversations",), form)
    return way


def given_of(row: Row, way: Spelling) -> str:
    """The column with the second part of an Alpaca row's question: `input` or `context`, with either spelling."""
    other = {"input": "context", "context": "input"}[way.given]
    return other if filled(row.fields.get(other)) and not filled(row.fields.get(way.given)) else way.given


@lru_cache(maxsize=1024)
def _spelling(columns: tuple[str, ...], form: Format) -> Spelling:
    ways = [way for way in SPELLINGS if way.format == form]
    if form == "messages":  # a row with both has always been read by `messages`
        ways.reverse()
    return next((way for way in ways if {*way.columns} <= {*columns}), ways[0])


def detect_format(row: Row) -> Format:
    """The form of the rows, from the columns of the first."""
    for way in SPELLINGS:
        if all(column in row.fields for column in way.columns):
            return way.format
    for column, value in row.fields.items():
        if _refusal(column, value, "messages"):
            raise refused(column, row, "messages")
    known = dict.fromkeys(
        f"{way.name} ({', '.join(way.columns)})" for way in SPELLINGS if way.columns != ("conversations",)
    )
    what = f"the form of the rows cannot be told from the columns {column_names(row)}"
    remedy = f"Rename the columns to those of one of: {'; '.join(known)}. Or name them: --columns question=prompt."
    for column, value in row.fields.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            remedy = f"If the rows are those in {column!r}, write this array alone to the file. Else: {remedy}"
    raise DataError(what, where=row.where, remedy=remedy)


def column_names(row: Row) -> str:
    """For messages."""
    return ", ".join(row.fields) or "(none)"


def rename(row: Row, columns: tuple[tuple[str, str], ...]) -> Row:
    """The row with the columns of the recipe renamed. One that is left out is gone, as its owner said.

    One that no row has to have may be missing here (`lacking`).
    """
    given, fields = dict(columns), {}
    for column, name in columns:
        if name and name not in OPTIONAL and column not in row.fields:
            remedy = "--columns takes the file's own name first: --columns question=prompt."
            what = f"no column {column!r}, which is to be {name!r}; columns found: {column_names(row)}"
            raise DataError(what, where=row.where, remedy=remedy)
    for column, value in row.fields.items():
        name = given.get(column, column)
        if name and name in fields:
            what = f"two columns would be {name!r}; columns found: {column_names(row)}"
            raise DataError(what, where=row.where, remedy=f"Leave the other one out too: --columns {name}=")
        if name:
            fields[name] = value
    return Row(fields, row.file, row.line)


def lacking(row: Row, columns: tuple[tuple[str, str], ...]) -> list[str]:
    """Columns that are to be renamed and that this row does without. All rows cannot: then the name is wrong."""
    return [column for column, name in columns if name in OPTIONAL and column not in row.fields]


def check_targets(columns: tuple[tuple[str, str], ...]) -> None:
    """Refuse a new name that no form has: it would change nothing."""
    for column, name in columns:
        if name and name not in TARGETS:
            where, remedy = f"columns: {column}={name}", f"Known: {', '.join(TARGETS)}. {column}= leaves it out."
            raise DataError(f"{name!r} is no column of any form", where=where, remedy=remedy)


# --- what becomes of a key --------------------------------------------------------------------------------------------


class Keys:
    """Sorts the keys of rows of one form.

    Rows of a file nearly always have the same columns, and messages the same two keys, so what can be told from the
    names of columns is told once.
    """

    def __init__(self, form: Format) -> None:
        self._form = form
        self._by_columns: dict[tuple[str, ...], tuple[str, ...] | None] = {}

    def unused(self, row: Row) -> tuple[str, ...]:
        """Names of what is listed as not used, without the numbers of messages; raises for what is refused."""
        columns = tuple(row.fields)
        if columns not in self._by_columns:
            by_name = not {*columns} & _BY_VALUE and not any({*two} <= {*columns} for two in (MORE, TALKS))
            by_name &= self._form != "prompt-completion" or not {*columns} & {*MORE}
            listed = tuple(key for key, verdict in _columns(row, self._form) if verdict == "listed")
            self._by_columns[columns] = listed if by_name else None
        known = self._by_columns[columns]
        if known is not None and all(_is_plain(row.fields.get(column)) for column in _WITH_MESSAGES):
            return known
        found: dict[str, None] = {}
        for key, verdict in sort_keys(row, self._form):
            if verdict == "refused":
                raise refused(key, row, self._form)
            if verdict == "listed":
                found[_general(key)] = None
        return tuple(found)


def _is_plain(items: Any) -> bool:
    """Whether a column has no messages, or messages with nothing but who and what."""
    return not isinstance(items, list) or all(isinstance(i, dict) and i.keys() in _PLAIN_KEYS for i in items)


def refused(key: str, row: Row, form: Format) -> DataError:
    """What carries meaning and cannot be trained on."""
    if "[" not in key:
        reason = _refusal(key, row.fields[key], form) or "holds a part of the question, as another column does too"
        what = f"column {key!r} {reason}"
        remedy = f"Remove such rows; or, if it has no meaning for you, leave the column out: --columns {key}="
        if key == SYSTEM_PROMPT:
            remedy = f"Name it as it is meant: --columns {key}={SYSTEM}, or leave it out: --columns {key}="
        elif key in MORE and form == "prompt-completion":
            asked, said = spelling_of(row, form).columns
            remedy = (
                f"Make the rows Alpaca's: --columns {asked}=instruction,{said}=output,{key}=input, "
                f"or leave it out: --columns {key}="
            )
        return DataError(what, where=row.where, remedy=remedy)
    last = key.rpartition(".")[2]
    reason = _MEDIA_REASON if last in MEDIA else REFUSED.get(last, "stands in a message that is no response")
    remedy = "Remove the key or the row: to leave it out in silence would train something else."
    return DataError(f"{key} {reason}", where=row.where, remedy=remedy)


def sort_keys(row: Row, form: Format) -> Iterator[tuple[str, Verdict]]:
    """Every key of a row, each once: columns, and the keys of messages as `messages[2].name`."""
    yield from _columns(row, form)
    if form in ("text", "alpaca"):
        return
    for column in spelling_of(row, form).columns:
        items = row.fields.get(column)
        for i, item in enumerate(items if isinstance(items, list) else []):
            if isinstance(item, dict):
                yield from _message_keys(item, f"{column}[{i}]")


REFUSED = {
    "mask": "says which turns are trained on, in a way that projects disagree about",
    "chat_template_kwargs": "changes what the chat template writes",
}
_BY_VALUE = {*MEDIA, *PREFERENCE, *REFUSED, HISTORY, SYSTEM_PROMPT}
_IF_FILLED: dict[Format, tuple[str, ...]] = {
    "alpaca": (*MORE, SYSTEM_PROMPT),
    "prompt-completion": (*MORE, SYSTEM_PROMPT),
    "messages": ("messages", SYSTEM_PROMPT),
    "text": (),
}
"""Columns that say something where something is in them, beside those of every row."""
_WITH_MESSAGES = ("messages", "conversations", "prompt", "completion", "response", "question", "answer")
_PLAIN_KEYS = ({"role", "content"}, {"from", "value"})
_MEDIA_REASON = "holds images, sound or film, and models are trained on text alone here"
_PREFERENCE_REASON = {
    "chosen": "is the better answer of a pair, for preference training (DPO)",
    "rejected": "is the worse answer of a pair, for preference training (DPO)",
    "preferred_output": "is the better answer of a pair, for preference training (DPO)",
    "non_preferred_output": "is the worse answer of a pair, for preference training (DPO)",
    "kto_tag": "says whether the answer is a good one, for preference training (KTO)",
    "label": "says whether the answer is a good one, for preference training (KTO)",
}


def _refusal(column: str, value: Any, form: Format) -> str:
    """Why a column is refused, or nothing."""
    if not filled(value):
        return ""
    if column in MEDIA:
        return _MEDIA_REASON
    if column == HISTORY and form == "messages":
        return "holds earlier turns, which belong into the messages"
    if column in MORE and form == "prompt-completion":
        return "holds a part of the question, for which this form has no place"
    if column == SYSTEM_PROMPT and form != "text":
        return "holds a system text under another name"
    if column == "label":  # a class, as data for classification has it, says nothing of an answer
        is_verdict = form != "text" and str(value).lower() in ("true", "false", "0", "1")  # from CSV it comes as text
        return _PREFERENCE_REASON[column] if is_verdict else ""
    return _PREFERENCE_REASON.get(column, "") or REFUSED.get(column, "")


def _columns(row: Row, form: Format) -> Iterator[tuple[str, Verdict]]:
    way = spelling_of(row, form)
    given = given_of(row, way) if way.given else None
    known = {*way.columns, given, *((WEIGHT,) if form == "text" else BESIDE)}
    known |= {*MEDIA, *PREFERENCE, *REFUSED} - ({"label"} if form == "text" else set())
    for column, value in row.fields.items():
        says = filled(value)
        if _refusal(column, value, form) or (given and column in MORE and column != given and says):
            yield column, "refused"
        elif column in known and (column != "label" or not says):
            yield column, "used"
        else:
            yield column, "used" if not says and column in _IF_FILLED[form] else "listed"


def _message_keys(item: dict[str, Any], name: str) -> Iterator[tuple[str, Verdict]]:
    pair = next((pair for pair in PAIRS if item.get(pair[0]) is not None), PAIRS[0])
    role = ROLES.get(item[pair[0]], "") if isinstance(item.get(pair[0]), str) else ""
    for key, value in item.items():
        yield f"{name}.{key}", _message_verdict(key, value, role, pair)
    if role == "assistant" and isinstance(item.get("tool_calls"), list):
        for k, call in enumerate(item["tool_calls"]):
            yield from _call_keys(call, f"{name}.tool_calls[{k}]")


def _message_verdict(key: str, value: Any, role: str, pair: tuple[str, str]) -> Verdict:
    if key in (*pair, *FLAGS):
        return "used"
    if key in RESPONSE_KEYS:
        return "used" if role == "assistant" or not filled(value) else "refused"
    if key in ("name", "tool_call_id"):
        return "used" if role == "tool" else "listed"
    if key in (*MEDIA, *REFUSED):
        return "refused" if filled(value) else "used"
    return "listed"


def _call_keys(call: Any, name: str) -> Iterator[tuple[str, Verdict]]:
    if not isinstance(call, dict):
        return
    inner = call.get("function")
    for key in call:
        known = ("id", "type", "function") if isinstance(inner, dict) else ("id", "type", "name", "arguments")
        yield f"{name}.{key}", "used" if key in known else "listed"
    for key in inner if isinstance(inner, dict) else ():
        yield f"{name}.function.{key}", "used" if key in ("name", "arguments") else "listed"


def _general(key: str) -> str:
    """`messages[2].name` as `messages[].name`."""
    return "".join("[]" + part.partition("]")[2] if i else part for i, part in enumerate(key.split("[")))
