"""From turns to the text the model sees, with the spans it is trained on.

A span is a range of characters: a response and the token that ends it. Spans of characters and not of tokens, because
the text is tokenized once and as a whole, exactly as the model will meet it; tokenizing the parts and joining them
gives other tokens at the seams. The rejected alternatives: `return_assistant_tokens_mask` of transformers works
only for the few templates that mark their responses with a `generation` block; searching for the header of a response
needs a header for each model, and finds it inside what users write.

Under a chat template a span begins where the prompt of inference ends: what the template then writes before the answer
itself (Qwen3's empty think block, gpt-oss's channel) must be produced by the model, so it must be trained.

What is counted and not defended against: text in the data that spells a special token becomes that token, as in every
trainer that renders with the tokenizer's own template. In rows of plain text it is taken to be meant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.data.files import Row
from penstock.data.turns import Dropped, Format, Turn, text_of, turns_of
from penstock.errors import DataError, ModelError, UserError
from penstock.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

DAY = datetime(2026, 1, 1)
"""What templates that write today's date are given, or the same data would be other tokens after midnight."""
_TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"']*)\1\s*\)""")
_MARK = "\ue000"
_THOUGHT_ENDS = "</think>"


@dataclass(frozen=True, slots=True)
class Example:
    """Text, and the ranges of its characters that are responses with their end token."""

    text: str
    spans: tuple[Span, ...]
    spells_token: bool = False
    """What someone said spells a special token."""


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, form: Format) -> None:
        self.form = form
        self.kind = recipe.template
        if self.kind == "auto":
            self.kind = "chat" if tokenizer.chat_template else "alpaca"
        if self.kind == "chat" and not tokenizer.chat_template:
            remedy = "Use --template alpaca or --template none."
            raise ModelError("the tokenizer has no chat template", where="template = 'chat'", remedy=remedy)
        self._bos = _leading_bos(tokenizer)
        self._end = EndToken(tokenizer, recipe.end_token)
        self._chat = ChatTemplate(tokenizer, self._end) if self.kind == "chat" else None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that can end a response."""
        return self._end.special_ids

    def render(self, row: Row) -> Example | Dropped:
        """The text of a row and its trained spans."""
        if self.form == "text":
            text = text_of(row)
            return text if isinstance(text, Dropped) else self._whole(text)
        turns = turns_of(row, self.form)
        if isinstance(turns, Dropped):
            return turns
        example = self._chat.render(turns, row.where) if self._chat else self._plain(turns)
        responses = [turn for turn in turns if turn.role == "assistant"]
        trained = tuple(span for span, turn in zip(example.spans, responses, strict=True) if turn.trained)
        example = replace(example, spans=trained)
        spells_token = any(self._end.special.search(part) for turn in turns for part in (turn.content, turn.input))
        return replace(example, spells_token=True) if spells_token else example

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


def _leading_bos(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the token that this tokenizer puts first by itself, or nothing."""
    first = tokenizer("a")["input_ids"][:1]
    return str(tokenizer.bos_token) if tokenizer.bos_token and first == [tokenizer.bos_token_id] else ""


class EndToken:
    """The token that ends a response, and the special tokens by which a template's own end tokens are recognised."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chosen: str | None) -> None:
        added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        if chosen is not None and chosen not in added:
            # A token that is not an added one may be split or merged with its neighbours; it would never end anything.
            what, known = "is not one of the tokenizer's special tokens", ", ".join(sorted(added)) or "(none)"
            raise ModelError(what, where=f"end_token = {chosen!r}", remedy=f"Those are: {known}.")
        special |= {chosen} if chosen else set()
        self.chosen = chosen
        self.default = chosen or tokenizer.eos_token
        self.special_ids = frozenset(added[token] for token in special if token in added)
        longest_first = sorted(special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) if special else r"(?!)")

    def token(self) -> str:
        """The token to append where the text has no end token yet."""
        if not self.default:
            what = "the tokenizer has no end token, so the model would never learn to stop"
            raise ModelError(what, where="end_token", remedy="Name one of its special tokens with --end-token.")
        return str(self.default)

    def after(self, text: str) -> str:
        """The text with its end token, which it may have already."""
        return text if text.endswith(self.token()) else text + self.token()


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end: EndToken) -> None:
        self._tokenizer, self._end = tokenizer, end
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:  # it has several, and none of them by default
            what, remedy = f"which chat template is meant cannot be told: {error}", "Use --template alpaca."
            raise ModelError(what, where="template = 'chat'", remedy=remedy) from error
        self._text = _TODAY.sub(lambda call: f"'{DAY.strftime(call[2])}'", template)
        self._layouts: dict[tuple[str, ...], _Layout | None] = {}

    def render(self, turns: list[Turn], where: str) -> Example:
        """The text of the turns and the span of every response. The last turn is a response."""
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
        from jinja2.exceptions import TemplateError

        messages = [{"role": turn.role, "content": turn.whole} for turn in turns]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self._text, tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, TypeError, ValueError) as error:
            remedy = "Change the turns to what the model's chat template takes, or use --template alpaca."
            raise DataError(f"the chat template refuses the row: {error}", where=where, remedy=remedy) from error
        return str(text)

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
        marked = replace(turns[i], content=thought + _MARK + turns[i].content[len(thought + answer) :])
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
        thought = _parts(turns[-1].content)[0].replace("<think>", "").replace(_THOUGHT_ENDS, "").strip()
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
    answer = content.rpartition(_THOUGHT_ENDS)[2].strip()
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
