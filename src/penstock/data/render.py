"""One conversation through the jinja template of a tokenizer.

transformers runs it, in its sandbox. Its function is called and not the tokenizer's method, which does nothing more
for plain text and would bring torch into every process. Conversations of plain text, which are nearly all, go to the
compiled template itself: what transformers does before that is for other objects than text, and takes as long as the
template. The first of them goes both ways, and if the results differ, all go the long one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.data.facts import TokenizerFacts
from penstock.data.messages import Turn
from penstock.errors import DataError

Span = tuple[int, int]

DAY = datetime(2026, 1, 1)
"""What templates that write today's date are given, or the same data would be other tokens after midnight."""
_TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"']*)\1\s*\)""")
THOUGHT_ENDS = "</think>"


@dataclass(frozen=True, slots=True)
class Example:
    """Text, and the ranges of its characters that are responses with their end token."""

    text: str
    spans: tuple[Span, ...]
    spells_token: bool = False
    """What someone said spells a special token."""
    untrained: tuple[Span, ...] = ()
    """Responses that are shown and not trained on, even where prompts are."""
    unasked: bool = False
    """A question is empty."""
    unanswered: bool = False
    """Turns came after the last response, and are left out."""


class Renderer:
    """Turns, and the tools that they may call, as the template writes them."""

    def __init__(self, facts: TokenizerFacts) -> None:
        self._named, self._method = dict(facts.named), facts.method
        self._quick: Callable[[list[dict[str, Any]]], str] | None = None
        self._is_compared = False
        self.template, self._tool_template = (
            _TODAY.sub(lambda call: f"'{DAY.strftime(call[2])}'", text)
            for text in (facts.chat_template, facts.tool_template)
        )

    def __call__(
        self, turns: list[Turn], where: str, *, tools: tuple[Any, ...] = (), generation_prompt: bool = False
    ) -> str:
        """The text; a DataError of the row at `where` if the template refuses."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        is_plain = not tools and not generation_prompt and not self._method
        try:
            if not turns:
                raise ValueError("there is no turn")
            conversation = [_message(turn) for turn in turns]
            if is_plain and self._quick and all(len(message) == 2 for message in conversation):
                return self._quick(conversation)
            asked: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": generation_prompt}
            template = self._tool_template if tools else self.template
            if self._method:
                return str(self._method(conversation, chat_template=template, tokenize=False, **asked))
            rendered: Any = render_jinja_template([conversation], chat_template=template, **asked, **self._named)
        except (TemplateError, TypeError, ValueError) as error:
            remedy = "Change the turns to what the model's chat template takes, or use --template alpaca."
            raise DataError(f"the chat template refuses the row: {error}", where=where, remedy=remedy) from error
        text = str(rendered[0][0])
        if is_plain and not self._is_compared and all(len(message) == 2 for message in conversation):
            self._is_compared = True
            quick = _compiled(template, self._named)
            self._quick = quick if quick and quick(conversation) == text else None
        return text


def _compiled(template: str, named: dict[str, Any]) -> Callable[[list[dict[str, Any]]], str] | None:
    """The template as jinja runs it, if transformers still says how it compiles one."""
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:
        return None
    compiled = compile_template(template)
    always = {**compiled.globals, "tools": None, "documents": None, "add_generation_prompt": False, **named}

    def render(messages: list[dict[str, Any]]) -> str:
        # With all variables at hand, jinja need not put its own and ours together anew for every row.
        context = compiled.new_context({**always, "messages": messages}, shared=True)
        return "".join(compiled.root_render_func(context))

    return render


def _message(turn: Turn) -> dict[str, Any]:
    """A turn as templates know it. Arguments are objects there, and not JSON text."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.whole}
    if turn.calls:
        message["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
    if turn.thought:
        message["reasoning_content"] = message["thinking"] = turn.thought
    if turn.name:
        message["name"] = turn.name
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    return message
