"""From turns to the text the model sees, with the spans it is trained on.

A span is a range of characters: a response and the token that ends it. Spans of characters and not of tokens, because
the text is tokenized once and as a whole, exactly as the model will meet it; tokenizing the parts and joining them
gives other tokens at the seams. `chat.py` finds them under a chat template.

What is counted and not defended against: text in the data that spells a special token becomes that token, as in every
trainer that renders with the tokenizer's own template. In rows of plain text it is taken to be meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.data.chat import ChatTemplate
from penstock.data.facts import EndToken, TokenizerFacts, facts_of
from penstock.data.files import Row
from penstock.data.forms import MEDIA, Format, Keys
from penstock.data.messages import Turn, tools_of
from penstock.data.render import Example
from penstock.data.turns import Dropped, refuse_placeholders, text_of, turns_of
from penstock.errors import DataError, ModelError
from penstock.recipe.lists import parse_columns
from penstock.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills rows up: the padding token, else the end token, else 0.

    Any id would do. Padding is a filler that no example attends to and nothing trains on; both follow from positions,
    never from comparing ids, so an end token that doubles as padding is still learned.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def prompt_text(tokenizer: PreTrainedTokenizerBase, recipe: Recipe, prompt: str, earlier: Sequence[Turn] = ()) -> str:
    """What to give a model trained with this recipe so that it answers `prompt` after `earlier` turns.

    Tokenize it with add_special_tokens=False, as in training. With data_format `auto` the rows are taken to be
    questions and answers; a run on plain text should record `text` (Dataset.data_format says what was found).
    """
    form: Format = "text" if recipe.data_format == "text" else "messages"
    return Template(tokenizer, recipe, form).prompt(prompt, earlier)


class Template:
    """Renders rows of one form for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | TokenizerFacts, recipe: Recipe, form: Format) -> None:
        facts = facts_of(tokenizer)
        self.form = form
        self.kind = recipe.template
        if self.kind == "auto":
            self.kind = "chat" if facts.has_chat_template else "alpaca"
        if self.kind == "chat" and not facts.has_chat_template:
            remedy = "Use --template alpaca or --template none."
            raise ModelError("the tokenizer has no chat template", where="template = 'chat'", remedy=remedy)
        self._bos, self._end = facts.bos, EndToken(facts, recipe.end_token)
        self._chat = ChatTemplate(facts, self._end) if self.kind == "chat" else None
        self._keys = Keys(form)
        left_out = {column for column, name in parse_columns(recipe.columns) or () if not name}
        self._looks_for_marks = not left_out & {*MEDIA}

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that can end a response."""
        return self._end.special_ids

    def unused(self, row: Row) -> tuple[str, ...]:
        """Columns and keys of messages that are not used; what carries meaning and cannot be trained on is refused."""
        return self._keys.unused(row)

    def render(self, row: Row) -> Example | Dropped:
        """The text of a row and its trained spans."""
        if self.form == "text":
            text = text_of(row)
            return text if isinstance(text, Dropped) else self._whole(text)
        left_out: list[Turn] = []
        turns = turns_of(row, self.form, left_out)
        if isinstance(turns, Dropped):
            return turns
        if self._looks_for_marks:
            refuse_placeholders(turns, row.where)
        tools = tools_of(row.fields, row.where)
        if self._chat:
            example = self._chat.render(turns, row.where, tools)
        else:
            self._refuse_tools(turns, tools, row.where)
            example = self._plain(turns)
        responses = [turn for turn in turns if turn.role == "assistant"]
        both: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for span, turn in zip(example.spans, responses, strict=True):
            both[turn.trained].append(span)
        said = "\x00".join([part for turn in turns for part in (turn.content, turn.input)])
        spelled = self._end.special.search(said) is not None
        unasked = any(turn.role == "user" and not turn.whole.strip() for turn in turns)
        return Example(example.text, tuple(both[1]), spelled, tuple(both[0]), unasked, bool(left_out))

    def _refuse_tools(self, turns: list[Turn], tools: tuple[object, ...], where: str) -> None:
        """Refuse what only a chat template has a place for."""
        has = "tools" if tools else ""
        for turn in turns:
            has = "tool calls" if turn.calls or turn.role == "tool" else "thoughts" if turn.thought else has
        if has:
            what = f"the row has {has}, and the template {self.kind!r} has no place for them"
            raise DataError(what, where=where, remedy="Use a tokenizer whose chat template has: --template chat.")

    def prompt(self, question: str, earlier: Sequence[Turn] = ()) -> str:
        """The text of a question, after earlier turns as training renders them, up to where the response begins."""
        asked = Turn("user", question)
        if self._chat and self.form != "text":
            return self._chat.prompt([*earlier, asked], where="the prompt")
        if self.form == "text":  # one text that goes on
            return self._bos + "".join(turn.content for turn in earlier) + question
        before = self._plain(list(earlier)).text if earlier else self._bos
        if self.kind == "none":
            return before + question
        return f"{before}{chr(10) * 2 if earlier else ''}{_alpaca_heading(asked)}### Response:\n"

    def _whole(self, text: str) -> Example:
        start = "" if text.startswith(self._bos) else self._bos
        text = start + self._end.after(text)
        return Example(text, ((len(start), len(text)),))

    def _plain(self, turns: list[Turn]) -> Example:
        text, spans = self._bos, []
        headings = self.kind == "alpaca"
        for i, turn in enumerate(turns):
            if turn.role != "assistant":
                text += _alpaca_heading(turn) if headings else turn.whole
                continue
            text += "### Response:\n" if headings else ""
            response = self._end.after(turn.content)
            spans.append((len(text), len(text) + len(response)))
            text += response
            text += "\n\n" if headings and i < len(turns) - 1 else ""
        return Example(text, tuple(spans))


def _alpaca_heading(turn: Turn) -> str:
    if turn.role != "user":
        return f"{turn.content}\n\n"
    given = f"### Input:\n{turn.input}\n\n" if turn.input else ""
    return f"### Instruction:\n{turn.content}\n\n{given}"
