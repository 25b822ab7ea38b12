"""Conversations with tools or thoughts under a chat template.

A response that calls a tool is written by the template in its own notation, so there is no text to look for. Where it
lies is found by rendering the conversation up to it: first with the prompt of inference, then with the response. If the
whole text begins like both, the response is what lies between, whatever the notation. Templates that write an earlier
response otherwise than the last one (most leave earlier thoughts out) are looked at a second time, with markers for
what others say.

Nothing may be left out in silence. Each kind of conversation is rendered once with markers for names, arguments,
outputs and tools; a marker that does not come back is a part of the row that the model would never see.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.data.facts import EndToken
from penstock.data.messages import Call, Turn
from penstock.data.render import THOUGHT_ENDS, Example, Renderer, Span
from penstock.errors import DataError, ModelError, UserError

_ANSWER = "\ue002"


class ToolChat:
    """Spans of responses among calls of tools, their outputs, and thoughts."""

    def __init__(self, render: Renderer, end: EndToken) -> None:
        self._render, self._end = render, end
        self._left_out: dict[tuple[object, ...], str] = {}

    def render(self, turns: list[Turn], tools: tuple[Any, ...], where: str) -> Example:
        """The text of the turns and the span of every response."""
        text = self._render(turns, where, tools=tools)
        if missing := self._missing(text, turns, tools):
            what = f"the chat template leaves out {missing}"
            remedy = "Use a model whose chat template knows them (--tokenizer names another), or remove such rows."
            raise DataError(what, where=where, remedy=remedy)
        spans = self._by_prefix(text, turns, tools)
        if spans is None:
            spans = self._by_markers(text, turns, tools)
        if spans is None:
            what = (
                "where the responses lie cannot be told: the chat template writes parts of the row otherwise than all"
            )
            raise DataError(what, where=where, remedy="Split the row after its last question, or remove it.")
        return self._ended(text, spans)

    def with_thoughts_shown(self, turns: list[Turn], tools: tuple[Any, ...]) -> list[Turn]:
        """The turns with thoughts in their contents, where the template knows thoughts only there."""
        if not turns[-1].thought or THOUGHT_ENDS.strip("</>") not in self._render.template:
            return turns
        if self._leaves_out(turns, tools) != _THOUGHTS:
            return turns
        return [
            turn._replace(content=f"<think>\n{turn.thought}\n{THOUGHT_ENDS}\n\n{turn.content}", thought="")
            if turn.thought
            else turn
            for turn in turns
        ]

    # --- what is left out ---------------------------------------------------------------------------------------------

    def _missing(self, text: str, turns: list[Turn], tools: tuple[Any, ...]) -> str:
        """What of this row the text does not have, in words, or nothing."""
        if missing := self._leaves_out(turns, tools):
            return missing
        for i, turn in enumerate(turns):
            if any(call.name not in text for call in turn.calls):
                return _CALLS
            said = turn.whole.strip()
            shown = said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text
            if not shown and (turn.role != "assistant" or i == len(turns) - 1):
                return _OUTPUTS if turn.role == "tool" else f"or changes turn {i + 1} ({turn.role})"
        return ""

    def _leaves_out(self, turns: list[Turn], tools: tuple[Any, ...]) -> str:
        """The same for all conversations of this kind, by markers; nothing if the template does not take markers."""
        kind = (
            tuple((turn.role, len(turn.calls), bool(turn.content.strip()), bool(turn.thought)) for turn in turns),
            bool(tools),
        )
        if kind not in self._left_out:
            self._left_out[kind] = self._probe(turns, tools)
        return self._left_out[kind]

    def _probe(self, turns: list[Turn], tools: tuple[Any, ...]) -> str:
        marks: dict[str, str] = {}

        def mark(what: str) -> str:
            name = f"\ue000{len(marks)}\ue001"
            marks[name] = what
            return name

        marked = []
        for i, turn in enumerate(turns):
            calls = tuple(Call(mark(_CALLS), {mark(_CALLS): mark(_CALLS)}, call.id) for call in turn.calls)
            content = mark(_OUTPUTS) if turn.role == "tool" else turn.content
            thought = mark(_THOUGHTS) if turn.thought and i == len(turns) - 1 else turn.thought
            marked.append(turn._replace(calls=calls, content=content, thought=thought))
        function = {"name": mark(_TOOLS), "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            text = self._render(marked, "", tools=({"type": "function", "function": function},) if tools else ())
        except UserError:  # it asks something of them that a marker does not meet
            return ""
        if not tools:
            marks.popitem()
        return next((what for name, what in marks.items() if name not in text), "")

    # --- where responses lie ------------------------------------------------------------------------------------------

    def _by_prefix(self, text: str, turns: list[Turn], tools: tuple[Any, ...]) -> list[Span] | None:
        spans: list[Span] = []
        for i in _responses(turns):
            try:
                before = self._render(turns[:i], "", tools=tools, generation_prompt=True)
                after = text if i == len(turns) - 1 else self._render(turns[: i + 1], "", tools=tools)
            except UserError:  # a template may refuse part of a conversation that it takes as a whole
                return None
            stop = self._stop(text, after)
            if not text.startswith(before) or stop is None or stop <= len(before):
                return None
            spans.append((len(before), stop))
        return spans

    def _stop(self, text: str, after: str) -> int | None:
        """Where the response that ends `after` ends in the text: behind its end token, or before blanks."""
        shared = _shared(text, after)
        if shared == len(after):
            said = after.rstrip()
            ends = [match.end() for match in self._end.special.finditer(after) if not after[match.end() :].strip()]
            return ends[-1] if ends else len(said)
        # The last response may have an end token of its own: then both have one from the same place on.
        ours, theirs = (
            next((m for m in self._end.special.finditer(side) if m.start() <= shared < m.end()), None)
            for side in (text, after)
        )
        same = ours and theirs and ours.start() == theirs.start() and not after[theirs.end() :].strip()
        return ours.end() if same and ours else None

    def _by_markers(self, text: str, turns: list[Turn], tools: tuple[Any, ...]) -> list[Span] | None:
        """With markers for what others say, a response is all between two of them but headers."""
        marked = [t if t.role == "assistant" else t._replace(content=_name(i), input="") for i, t in enumerate(turns)]
        responses = list(_responses(turns))
        alone = all(i and turns[i - 1].role != "assistant" for i in responses)
        try:
            shown = self._render(marked, "", tools=tools)
            pieces = _cut(shown, [i for i, turn in enumerate(turns) if turn.role != "assistant"])
            inside = [self._inside(pieces, marked, i, tools) for i in responses] if alone and pieces else [None]
        except UserError:
            return None
        if pieces is None or any(place is None for place in inside):
            return None
        return _place(text, turns, pieces, {i: place for i, place in zip(responses, inside, strict=True) if place})

    def _inside(
        self, pieces: dict[int, str], marked: list[Turn], i: int, tools: tuple[Any, ...]
    ) -> tuple[int, int] | None:
        """Where response i lies in the piece of text before the next marker."""
        prompt = self._render(marked[:i], "", tools=tools, generation_prompt=True)
        header = prompt.rpartition(_name(i - 1))[2]
        piece = pieces[i - 1]
        plain = [*marked[:i], Turn("assistant", _ANSWER), *marked[i + 1 :]]
        tail = self._render(plain, "", tools=tools).rpartition(_ANSWER)[2]
        tail = tail.partition(_name(i + 1))[0]
        shared = _shared(piece[::-1], tail[::-1])
        cut = len(piece) - shared
        for match in self._end.special.finditer(piece):
            if match.start() <= cut < match.end():
                cut = match.end()
                break
        return (len(header), cut) if piece.startswith(header) and cut > len(header) else None

    def _ended(self, text: str, spans: list[Span]) -> Example:
        """With an end token after the last response, if the template writes none."""
        start, stop = spans[-1]
        closing = [match for match in self._end.special.finditer(text, start) if match.end() == stop]
        if not closing:
            text = text[:stop] + text[stop:].rstrip() + self._end.token()
            return Example(text, (*spans[:-1], (start, len(text))))
        if self._end.chosen and closing[0].group() != self._end.chosen:
            what = f"the chat template ends a response with {closing[0].group()!r}"
            remedy = "Leave --end-token out: rows with tools need the chat template."
            raise ModelError(what, where=f"end_token = {self._end.chosen!r}", remedy=remedy)
        return Example(text, tuple(spans))


_CALLS, _OUTPUTS, _TOOLS, _THOUGHTS = (
    "calls of tools",
    "the output of a tool",
    "the tools",
    "the thoughts of the last response",
)


def _responses(turns: list[Turn]) -> Iterator[int]:
    return (i for i, turn in enumerate(turns) if turn.role == "assistant")


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    if one.startswith(other):
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _name(i: int) -> str:
    return f"\ue000{i}\ue001"


def _cut(shown: str, others: list[int]) -> dict[int, str] | None:
    """The text after each marker up to the next, and under -1 the text before the first."""
    pieces, at, last = {}, 0, -1
    for i in others:
        start = shown.find(_name(i), at)
        if start < 0 or shown.count(_name(i)) != 1:
            return None
        pieces[last] = shown[at:start]
        at, last = start + len(_name(i)), i
    pieces[last] = shown[at:]
    return pieces


def _place(
    text: str, turns: list[Turn], pieces: dict[int, str], inside: dict[int, tuple[int, int]]
) -> list[Span] | None:
    """The spans in the real text, if it is the pieces with the contents between them."""
    at, spans = len(pieces[-1]), list[Span]()
    if not text.startswith(pieces[-1]):
        return None
    for i, piece in pieces.items():
        if i < 0:
            continue
        said = turns[i].whole
        forms = (said, said.strip(), json.dumps(said, ensure_ascii=False)[1:-1])
        content = next((form for form in forms if text.startswith(form + piece, at)), None)
        if content is None:
            return None
        at += len(content)
        if i + 1 in inside:
            start, stop = inside[i + 1]
            spans.append((at + start, at + stop))
        at += len(piece)
    return spans if at == len(text) else None
