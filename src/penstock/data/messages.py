"""From one message, in OpenAI's or ShareGPT's spelling, to a turn: text, calls of tools, thoughts.

What a message calls its parts differs (`tool_calls` with arguments as JSON text, `function_call` as a role whose text
is the call, a list of parts as content); a turn has one shape for all of them. The chat template decides later whether
it can show what is in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.data.forms import FLAGS, PAIRS, ROLES, THOUGHTS
from penstock.data.rows import refuse_half_a_pair
from penstock.data.strict_json import STRICT
from penstock.errors import DataError


@dataclass(frozen=True)
class Call:
    """A call of a tool, as a response makes it. `arguments` is what JSON holds, usually an object."""

    name: str
    arguments: Any
    id: str = ""


class Turn(NamedTuple):  # of these millions are made, and a frozen dataclass takes ten times as long to make
    """What one side says. `input` is Alpaca's second part of a question; its template gives it a heading of its own."""

    role: str
    content: str
    input: str = ""
    trained: bool = True
    """Of a response: False if its message says so, with `"weight": 0` for example."""
    calls: tuple[Call, ...] = ()
    """Of a response: the tools that it calls."""
    thought: str = ""
    """Of a response: its `reasoning_content`."""
    name: str = ""
    """Of a tool's output: the tool."""
    call_id: str = ""
    """Of a tool's output: the call that it answers."""

    @property
    def whole(self) -> str:
        """Both parts, where no template sets them apart."""
        return f"{self.content}\n\n{self.input}" if self.input else self.content


_SHAPE = 'A message is {"role": "user", "content": "..."} or {"from": "human", "value": "..."}.'


