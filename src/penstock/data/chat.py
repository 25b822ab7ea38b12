"""The tokenizer's own chat template: what it writes, and where in that the responses lie.

A span is a range of characters: a response and the token that ends it. It begins where the prompt of inference ends:
what the template then writes before the answer itself (Qwen3's empty think block, gpt-oss's channel) must be produced
by the model, so it must be trained. The rejected alternatives: `return_assistant_tokens_mask` of transformers works
only for the few templates that mark their responses with a `generation` block; searching for the header of a response
needs a header for each model, and finds it inside what users write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.data.facts import EndToken, TokenizerFacts
from penstock.data.messages import Turn
from penstock.data.render import THOUGHT_ENDS, Example, Renderer, Span
from penstock.data.tool_chat import ToolChat
from penstock.errors import DataError, ModelError, UserError

_MARK = "\ue000"


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a chat template writes around the contents of a conversation with given roles.

    `pieces[i]` comes before content i, the last piece after all of them. `leads[i]` is how many characters before
    content i the prompt of inference ends, for a response.
    """

    pieces: tuple[str, ...]
    leads: tuple[int, ...]


class ChatTemplate:
    """The tokenizer's own chat template (jinja, which transformers runs in its sandbox).

    Where the contents lie in the output is found by rendering the same roles once with markers for contents. That is
    exact however short a content is ("a" also occurs in `<|channel|>final`), and costs nothing per row, as the layout
    of a sequence of roles is kept. Every row is still rendered by the template itself and compared with the layout; if
    they differ, because the template looks into the contents (think blocks do that), the row is searched instead.
    """

    def __init__(self, facts: TokenizerFacts, end: EndToken) -> None:
        if facts.ambiguity:
            what, remedy = f"which chat template is meant cannot be told: {facts.ambiguity}", "Use --template alpaca."
            raise ModelError(what, where="template = 'chat'", remedy=remedy)
        self._end, self._render = end, Renderer(facts)
        self._tools = ToolChat(self._render, end)
        self._layouts: dict[tuple[str, ...], _Layout | None] = {}

    def render(self, turns: list[Turn], where: str, tools: tuple[Any, ...] = ()) -> Example:
        """The text of the turns and the span of every response. The last turn is a response."""
        if tools or any(turn.calls or turn.thought or turn.role == "tool" for turn in turns):
            turns = self._tools.with_thoughts_shown(turns, tools)
            if tools or any(turn.calls or turn.thought or turn.role == "tool" for turn in turns):
                return self._tools.render(turns, tools, where)
        text = self._apply(turns, where)
        roles = tuple(turn.role for turn in turns)
        if roles not in self._layouts:
            self._layouts[roles] = self._layout(roles)
        layout = self._layouts[roles]
        found = _match(text, turns, layout) if layout else None
        return self._close(text, found or self._search(text, turns, where))

    def prompt(self, turns: list[Turn], where: str) -> str:
        """The text of the turns, up to where the response begins."""
        return self._apply(turns, where, generation_prompt=True)

    def _apply(self, turns: list[Turn], where: str, *, generation_prompt: bool = False) -> str:
        return self._render(turns, where, generation_prompt=generation_prompt)

    def _prefix(self, turns: list[Turn], text: str) -> int | None:
        """Length of the prompt of inference for these turns, if that is how `text` begins."""
        try:
            prefix = self.prompt(turns, where="")
        except UserError:  # a template may refuse part of a conversation that it takes as a whole
            return None
        return len(prefix) if text.startswith(prefix) else None

    def _layout(self, roles: tuple[str, ...]) -> _Layout | None:
        """The layout of these roles, or None if the template does not write each content once and in order."""
        marked = [Turn(role, f"\ue000{i}\ue001") for i, role in enumerate(roles)]
        try:
            text = self._apply(marked, where="")
        except UserError:  # it asks something of the contents that a marker does not meet
            return None
        pieces, leads, at = [], [], 0
        for i, turn in enumerate(marked):
            start = text.find(turn.content, at)
            if start < 0 or text.count(turn.content) != 1:
                return None
            pieces.append(text[at:start])
            prefix = self._prefix(marked[:i], text) if turn.role == "assistant" else None
            leads.append(start - prefix if prefix is not None and at <= prefix <= start else 0)
            at = start + len(turn.content)
        return _Layout((*pieces, text[at:]), tuple(leads))

    def _search(self, text: str, turns: list[Turn], where: str) -> list[Span]:
        """For each response (where training begins, where its content ends), by looking for the contents."""
        self._refuse_gaps(text, turns, where)
        found: list[Span] = []
        at = 0
        for i, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            place = self._place(text, turns, i, at)
            thought, answer = _parts(turn.content)
            if place is None:
                what = f"the chat template changes the response of turn {i + 1} beyond recognition"
                raise DataError(what, where=where, remedy="Use --template alpaca or --template none.")
            prefix, end = self._prefix(turns[:i], text), place + len(answer)
            if prefix is None or not at < prefix <= place:
                thought = thought.strip()  # which may have been left out, as earlier ones often are
                said = text[at:place].rstrip()
                prefix = at + len(said) - len(thought) if thought and said.endswith(thought) else place
            blanks = turn.content[len(turn.content.rstrip()) :]
            found.append((prefix, end + len(blanks) if text.startswith(blanks, end) else end))
            at = found[-1][1]
        return found

    def _place(self, text: str, turns: list[Turn], i: int, at: int) -> int | None:
        """Where the answer of turn i begins: where a marker in its place does, or where it occurs if that is once.

        The first place after the response before was rejected: a question may hold the answer ("Is it yes or no?").
        """
        thought, answer = _parts(turns[i].content)
        marked = turns[i]._replace(content=thought + _MARK + turns[i].content[len(thought + answer) :])
        try:
            shown = self._apply([*turns[:i], marked, *turns[i + 1 :]], where="")
        except UserError:  # it asks something of the contents that a marker does not meet
            shown = ""
        place = shown.find(_MARK)
        if shown.count(_MARK) == 1 and text[:place] == shown[:place] and text.startswith(answer, place):
            return place
        start = max(at, self._prefix(turns[:i], text) or 0)
        return text.find(answer, start) if text.count(answer, start) == 1 else None

    def _refuse_gaps(self, text: str, turns: list[Turn], where: str) -> None:
        """Refuse a row of which the template leaves something out. Earlier thoughts are left out rightly."""
        for i, turn in enumerate(turns):
            if turn.role != "assistant" and turn.whole.strip() not in text:
                what = f"the chat template leaves out or changes turn {i + 1} ({turn.role})"
                remedy = "Write it into the turn after it, or use --template alpaca."
                raise DataError(what, where=where, remedy=remedy)
        thought = _parts(turns[-1].content)[0].replace("<think>", "").replace(THOUGHT_ENDS, "").strip()
        if thought not in text:
            what = "the chat template leaves out the thoughts of the last response"
            raise DataError(what, where=where, remedy="Remove them from the data, or use --template alpaca.")

    def _close(self, text: str, found: list[Span]) -> Example:
        """Extend each span through the token that ends the response; add one at the end if the template does not."""
        closing = self._end.special.search(text, found[-1][1])
        chosen = self._end.chosen
        if closing is None:
            # Trailing blanks after the last response are the template's spacing; the end token takes their place.
            text = text[: found[-1][1]] + text[found[-1][1] :].rstrip() + self._end.token()
            return Example(text, (*found[:-1], (found[-1][0], len(text))))
        if chosen and closing.group() != chosen:
            what = f"the chat template ends a response with {closing.group()!r}"
            remedy = "Leave --end-token out, or use --template alpaca."
            raise ModelError(what, where=f"end_token = {chosen!r}", remedy=remedy)
        limits = [start for start, _ in found[1:]] + [len(text)]
        spans = []
        for (start, end), limit in zip(found, limits, strict=True):
            closing = self._end.special.search(text, end, limit)
            stop = closing.end() if closing else end
            # Some templates close what was said with one token and the turn with another, at which models stop.
            if closing and self._end.default and closing.group() != self._end.default:
                stop += len(self._end.default) if text.startswith(self._end.default, stop) else 0
            spans.append((start, stop))
        return Example(text, tuple(spans))


def _parts(content: str) -> tuple[str, str]:
    """Of a response: what comes before the answer (a thought with its end, and blanks), and the answer, trimmed."""
    answer = content.rpartition(THOUGHT_ENDS)[2].strip()
    return content[: content.rfind(answer)] if answer else content, answer


def _match(text: str, turns: list[Turn], layout: _Layout) -> list[Span] | None:
    """For each response (where training begins, where its content ends), if the text is the layout and the contents."""
    found: list[Span] = []
    at = len(layout.pieces[0])
    if not text.startswith(layout.pieces[0]):
        return None
    for turn, lead, following in zip(turns, layout.leads, layout.pieces[1:], strict=True):
        for content in (turn.whole, turn.whole.strip()):
            if text.startswith(content + following, at):
                break
        else:
            return None
        if turn.role == "assistant":
            found.append((at - lead, at + len(content)))
        at += len(content + following)
    return found if at == len(text) else None
