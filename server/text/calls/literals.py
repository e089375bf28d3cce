"""Values as models write them: JSON, Python's literals, Gemma's.

Owns the reading of one value at a place in a text, and where it ends. Runs on the event loop; pure. Never evaluates
anything, and gives no number that JSON can't carry. Python's own `ast` isn't used: it prints warnings about what a
model wrote, knows no true and null, and says nothing about a text that was cut off.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 100
MAX_DIGITS = 400  # more than any finite float needs; Python refuses to read thousands of them

_SPACE = re.compile(r"\s*")
_BARE_KEY = re.compile(r"[^\s:{}\[\],\"'<](?:[^:{}\[\],<\n]*[^\s:{}\[\],<])?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.])")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_STRING = re.compile(
    r"(?P<prefix>[rRuU]?)(?:"
    r'"""(?P<a>(?:[^\\]|\\.)*?)"""|\'\'\'(?P<b>(?:[^\\]|\\.)*?)\'\'\'|'
    r'"(?P<c>(?:[^"\\]|\\.)*)"|\'(?P<d>(?:[^\'\\]|\\.)*)\')',
    re.DOTALL,
)
_QUOTED = re.compile(r"[rRuU]?[\"']")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|\r?\n|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\r\n": ""}
_ESCAPES |= {char: char for char in "\\'\""}
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class Unreadable(ValueError):
    """Here stands no value, or none that is complete."""


class Cut(Unreadable):
    """The text ends within the value; `quoted`: within one of its strings."""

    def __init__(self, message: str, *, quoted: bool = False) -> None:
        super().__init__(message)
        self.quoted = quoted


class Reader:
    """Reads values one after the other; mutable, for one text.

    `quote` is the tag on both sides of a string in the formats of Gemma, where keys have no quotes.

    Attributes:
        at: where the next value begins.
    """

    def __init__(self, text: str, at: int = 0, *, quote: str = "") -> None:
        self._text = text
        self._quote = quote
        self.at = at

    def value(self, depth: int = 0) -> Any:
        """The value that begins here. Raises Unreadable, Cut where the text ends within it; then `at` means nothing."""
        self.skip()
        if self._quote and self._text.startswith(self._quote, self.at):
            return self._tagged()
        if _QUOTED.match(self._text, self.at):
            return self._string()
        opening = self._text[self.at : self.at + 1]
        if opening in _CLOSING and opening:
            if depth == MAX_DEPTH:
                raise Unreadable("nested too deeply")
            self.at += 1
            if opening == "{":
                return self._members(depth + 1)
            return self._items(_CLOSING[opening], depth + 1)
        return self._scalar()

    def skip(self) -> None:
        match = _SPACE.match(self._text, self.at)
        if match:
            self.at = match.end()

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Goes on behind what the pattern finds here."""
        if match := pattern.match(self._text, self.at):
            self.at = match.end()
        return match

    def bare(self, ends: str) -> str:
        """The text up to one of these characters, wherever brackets and quotes are closed. Raises Cut without one."""
        start = self.at
        open_ = 0
        while self.at < len(self._text):
            char = self._text[self.at]
            if not open_ and char in ends:
                return self._text[start : self.at].rstrip()
            open_ = max(0, open_ + (char in "[({") - (char in "])}"))
            if self._at_quote():
                self.at = self._behind_string()
            else:
                self.at += 1
        raise Cut("no end")

    # ---------------------------------------------------------------- parts
    def _at_quote(self) -> bool:
        """Where strings have tags, a bare text may have apostrophes."""
        if self._quote:
            return self._at_tag()
        return self._text[self.at] in "\"'"

    def _at_tag(self) -> bool:
        return bool(self._quote) and self._text.startswith(self._quote, self.at)

    def _behind_string(self) -> int:
        """Behind the string that begins here; behind its first character if none ends, as with an apostrophe."""
        try:
            before = self.at
            if self._at_tag():
                self._tagged()
            else:
                self._string()
            return self.at
        except Unreadable:
            return before + 1

    def _tagged(self) -> str:
        start = self.at + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            raise Cut("a string without its end", quoted=True)
        self.at = end + len(self._quote)
        return self._text[start:end]

    def _string(self) -> str:
        match = self.take(_STRING)
        if match is None:
            raise Cut("a string without its end", quoted=True)
        inner = next(part for part in match.group("a", "b", "c", "d") if part is not None)
        if match["prefix"] in ("r", "R"):
            return inner
        return unescaped(inner)

    def _scalar(self) -> Any:
        if match := self.take(_NUMBER):
            return number(match[0])
        if (match := _WORD.match(self._text, self.at)) and match[0] in _WORDS:
            self.at = match.end()
            return _WORDS[match[0]]
        raise self._fault()

    def _items(self, closing: str, depth: int) -> Any:
        items: list[Any] = []
        commas = 0
        while not self._closes(closing):
            items.append(self.value(depth))
            commas += self._comma(closing)
        if closing == ")" and len(items) == 1 and not commas:
            return items[0]
        return items

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._closes("}"):
            key = self._key()
            self._expect(":")
            members[key] = self.value(depth)
            self._comma("}")
        return members

    def _key(self) -> str:
        if self._quote and (match := self.take(_BARE_KEY)):
            return match[0]
        key = self.value(MAX_DEPTH)
        if isinstance(key, str):
            return key
        return json.dumps(key)

    def _closes(self, closing: str) -> bool:
        self.skip()
        closes = self._text.startswith(closing, self.at)
        self.at += closes
        return closes

    def _comma(self, closing: str) -> bool:
        """Passes a comma; without one the closing bracket must follow."""
        self.skip()
        if self._text.startswith(",", self.at):
            self.at += 1
            return True
        if not self._text.startswith(closing, self.at):
            raise self._fault()
        return False

    def _expect(self, char: str) -> None:
        self.skip()
        if not self._text.startswith(char, self.at):
            raise self._fault()
        self.at += 1

    def _fault(self) -> Unreadable:
        if self.at >= len(self._text):
            return Cut("no end")
        return Unreadable(f"no value at {self.at}")


# ---------------------------------------------------------------- whole texts
def number(text: str) -> int | float:
    """Raises Unreadable for what isn't a number that JSON can carry, or is spelled as none of its numbers."""
    digits = text.lstrip("+-")
    if len(text) > MAX_DIGITS or re.match(r"0[0-9]", digits):
        raise Unreadable(text)
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise Unreadable(text)
    return value


def container(text: str) -> list[Any] | dict[str, Any] | None:
    """The array or object that a text is, as JSON or else as Python's literal; None if it is neither."""
    text = text.strip()
    if text[:1] not in _CLOSING or not text:
        return None
    value = None
    if text[0] != "(":
        value = _json(text)
    if value is None:
        value = _literal(text)
    if isinstance(value, list | dict):
        return value
    return None


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_float=number, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _literal(text: str) -> Any:
    reader = Reader(text)
    try:
        value = reader.value()
    except Unreadable:
        return None
    reader.skip()
    if reader.at == len(text):
        return value
    return None


def unescaped(text: str) -> str:
    """A string's inside without its escapes. Halves of a character that stand alone are replaced."""
    plain = _ESCAPE.sub(_unescape, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPES:
        return _ESCAPES[code]
    if code[0] in "uUx" and len(code) > 1:
        value = int(code[1:], 16)
        if value < 0x110000:
            return chr(value)
        return match[0]
    if code.isdigit() and code[0] in "01234567":
        return chr(int(code, 8))
    return match[0]
