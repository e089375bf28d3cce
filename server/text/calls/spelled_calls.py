"""Calls that are spelled as in a programming language: `f(a=1)`, or Gemma's `call:f{a:1}`.

Owns the reading of these formats, in place of mlx-lm's parsers (0.31): Gemma's lose all calls of a block but the first
(FunctionGemma), cut a value at a brace or comma that is its own, and fail on half an object; the Python one drops
positional arguments, and makes a call of what no longer parses. This may go when mlx-lm's hand out the text of each
value; the test that compares the two names what differs. Runs on the event loop; pure. Never converts by a schema:
that is `text/calls/arguments.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server.text.calls.arguments import ModelCall, Parameters, Value, names_of
from server.text.calls.literals import Cut, Reader, Unreadable

_SPACES = " \t\r\n,"
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class Notation:
    """How a format spells calls: the beginning of one, what stands before a value, the bracket that ends a call, the
    tag on both sides of a string, and what stands between calls."""

    call: re.Pattern[str]
    key: re.Pattern[str]
    closing: str
    quote: str = ""
    between: str = ""


_GEMMA_CALL = re.compile(r"call:\s*(?P<name>[\w.-]+)\s*\{")
_GEMMA_KEY = re.compile(r"(?P<key>[^\s:{}\[\],]+)\s*:\s*")
NOTATIONS: Mapping[str, Notation] = {
    "pythonic": Notation(
        re.compile(r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*+)\s*\("),
        re.compile(r"(?P<key>\w+)\s*=\s*"),
        ")",
        between="[]",
    ),
    "gemma4": Notation(_GEMMA_CALL, _GEMMA_KEY, "}", '<|"|>'),
    "function_gemma": Notation(_GEMMA_CALL, _GEMMA_KEY, "}", "<escape>"),
}


class SpelledCalls:
    """One text, read as calls when this is made.

    Attributes:
        parts: calls, and the texts that belong to none, in order.
        open: the text ends within a string.
    """

    def __init__(self, notation: Notation, text: str, tools: list[dict[str, Any]] | None = None) -> None:
        self._notation = notation
        self._text = text
        self._tools = tools
        self.open = False
        self.parts: list[ModelCall | str] = []
        at = done = 0
        call = _knowing(notation.call, names_of(tools))
        while match := call.search(text, at):
            at = match.end()
            reader = Reader(text, at, quote=notation.quote)
            if (values := self._values(reader, match["name"])) is not None:
                self.parts += [
                    text[done : match.start()].strip(_SPACES + notation.between),
                    ModelCall(match["name"], values),
                ]
                at = done = reader.at
        self.parts.append(text[done:].strip(_SPACES + notation.between))

    def _values(self, reader: Reader, name: str) -> dict[str, Value] | None:
        """A call's arguments, as far as the text goes; None if this is no call."""
        key_of = _knowing(self._notation.key, Parameters.named(name, self._tools).names)
        values: dict[str, Value] = {}
        while reader.at < len(self._text):
            reader.take(_BETWEEN)
            if self._text.startswith(self._notation.closing, reader.at):
                reader.at += 1
                break
            key = reader.take(key_of)
            if key is None:
                ended = reader.at >= len(self._text) or self._text[reader.at :].isidentifier()
                if not ended:
                    return None
                reader.at = len(self._text)
                return values
            try:
                values[key["key"].strip("\"'")] = self._value(reader)
            except Cut as cut:
                self.open = cut.quoted
                reader.at = len(self._text)
        return values

    def _value(self, reader: Reader) -> Value:
        """Raises Cut."""
        start = reader.at
        ends = "," + self._notation.closing
        try:
            literal = reader.value()
            text = self._text[start : reader.at]
            reader.skip()
            if self._text.startswith(tuple(ends), reader.at):
                return Value(literal, literal if isinstance(literal, str) else text)
        except Cut as cut:
            if cut.quoted:
                raise
        except Unreadable:
            pass
        reader.at = start
        return Value.plain(reader.bare(ends))


def _knowing(pattern: re.Pattern[str], names: Iterable[str]) -> re.Pattern[str]:
    """The pattern of a name, which also finds those of the tools that no programming language has, such as `a-b`."""
    group = next(iter(pattern.groupindex))
    odd = sorted((re.escape(name) for name in names if name and not _IDENTIFIER.fullmatch(name)), key=len, reverse=True)
    if not odd:
        return pattern
    return re.compile(pattern.pattern.replace(f"(?P<{group}>", f"(?P<{group}>{'|'.join(odd)}|"))
