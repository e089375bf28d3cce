"""A user's grammar in Lark, read as far as the checks need it.

Owns the words of a grammar and the definitions that they make. Runs in the server's worker thread; pure. Never decides
whether a grammar is right: what isn't understood here raises Unread, and llguidance has the last word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_NESTED = 20  # grammars in grammars
_WORD = re.compile(
    r"(?P<blank>[ \t\r]+|(?:#|//)[^\n]*)|(?P<aside>%(?:ignore|import|declare)\b[^\n]*)|(?P<line>\n)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*)|(?P<token><[^<>\s]+>)'
    r"|(?P<inner>%\w+)|(?P<name>[?!]?[A-Za-z_]\w*)|(?P<often>\{[^}\n]*\}|~[ \t]*\d+(?:\.\.\d+)?|[*+?])"
    r"|(?P<range>\.\.)|(?P<sign>.)",
    re.ASCII,
)
_OPENING, _CLOSING = ("(", "[", "{"), (")", "]", "}")


class Unread(Exception):
    """The grammar has something that isn't understood here."""


@dataclass(slots=True)
class Word:
    """A word of a grammar.

    Attributes:
        kind: the name of its group in the pattern; `json` for a schema, `grammar` for a nested one.
        start: its first character in the grammar, as `end` is the one behind it.
        value: of `json`: what stands behind the word.
        words: of `grammar`: those inside it.
    """

    kind: str
    text: str
    start: int
    end: int
    value: Any = None
    words: list[Word] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Definition:
    """A rule or terminal: `attributes` are the words in brackets behind its name."""

    name: str
    attributes: Sequence[Word]
    body: Sequence[Word]
    source: str

    @property
    def is_terminal(self) -> bool:
        return self.name.lstrip("_")[:1].isupper()


def words(lark: str) -> list[Word]:
    """The grammar's words. Raises Unread where a nested value is no JSON or a nested grammar doesn't end."""
    return _words(lark, 0, 0)[0]


def _words(lark: str, place: int, nested: int) -> tuple[list[Word], int]:
    """Words up to the end of the grammar, and the place of that end."""
    found: list[Word] = []
    while place < len(lark):
        match = _WORD.match(lark, place)
        if match is None:
            raise Unread
        word = Word(str(match.lastgroup), match[0], place, match.end())
        if word.kind == "inner":
            _read_inner(lark, word, nested)
        if nested and word.text == "}":
            return found, word.end
        if word.kind != "blank":
            found.append(word)
        place = word.end
    if nested:
        raise Unread
    return found, place


def _read_inner(lark: str, word: Word, nested: int) -> None:
    """Adds what belongs to a word such as `%json`."""
    place = word.end
    while place < len(lark) and lark[place].isspace():
        place += 1
    if word.text == "%lark":
        if lark[place : place + 1] != "{" or nested == MOST_NESTED:
            raise Unread
        word.kind = "grammar"
        word.words, word.end = _words(lark, place + 1, nested + 1)
        return
    try:
        word.value, word.end = json.JSONDecoder().raw_decode(lark, place)
    except (ValueError, RecursionError):
        raise Unread from None
    if word.text == "%json":
        word.kind = "json"


def every(found: Sequence[Word]) -> Iterator[Word]:
    """The words, and those of nested grammars."""
    for word in found:
        yield word
        yield from every(word.words)


def definitions(lark: str, found: Sequence[Word]) -> list[Definition]:
    """The definitions of one grammar, without those of nested ones. Raises Unread."""
    made = []
    place = 0
    while place < len(found):
        word = found[place]
        if word.kind == "name":
            end = _end(found, place)
            made.append(_definition(lark, found[place:end]))
            place = end
        elif word.kind in ("line", "aside") or word.text == "%llguidance":
            place += 1
        else:
            raise Unread
    return made


def _definition(lark: str, found: Sequence[Word]) -> Definition:
    depth = 0
    for place, word in enumerate(found):
        depth += _deeper(word)
        if depth == 0 and word.text == ":":
            attributes = found[2 : place - 1]
            if place > 1 and (found[1].text, found[place - 1].text) != ("[", "]"):
                raise Unread
            name = found[0].text.lstrip("?!")
            return Definition(name, attributes, found[place + 1 :], lark[found[0].start : found[-1].end])
    raise Unread


def _end(found: Sequence[Word], place: int) -> int:
    """Where the definition that begins at `place` ends."""
    depth = 0
    while place < len(found):
        depth += _deeper(found[place])
        if depth == 0 and found[place].kind == "line" and not _goes_on(found, place):
            return place
        place += 1
    return place


def _goes_on(found: Sequence[Word], place: int) -> bool:
    """Whether an alternative follows behind a line's end."""
    while place < len(found) and found[place].kind == "line":
        place += 1
    return place < len(found) and found[place].text == "|"


def _deeper(word: Word) -> int:
    if word.kind != "sign":
        return 0
    return (word.text in _OPENING) - (word.text in _CLOSING)
