"""Tool calls in an answer's text.

Owns what stands between a model's tool tags: the calls' names and arguments, given out while they form where the format
is JSON, else when the block is complete. One `Block` belongs to one answer; no I/O. Never runs a tool, never raises for
what a model wrote, and loses nothing of it: what isn't a call is handed back as text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from server.text.calls import call_formats, json_calls
from server.text.calls.arguments import ModelCall, Parameters
from server.text.calls.call_ids import CallIds
from server.text.calls.json_object import JsonObject
from server.text.calls.markup import MISTRAL_NAME
from server.text.tokenizer import ToolFormat

_MOST_LOOKS = 100  # at a block's text for the meaning of a closing tag; each reads all of it
_LONGEST_HEAD = 512  # characters in which a call must have named its function, or it is read as a whole

_NAME = r'"name"\s*:\s*"(?P<quoted>(?:[^"\\]|\\.)+)"'
_OBJECT = rf'\{{\s*{_NAME}\s*,\s*"(?:arguments|parameters)"\s*:\s*'
_REST = json_calls.MEMBERS  # of the call before
# Everything before a call's arguments, by format; the arguments that follow are a JSON object.
_HEADS = {
    "json_tools": re.compile(rf"{_REST}[\s,\[\]}}]*{_OBJECT}(?=\{{)"),
    "mistral": re.compile(
        rf"{_REST}(?:\[TOOL_CALLS\]|[\s,\[\]}}])*(?:{_OBJECT}|(?P<bare>{MISTRAL_NAME})\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*)(?=\{{)"
    ),
    "kimi_k2": re.compile(
        r"\s*(?:<\|tool_call_end\|>)?\s*(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<bare>[^\s:<]+)(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    "harmony": re.compile(r"(?P<bare>[\w.-]+)[^{]*<\|message\|>\s*(?=\{)"),
}
# What ends the arguments of a call although they aren't complete: a tag within the block.
_ENDS = {"kimi_k2": "<"}


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


class NestedTags:
    """Counts the opening tags in a text that no closing one has followed; mutable, for one text.

    Attributes:
        open: how many there are.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._tags = re.compile("|".join(re.escape(tag) for tag in (opening, closing) if tag) or "(?!)")
        self._longest = max(len(opening), len(closing))
        self._behind = ""  # what may be the beginning of a tag
        self.open = 0

    def read(self, text: str) -> None:
        whole = self._behind + text
        at = 0
        for match in self._tags.finditer(whole):
            at = match.end()
            if match[0] == self._opening:
                self.open += 1
            else:
                self.open = max(0, self.open - 1)
        self._behind = whole[max(at, len(whole) - self._longest + 1) :]


class Block:
    """The text between one pair of tool tags; mutable, owned by one answer.

    `opening` is the tag before it, `first` the index of its first call. Attributes:
        calls: how many calls it has emitted so far.
    """

    def __init__(
        self, form: ToolFormat, tools: list[dict[str, Any]] | None, opening: str, first: int, ids: CallIds
    ) -> None:
        self._form = form
        self._tools = tools
        self._first = first
        self._ids = ids
        self._head = _HEADS.get(form.name)
        self._opening = opening
        self._untagged = opening == call_formats.UNTAGGED.get(form.name)
        self._parts: list[str] = []  # all text since the last call's arguments, or the block's beginning
        self._tail = ""  # the same, as long as a call may be emitted early
        self._object: JsonObject | None = None  # the arguments that are being read
        self._looks = 0
        self._nested = NestedTags(form.start, form.end)
        self.calls = 0

    def feed(self, text: str) -> list[CallPiece]:
        pieces: list[CallPiece] = []
        self._nested.read(text)
        while text:
            if self._object:
                text = self._read_arguments(text, pieces)
            else:
                text = self._read_head(text, pieces)
        return pieces

    def end(self, *, whole: bool, closed: bool) -> list[CallPiece | str] | None:
        """What is left when the block is complete, or the answer is: calls, and text that belongs to none. None: there
        is no call in the block, show its text. `whole`: nothing was cut off; `closed`: the model wrote the closing
        tag."""
        if self._object is not None:
            rest = self._object.ending() if closed else self._object.rest()
            return [CallArguments(self._first + self.calls - 1, rest)] if rest else []
        if self.calls:
            return self._pieces_of(call_formats.read_rest(self._form, self._text, self._tools, whole=whole))
        if self._untagged:
            read = call_formats.read_untagged
        else:
            read = call_formats.read
        return self._pieces_of(read(self._form, self._text, self._tools, whole=whole)) or None

    @property
    def whole_text(self) -> str:
        """The text with the tag before it."""
        return self._opening + "".join(self._parts)

    @property
    def _text(self) -> str:
        """The text that belongs to no call."""
        if self._untagged:
            return self.whole_text
        return "".join(self._parts)

    @property
    def quotes_tags(self) -> bool:
        """Whether the next closing tag has its opening one in the text: an argument quotes a block of calls."""
        return self._nested.open > 0

    @property
    def in_value(self) -> bool:
        """Whether the text so far ends inside an argument, where a closing tag may be part of it."""
        if self._object is not None:
            return self._object.in_string
        self._looks += 1
        if self.calls or self._looks > _MOST_LOOKS:
            return not self.calls
        return call_formats.ends_in_value(self._form, self._text, self._tools)

    def _read_head(self, text: str, pieces: list[CallPiece]) -> str:
        """Returns the text behind the head, "" as long as it isn't complete."""
        self._parts.append(text)
        if self._head is None:
            return ""
        self._tail += text
        match = self._head.match(self._tail)
        if match is None:
            if len(self._tail) > _LONGEST_HEAD:  # a call, but not one that can be emitted early; or no more calls
                self._head = None
                self._tail = ""
            return ""
        rest = self._tail[match.end() :]
        self._tail = ""
        self._object = JsonObject(_ENDS.get(self._form.name, ""))
        self._parts.clear()
        pieces.append(self._begin(_name(match), match.groupdict().get("id")))
        return rest

    def _read_arguments(self, text: str, pieces: list[CallPiece]) -> str:
        assert self._object is not None
        arguments, end = self._object.read(text)
        if arguments:
            pieces.append(CallArguments(self._first + self.calls - 1, arguments))
        if self._object.broken and (rest := self._object.ending()):
            pieces.append(CallArguments(self._first + self.calls - 1, rest))
        if self._object.complete or self._object.broken:
            self._object = None
        return text[end:]

    def _begin(self, name: str, given: object = None) -> CallBegin:
        self.calls += 1
        return CallBegin(self._first + self.calls - 1, self._ids.take(name, given), name)

    def _pieces_of(self, parts: list[ModelCall | str]) -> list[CallPiece | str]:
        pieces: list[CallPiece | str] = []
        for part in parts:
            if isinstance(part, str):
                pieces.append(part)
            else:
                begin = self._begin(_encodable(part.name), part.id)
                pieces += [begin, CallArguments(begin.index, self._arguments(part))]
        return pieces

    def _arguments(self, call: ModelCall) -> str:
        if isinstance(call.arguments, str):
            return call.arguments
        return Parameters.named(call.name, self._tools).convert(call.arguments)


def _name(match: re.Match[str]) -> str:
    groups = match.groupdict()
    quoted = groups.get("quoted")
    if quoted is None:
        return groups["bare"]
    try:
        return _encodable(json.loads(f'"{quoted}"', strict=False))
    except ValueError:  # an escape that isn't one
        return quoted


def _encodable(name: str) -> str:
    """JSON can escape half a character, which UTF-8 can't carry."""
    return name.encode("utf-8", "replace").decode()
