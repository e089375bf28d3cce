"""Tool calls in an answer's text.

Owns what stands between a model's tool tags: the calls' names and arguments, given out while they form where the format
lets them be told early, else when the block is complete. One `Block` belongs to one answer; no I/O. Never runs a tool,
and never raises for what a model wrote: what isn't a call is handed back as text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from server.call_ids import CallIds
from server.tokenizer import ToolFormat

_LONGEST_HEAD = 512  # characters in which a call must have told its name, or it is read as a whole

_NAME = r'"name"\s*:\s*"(?P<quoted>(?:[^"\\]|\\.)*)"'
_OBJECT = rf'\{{\s*{_NAME}\s*,\s*"(?:arguments|parameters)"\s*:\s*'
# Everything before a call's arguments, by format; the arguments that follow are a JSON object.
_HEADS = {
    "json_tools": re.compile(rf"[\s,\[\]}}]*{_OBJECT}(?=\{{)"),
    "mistral": re.compile(
        rf"(?:\[TOOL_CALLS\]|[\s,\[\]}}])*(?:{_OBJECT}|(?P<bare>[\w-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*)(?=\{{)"
    ),
    "kimi_k2": re.compile(
        r"\s*(?:<\|tool_call_end\|>)?\s*(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<bare>[^\s:<]+):\d+)\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    "harmony": re.compile(r"(?P<bare>[\w.-]+)[^{]*<\|message\|>\s*(?=\{)"),
}


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call whose name is known."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; joined they are JSON text."""

    index: int
    text: str


CallPiece = CallBegin | CallArguments


class Block:
    """The text between one pair of tool tags; mutable, owned by one answer.

    `first` is the index of its first call. Attributes:
        calls: how many calls it has told so far.
        text: all that was fed while no call had been told, for showing it if none comes.
    """

    def __init__(self, form: ToolFormat, tools: list[dict[str, Any]] | None, first: int, ids: CallIds) -> None:
        self._form = form
        self._tools = tools
        self._first = first
        self._ids = ids
        self._head = _HEADS.get(form.name)
        self._parts: list[str] = []
        self._tail = ""  # since the last call's arguments, or the block's beginning; short
        self._object: _Object | None = None  # the arguments that are being read
        self.calls = 0

    def feed(self, text: str) -> list[CallPiece]:
        if not self.calls:
            self._parts.append(text)
        pieces: list[CallPiece] = []
        while text:
            text = self._read_arguments(text, pieces) if self._object else self._read_head(text, pieces)
        return pieces

    def end(self) -> list[CallPiece] | None:
        """The block is complete, or the answer is. None: it is no call, show its text."""
        return [] if self.calls else self._parse()

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def _read_head(self, text: str, pieces: list[CallPiece]) -> str:
        """Returns the text behind the head, "" as long as it isn't complete."""
        if self._head is None:
            return ""
        self._tail += text
        match = self._head.match(self._tail)
        if match is None:
            if len(self._tail) > _LONGEST_HEAD:  # a call, but not one that can be told early; or no more calls
                self._head, self._tail = None, ""
            return ""
        rest, self._tail, self._object = self._tail[match.end() :], "", _Object()
        pieces.append(self._begin(_name(match), match.groupdict().get("id")))
        return rest

    def _read_arguments(self, text: str, pieces: list[CallPiece]) -> str:
        assert self._object is not None
        end = self._object.read(text)
        pieces.append(CallArguments(self._first + self.calls - 1, text[:end]))
        if self._object.complete:
            self._object = None
        return text[end:]

    def _begin(self, name: str, given: object = None) -> CallBegin:
        self.calls += 1
        return CallBegin(self._first + self.calls - 1, self._ids.take(name, given), name)

    def _parse(self) -> list[CallPiece] | None:
        try:
            found = self._form.parse(self.text, self._tools)
            calls = [_checked(call) for call in (found if isinstance(found, list) else [found])]
        except Exception:  # the parsers meet whatever a model writes
            return None
        pieces: list[CallPiece] = []
        for name, arguments, given in calls:
            begin = self._begin(name, given)
            pieces += [begin, CallArguments(begin.index, arguments)]
        return pieces or None


class _Object:
    """Finds the end of a JSON object that comes in pieces, without judging what is in it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.complete = False

    def read(self, text: str) -> int:
        """How much of `text` belongs to the object."""
        for position, char in enumerate(text, 1):
            self._take(char)
            if self.complete:
                return position
        return len(text)

    def _take(self, char: str) -> None:
        if self._in_string:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.complete = self._depth == 0


def _name(match: re.Match[str]) -> str:
    groups = match.groupdict()
    quoted = groups.get("quoted")
    if quoted is None:
        return groups["bare"]
    try:
        return str(json.loads(f'"{quoted}"', strict=False))
    except ValueError:  # an escape that isn't one
        return quoted


def _checked(call: Any) -> tuple[str, str, object]:
    """Name, arguments as JSON text, and the model's own id of a parsed call. Raises when it is none."""
    name, arguments = call["name"], call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    if isinstance(arguments, str):
        json.loads(arguments or "{}")  # text in a string must be JSON itself
        return name, arguments or "{}", call.get("id")
    return name, json.dumps(arguments or {}, ensure_ascii=False), call.get("id")
