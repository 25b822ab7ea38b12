"""What rendering and tokenizing need of a tokenizer, in a form that another process can be given.

`transformers`' own object is not: it pickles by importing its class, and with it torch, which takes seconds and
hundreds of megabytes in every process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Added:
    """A token that is not made of others."""

    text: str
    id: int
    special: bool


@dataclass(frozen=True)
class TokenizerFacts:
    """A fast tokenizer, its special tokens and its chat template."""

    backend: str
    """What tokenizer.json says; empty if it is not a fast one."""
    added: tuple[Added, ...]
    special: tuple[str, ...]
    named: tuple[tuple[str, Any], ...]
    """bos_token, eos_token and so on, as templates are given them."""
    eos: str | None
    bos: str
    """The text of the token that it puts first by itself, or nothing."""
    has_chat_template: bool
    chat_template: str = ""
    """Empty also if it has several, and none of them by default."""
    tool_template: str = ""
    """The one for conversations with tools, which is nearly always the same."""
    ambiguity: str = ""
    splits_special: bool = False
    """Text that spells a special token is not that token."""
    method: Any = None
    """Its own way to apply a chat template, if its class has one; then it cannot be given to another process."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer itself, made anew."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.backend)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = self.splits_special
        return tokenizer


def facts_of(tokenizer: PreTrainedTokenizerBase | TokenizerFacts) -> TokenizerFacts:
    """The facts of a tokenizer."""
    if isinstance(tokenizer, TokenizerFacts):
        return tokenizer
    templates, ambiguity = ("", ""), ""
    if tokenizer.chat_template:
        try:
            templates = (tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}]))
        except ValueError as error:  # it has several, and none of them by default
            ambiguity = str(error)
    from transformers import PreTrainedTokenizerBase

    own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token and first == [tokenizer.bos_token_id]
    return TokenizerFacts(
        backend=tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "",
        added=tuple(Added(str(token), i, token.special) for i, token in tokenizer.added_tokens_decoder.items()),
        special=tuple(tokenizer.all_special_tokens),
        named=tuple(tokenizer.special_tokens_map.items()),
        eos=tokenizer.eos_token,
        bos=str(tokenizer.bos_token) if begins else "",
        has_chat_template=bool(tokenizer.chat_template),
        chat_template=templates[0],
        tool_template=templates[1],
        ambiguity=ambiguity,
        splits_special=bool(getattr(tokenizer, "split_special_tokens", False)),
        method=tokenizer.apply_chat_template if own else None,
    )


class EndToken:
    """The token that ends a response, and the special tokens by which a template's own end tokens are recognised."""

    def __init__(self, facts: TokenizerFacts, chosen: str | None) -> None:
        added = {token.text: token.id for token in facts.added}
        special = {token.text for token in facts.added if token.special} | set(facts.special)
        if chosen is not None and chosen not in added:
            # A token that is not an added one may be split or merged with its neighbours; it would never end anything.
            what, known = "is not one of the tokenizer's special tokens", ", ".join(sorted(added)) or "(none)"
            raise ModelError(what, where=f"end_token = {chosen!r}", remedy=f"Those are: {known}.")
        special |= {chosen} if chosen else set()
        self.chosen = chosen
        self.default = chosen or facts.eos
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
