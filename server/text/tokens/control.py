"""A model's control tokens: the ids that structure an answer, whatever the tokenizer's flags say about them.

Owns the border between a tag and the same characters spelled in ordinary tokens. Immutable but for a table that fills;
used by the server's worker thread and event loop. Never encodes a text, and never decides what a tag means.

A tag is known by its ids wherever the tokenizer has tokens for it. In the text of an answer each such token is a mark,
a character that no text can hold, so that what is searched for tags can't be confused by what a model spells out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from server.grammar.build import Tag

# What an answer's characters can be, by mlx-lm's names, and which tag leads from each to which other.
NORMAL = "normal"
REASONING = "reasoning"
TOOL = "tool"
Transitions = Mapping[str, tuple[tuple[str, str], ...]]

_FIRST_MARK = 0xD800  # lone surrogates never come out of UTF-8; there are 2,048, and a model has a handful of tags


class Tags:
    """How a model's tags are written.

    Attributes:
        ids: of the control tokens in the tags.
        texts: of ordinary tokens that are whole characters, filled as they come up.
    """

    def __init__(self, texts: Iterable[str], added: Mapping[str, int], rows: int | None = None) -> None:
        """`texts`: all tags of the model. `added`: the tokenizer's added tokens. Of `rows` logits, ids beyond can't be
        drawn, so that a tag with one of them is spelled out."""
        wanted = [text for text in dict.fromkeys(texts) if text]
        within = {text: token for text, token in added.items() if text and (rows is None or token < rows)}
        words = [word for word in within if any(word in text for text in wanted)]
        words.sort(key=len, reverse=True)
        cut = re.compile("(" + "|".join(map(re.escape, words)) + ")" if words else "(?!)")
        self._tags: dict[str, Tag] = {
            text: tuple(within.get(part, part) for part in cut.split(text) if part) for text in wanted
        }
        self.ids = frozenset(part for tag in self._tags.values() for part in tag if isinstance(part, int))
        self.texts: dict[int, str] = {}
        texts_of = {token: text for text, token in within.items() if token in self.ids}
        self._marks = {token: chr(_FIRST_MARK + number) for number, token in enumerate(sorted(self.ids))}
        self._plain = {ord(mark): texts_of[token] for token, mark in self._marks.items()}

    def tag(self, text: str) -> Tag:
        """A tag as it is written: one of those that were given, or else a text."""
        return self._tags.get(text) or ((text,) if text else ())

    def mark(self, token: int) -> str:
        """What stands for a control token in the text of an answer; empty for every other token."""
        return self._marks.get(token, "")

    def marked(self, text: str) -> str:
        """A tag as it stands in the text of an answer."""
        return "".join(part if isinstance(part, str) else self._marks[part] for part in self.tag(text))

    def plain(self, text: str) -> str:
        """The text of an answer with its marks spelled out."""
        if not text.isascii():
            return text.translate(self._plain)
        return text