def turn_of(item: object, name: str, where: str) -> Turn:
    """The turn of a message. `name` is its place in the row, `where` the row's."""
    if not isinstance(item, dict):
        raise DataError(f"{name} is {kind_of(item)}, not an object", where=where, remedy=_SHAPE)
    keys = next((keys for keys in PAIRS if item.get(keys[0]) is not None), None)
    says = keys is not None and (
        keys[1] in item or any(item.get(k) for k in ("tool_calls", "function_call", "refusal"))
    )
    if keys is None or not says:
        found = ", ".join(map(str, item)) or "(nothing)"
        what = f"{name} has neither role and content nor from and value; found: {found}"
        raise DataError(what, where=where, remedy=_SHAPE)
    role = item[keys[0]]
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{name} has the unknown role {role!r}", where=where, remedy=f"Known: {', '.join(ROLES)}.")
    content, thought = _content(item.get(keys[1]), f"{name}.{keys[1]}", where)
    calls: tuple[Call, ...] = ()
    if role == "function_call":
        calls, content = _calls_of_text(content, f"{name}.{keys[1]}", where), ""
    if ROLES[role] == "assistant":
        calls = calls or _calls(item, name, where)
        content = _with_refusal(content, item.get("refusal"), name, where)
        thought = _thought(item, thought, name, where)
    return Turn(
        ROLES[role],
        content,
        trained=_is_trained(item, ROLES[role], name, where),
        calls=calls,
        thought=thought,
        name=_text(item, "name", name, where) if ROLES[role] == "tool" else "",
        call_id=_text(item, "tool_call_id", name, where) if ROLES[role] == "tool" else "",
    )


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    kinds = {list: "a list", dict: "an object", str: "text", bytes: "bytes", type(None): "null", bool: "true or false"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


# --- content ----------------------------------------------------------------------------------------------------------


def _content(value: Any, name: str, where: str) -> tuple[str, str]:
    """The text of a content, and the thoughts among its parts. Parts follow one another, as templates write them."""
    if value is None or isinstance(value, str):
        return value or "", ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise DataError(f"{name} is {kind_of(value)}, not text", where=where, remedy=_SHAPE)
    texts: dict[str, list[str]] = {"text": [], "refusal": [], "thinking": []}
    for i, part in enumerate(value):
        kind = part.get("type", "text")
        kind = "text" if kind in ("input_text", "output_text") else kind
        text = part.get("text" if kind == "text" else str(kind))
        if kind not in texts or not isinstance(text, str):
            what = f"{name}[{i}] is a part of type {kind!r}, and models are trained on text alone here"
            raise DataError(what, where=where, remedy='A part is {"type": "text", "text": "..."}. Remove the row.')
        texts["text" if kind == "refusal" else kind].append(text)
    return "".join(texts["text"]), "".join(texts["thinking"])


def _with_refusal(content: str, refusal: Any, name: str, where: str) -> str:
    if not refusal:
        return content
    if not isinstance(refusal, str) or content.strip():
        what = f"{name} has a refusal that is not text, or has content beside it"
        raise DataError(what, where=where, remedy="Leave one of them: a refusal is an answer too.")
    return refusal


def _thought(item: dict[str, Any], among_parts: str, name: str, where: str) -> str:
    found = {key: item[key] for key in THOUGHTS if item.get(key)}
    if among_parts:
        found["thinking part"] = among_parts
    if len({str(value) for value in found.values()}) > 1 or not all(isinstance(v, str) for v in found.values()):
        what = f"{name} has thoughts that differ, or are not text: {', '.join(found)}"
        raise DataError(what, where=where, remedy="Leave one of them, as text.")
    return next(iter(found.values()), "")


def _text(item: dict[str, Any], key: str, name: str, where: str) -> str:
    value = item.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{name}.{key} is {kind_of(value)}, not text", where=where, remedy="Put quotes around it.")
    return value or ""


def _is_trained(item: dict[str, Any], role: str, name: str, where: str) -> bool:
    flags = {key: item[key] for key in FLAGS if item.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            remedy = "1 or true, or none, trains on the response; 0 or false does not."
            raise DataError(f"{name} has the {key} {value!r}", where=where, remedy=remedy)
        if value and role != "assistant":
            what = f"{name} has the {key} {value!r} and is no response ({role})"
            raise DataError(what, where=where, remedy="Remove it; --train-on-prompt trains on everything.")
    if len({bool(value) for value in flags.values()}) > 1:
        what = f"{name} is to be trained on and not to be: {flags}"
        raise DataError(what, where=where, remedy="Leave one of them.")
    return all(flags.values())


# --- tools ------------------------------------------------------------------------------------------------------------

_CALL = 'A call is {"name": "...", "arguments": {...}}, in OpenAI\'s spelling below the key "function".'


def _calls(item: dict[str, Any], name: str, where: str) -> tuple[Call, ...]:
    """OpenAI's `tool_calls`, or the one call of its older `function_call`."""
    calls = item.get("tool_calls") or []
    if item.get("function_call"):
        calls = [*calls, item["function_call"]] if isinstance(calls, list) else calls
    if not isinstance(calls, list):
        raise DataError(f"{name}.tool_calls is {kind_of(calls)}, not a list", where=where, remedy=_CALL)
    return tuple(_call(call, f"{name}.tool_calls[{k}]", where) for k, call in enumerate(calls))


def _call(call: Any, name: str, where: str) -> Call:
    if not isinstance(call, dict):
        raise DataError(f"{name} is {kind_of(call)}, not an object", where=where, remedy=_CALL)
    if call.get("type") not in (None, "function"):
        raise DataError(f"{name} is of type {call['type']!r}, not a function", where=where, remedy=_CALL)
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    if not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(f"{name} has no name; found: {', '.join(map(str, inner))}", where=where, remedy=_CALL)
    given = inner.get("arguments")
    arguments = _parsed(given, f"{name}.arguments", where) if isinstance(given, str) and given.strip() else given or {}
    return Call(inner["name"], arguments, _text(call, "id", name, where))


def _calls_of_text(text: str, name: str, where: str) -> tuple[Call, ...]:
    """The calls in the text of a ShareGPT message from `function_call`: one, or a list of them."""
    value = _parsed(text, name, where)
    calls = value if isinstance(value, list) else [value]
    return tuple(_call(call, name, where) for call in calls)


def tools_of(fields: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """What the tools of a row are, in OpenAI's shape, which is what chat templates are written for."""
    tools: list[dict[str, Any]] = []
    for column in ("tools", "functions"):
        value = fields.get(column)
        if isinstance(value, str) and value.strip():
            value = _parsed(value, f"column {column!r}", where)
        if not value:
            continue
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            what = f"column {column!r} is {kind_of(value)}, not a list of tools"
            raise DataError(what, where=where, remedy='A tool is {"name": "...", "parameters": {...}}.')
        tools += [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    return tuple(tools)


def _parsed(text: str, name: str, where: str) -> Any:
    try:
        value = STRICT.decode(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{name} is not JSON: {reason}", where=where, remedy=_CALL) from None
    refuse_half_a_pair(value, text, where)
    return value
