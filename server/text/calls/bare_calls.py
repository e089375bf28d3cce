"""Calls without tags around them: JSON objects in the text of an answer, as Llama 3 writes them.

Owns where such a call may begin, how long text is held back for it, and what stands between two of them. One
`BareCalls` belongs to one answer and runs on the event loop. Takes for a call only what names an offered tool and has
its arguments in a member of their own; everything else is handed back as text, in order.

A call begins at the answer's beginning, behind another call or a tag, or with a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from server.text.calls import json_calls
from server.text.calls.arguments import names_of
from server.text.calls.call_ids import CallIds
from server.text.calls.json_object import JsonObject
from server.text.calls.tool_calls import CallArguments, CallBegin, CallPiece

_LINE = re.compile(r"\n(?:\{|\Z)")
_FIRST = re.compile(rf"\A[\s;,}}\]]*+(?:\{{|\Z)|{_LINE.pattern}")  # separators and surplus brackets lie between calls
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:parameters|arguments)"\s*:\s*(?=\{)'
)
_MEMBERS = ('"parameters":', '"arguments":')
_BETWEEN = " \t\r\n;,}]"
_TYPE = '"type":"function",'

Pieces = list[CallPiece | str]


class BareCalls:
    """Reads the text of one answer; mutable, owned by that answer.

    Attributes:
        calls: how many calls there are so far.
    """

    def __init__(self, tools: list[dict[str, Any]], ids: CallIds, *, begins: bool = True) -> None:
        """`begins`: the text is the answer's beginning."""
        self._names = frozenset(names_of(tools))
        heads = tuple(_heads(self._names))
        self._early = tuple(f"{head},{member}{{" for head in heads for member in _MEMBERS)
        self._late = tuple(_late(heads))
        self._ids = ids
        self._begins = begins
        self._read: Callable[[str, Pieces], str] = self._in_text
        self._held: list[str] = []  # text that may yet belong to a call
        self._mended: list[str] = []  # the same as JSON, where it is an object
        self._compact = ""  # its beginning without white space
        self._is_late = False  # only its end says whether it is a call
        self._object = JsonObject()
        self.calls = 0

    def feed(self, text: str) -> Pieces:
        pieces: Pieces = []
        while text:
            text = self._read(text, pieces)
        return pieces

    def interrupt(self, *, ended: bool = False) -> Pieces:
        """What is left where a tag comes, or the answer's end. `ended`: the model said all that it wanted to."""
        left = "".join(self._held)
        pieces: Pieces = [left] if left.strip(_BETWEEN) or not self.calls else []
        if self._read == self._in_arguments:
            rest = self._object.ending() if ended else self._object.rest()
            pieces = [CallArguments(self.calls - 1, rest)] if rest else []
        self._go_on(self._in_text, begins=True)
        return pieces

    def _go_on(self, read: Callable[[str, Pieces], str], *held: str, begins: bool = False) -> None:
        self._read = read
        self._begins = begins
        self._held = list(held)
        self._mended = []
        self._compact = ""
        self._is_late = False

    # ---------------------------------------------------------------- what is read
    def _in_text(self, text: str, pieces: Pieces) -> str:
        if self._begins and text.isspace():
            self._held.append(text)
            return ""
        whole = "".join(self._held) + text
        match = (_FIRST if self._begins else _LINE).search(whole)
        start = match.start() if match else len(whole)
        if start:
            pieces.append(whole[:start].lstrip() if self._begins and self.calls else whole[:start])
            self._begins = False
        if match is None or not match[0].endswith("{"):
            self._held = [whole[start:]]
            return ""
        blanks = match[0][:-1]
        if not self._begins:
            pieces.append(blanks)
            blanks = ""
        self._go_on(self._in_object, blanks)
        self._object = JsonObject()
        return whole[match.end() - 1 :]

    def _in_object(self, text: str, pieces: Pieces) -> str:
        mended, end = self._object.read(text)
        self._held.append(text[:end])
        self._mended.append(mended)
        back = ""
        if not self._is_late:
            self._compact += "".join(text[:end].split())
            back = self._decide(pieces)
        if self._read == self._in_object and self._object.complete:
            self._end_object(pieces)
        return back + text[end:]

    def _in_arguments(self, text: str, pieces: Pieces) -> str:
        arguments, end = self._object.read(text)
        if arguments:
            pieces.append(CallArguments(self.calls - 1, arguments))
        if self._object.complete:
            self._go_on(self._behind_arguments)
            self._object = JsonObject()
            self._object.read("{")
        return text[end:]

    def _behind_arguments(self, text: str, pieces: Pieces) -> str:
        """Further members, which say nothing, and the bracket that closes the call."""
        if not self._compact and text.lstrip()[:1] not in ("", ",", "}"):
            held = "".join(self._held)
            self._go_on(self._in_text, begins=True)
            return held + text
        self._compact += text.strip()
        _, end = self._object.read(text)
        self._held.append(text[:end])
        if self._object.complete:
            self._go_on(self._in_text, begins=True)
        return text[end:]

    # ---------------------------------------------------------------- what an object is
    def _decide(self, pieces: Pieces) -> str:
        """What an object can be by its beginning. Returns what is to be read again."""
        if self._compact.startswith(self._early):
            head = _HEAD.match("".join(self._held[1:]))
            if head and (name := json.loads(head["name"], strict=False)) in self._names:
                return self._begin_early(name, head, pieces)
        if any(early.startswith(self._compact) for early in self._early):
            return ""
        self._is_late = self._compact.startswith(self._late)
        if self._is_late or any(late.startswith(self._compact) for late in self._late):
            return ""
        return self._hand_back(pieces)

    def _begin_early(self, name: str, head: re.Match[str], pieces: Pieces) -> str:
        """The name is known, and the arguments begin."""
        self._begin(name, pieces)
        self._go_on(self._in_arguments)
        self._object = JsonObject()
        return head.string[head.end() :]

    def _hand_back(self, pieces: Pieces) -> str:
        """It is no call: its bracket is text, and a call may begin behind that."""
        blanks, *written = self._held
        self._go_on(self._in_text)
        pieces.append(blanks + "{")
        return "".join(written)[1:]

    def _end_object(self, pieces: Pieces) -> None:
        """The object is complete; only now is it known whether it is a call."""
        call = json_calls.whole("".join(self._mended))
        if call is None or call.name not in self._names:
            pieces.append("".join(self._held))
            self._go_on(self._in_text)
            return
        self._begin(call.name, pieces, call.id)
        pieces.append(CallArguments(self.calls - 1, str(call.arguments)))
        self._go_on(self._in_text, begins=True)

    def _begin(self, name: str, pieces: Pieces, given: object = None) -> None:
        pieces.append(CallBegin(self.calls, self._ids.take(name, given), name))
        self.calls += 1


def _heads(names: Iterable[str]) -> Iterator[str]:
    """How a call begins, up to its name, without white space."""
    for name in sorted(names):
        for quoted in {json.dumps(name), json.dumps(name, ensure_ascii=False)}:
            for before in ("", _TYPE):
                for key in ("name", "function"):
                    yield f'{{{before}"{key}":{"".join(quoted.split())}'


def _late(heads: Sequence[str]) -> Iterator[str]:
    """Beginnings of what may be a call, which its end must say."""
    yield from (f"{head}," for head in heads)
    yield from (f"{{{member}" for member in _MEMBERS)
    for before in ("", _TYPE):
        yield from (f'{{{before}"function":{head}' for head in heads)
