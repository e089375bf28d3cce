"""Calls in a text that is marked up.

Owns the reading of these formats, in place of mlx-lm's parsers (0.31). Those lose calls: Qwen3-Coder's takes the first
of several in a block, and an argument that doesn't convert makes a whole call text. They end a value at anything that
looks like its closing tag, strip white space that is the value's own (GLM's, MiniMax's, MiniCPM's, LongCat's), and
convert by rules of their own, each by others. This may go when they hand out the texts of all calls unconverted; the
test that compares the two names what differs. Runs on the event loop; pure. Never converts: `arguments` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from html import unescape
from typing import Any

from server.text.calls.arguments import ModelCall, Parameters, Value
from server.text.calls.literals import container
from server.text.calls.markup import Markup

_SPACE = re.compile(r"\s*")
_CDATA = ("<![CDATA[", "]]>")
_SECTIONS = r"<!\[CDATA\[.*?(?:\]\]>|\Z)"  # in which no tag counts
_GROUP = re.compile(r"\(\?P<\w+>")


class MarkedCalls:
    """One text, read as calls when this is made.

    Attributes:
        parts: calls, and the texts that belong to none, in order.
        open: the text may end within a value: the last one's end isn't sure.
    """

    def __init__(self, markup: Markup, text: str, tools: list[dict[str, Any]] | None, *, whole: bool) -> None:
        """`whole`: nothing was cut off, so a value without its end is all that there is of it."""
        self._markup = markup
        self._text = markup.opening + text
        self._tools = tools
        self._whole = whole
        self._borders, self._structure, self._behind = _searches(markup)
        self.open = False
        self.parts: list[ModelCall | str] = []
        at = 0
        while match := markup.call.search(self._text, at):
            self.parts.append(self._text[at : match.start()])
            at = self._call(_unquoted(match["name"]), match.end())
        self.parts.append(self._text[at:])

    def _call(self, name: str, at: int) -> int:
        """Notes the call, and returns where it ends."""
        parameters = Parameters.named(name, self._tools)
        values: dict[str, Value] = {}
        loose = ""  # between the arguments
        while (at := self._behind_space(at)) < len(self._text):
            if match := self._markup.key.match(self._text, at):
                at = self._argument(match, values, parameters)
            elif self._is_next(at):
                break
            elif match := self._markup.end and self._markup.end.match(self._text, at):
                at = match.end()
                break
            else:
                ahead = self._structure.search(self._text, at + 1)
                start = at
                if ahead:
                    at = ahead.start()
                else:
                    at = len(self._text)
                loose += self._text[start:at]
        else:  # no end
            self.open = self.open or not self._ends_with_block
        body = {}
        if not values:
            body = self._body(loose)
        self.parts += [ModelCall(name, values or body), "" if body else self._stray(loose)]
        return at

    def _stray(self, loose: str) -> str:
        """Text of a block that belongs to no argument, without the beginning of an argument that was cut off."""
        if self._whole:
            return loose
        return loose.partition("<")[0]

    @property
    def _ends_with_block(self) -> bool:
        return self._markup.end is None or bool(self._markup.opening)

    def _is_next(self, at: int) -> bool:
        """Whether the call ends here without a tag of its own."""
        if self._markup.end is None:
            return self._whole or self._text[at] != "<"
        return bool(self._markup.call.match(self._text, at))

    def _argument(self, match: re.Match[str], values: dict[str, Value], parameters: Parameters) -> int:
        """Notes one argument, and returns where it ends."""
        key = _unquoted(match["key"])
        start = match.end()
        end, behind = self._end(start, lambda other: other not in {key, *values} and parameters.declare(other))
        if end >= 0 or self._whole:
            text = self._text[start : end if end >= 0 else None]
            values[key] = self._value(text, match.groupdict().get("type"))
        return behind

    # ---------------------------------------------------------------- where a value ends
    def _end(self, start: int, expected: Callable[[str], bool]) -> tuple[int, int]:
        """Where a value ends, and where it goes on behind that; -1 and the text's end if it doesn't end."""
        close, balanced = self._close(start)
        self.open = self.open or not balanced
        if not balanced:  # either the value speaks of tags, or the model has forgotten to close it
            if close:
                until = close.start()
            else:
                until = len(self._text)
            for match in self._markup.key.finditer(self._text, start, until):
                if expected(_unquoted(match["key"])) and self._begins_a_line(match.start()):
                    return match.start(), match.start()
        if close:
            return close.start(), close.end()
        for match in self._markup.end.finditer(self._text, start) if self._markup.end else ():
            if self._behind.match(self._text, match.end()):
                return match.start(), match.start()
        return -1, len(self._text)

    def _close(self, start: int) -> tuple[re.Match[str] | None, bool]:
        """The tag that closes a value, and whether all that the value opens itself is closed before. Only a tag with
        structure behind it counts."""
        depth = 0
        first = None
        for match in self._borders.finditer(self._text, start):
            if match["cdata"]:
                continue
            if match["close"] is None:
                depth += 1
            elif depth:
                depth -= 1
            elif self._behind.match(self._text, match.end()):
                return match, True
            if first is None and match["close"] and self._behind.match(self._text, match.end()):
                first = match
        return first, False

    def _begins_a_line(self, at: int) -> bool:
        return self._markup.lines != "framed" or self._text[at - 1] == "\n"

    def _behind_space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        if match:
            return match.end()
        return at

    # ---------------------------------------------------------------- what a value is
    def _value(self, text: str, type_: str | None) -> Value:
        if self._markup.lines == "framed":
            text = re.sub(r"\r?\n\Z", "", re.sub(r"\A\r?\n", "", text))
        elif self._markup.lines == "inline":
            text = re.sub(r"\A\r?\n(.*)(?<!\r)\r?\n\Z", r"\1", text, flags=re.DOTALL)
        if self._markup.cdata:
            text = _without_cdata(text)
        if type_ in (None, "string"):
            return Value.plain(text)
        return Value(_typed(text), text)

    def _body(self, loose: str) -> dict[str, Value]:
        """Arguments that come as one JSON object."""
        match = None
        if self._markup.body:
            match = self._markup.body.search(loose)
        found = container(match["body"] if match else loose)
        if isinstance(found, dict):
            return {key: Value.typed(one) for key, one in found.items()}
        return {}


@cache
def _searches(markup: Markup) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Borders of values; the tags of calls and values; what stands behind a value."""
    call, key, close = (_GROUP.sub("(?:", pattern.pattern) for pattern in (markup.call, markup.key, markup.close))
    end = []
    if markup.end:
        end = [markup.end.pattern]
    structure = "|".join([key, *end, call])
    sections = "(?!)"
    if markup.cdata:
        sections = _SECTIONS
    patterns = (rf"(?P<cdata>{sections})|{key}|(?P<close>{close})", structure, rf"\s*(?:{structure}|\Z)")
    borders, tags, behind = (re.compile(pattern, re.DOTALL) for pattern in patterns)
    return borders, tags, behind


def _unquoted(name: str) -> str:
    name = name.strip()
    quoted = len(name) > 1 and name[0] in "\"'" and name[0] == name[-1]
    return unescape(name[1:-1] if quoted else name)


def _without_cdata(text: str) -> str:
    """CDATA is how MiniCPM writes what has angle brackets in it."""
    opening, closing = _CDATA
    stripped = text.strip()
    if not (stripped.startswith(opening) and stripped.endswith(closing)):
        return text
    return stripped[len(opening) : -len(closing)].replace(closing + opening, "")


def _typed(text: str) -> Any:
    """What a text is as JSON; itself if it is none."""
    found = container(f"[{text}]")
    if isinstance(found, list) and len(found) == 1:
        return found[0]
    return text
