"""Token ids → what a client reads.

Owns the text of one choice while it is generated: UTF-8, tags, stop strings, tool calls. Runs on the server's event
loop, one `TextState` a choice, O(1) a token. Streamed and plain answers are the same pieces, sent at once or collected,
so they can't differ. Never sends, never waits, and survives a change of engines untouched.

What is held back: up to three bytes of a character, the beginning of a tag, the beginning of a stop string, and line
breaks at the edge of reasoning. All of it is let go as soon as it can't become what it was held for.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.call_ids import CallIds
from server.reasoning import NORMAL, REASONING, TOOL, Channels, Segment, Watch, transitions
from server.tokenizer import Tokenizer
from server.toolcalls import Block, CallArguments, CallBegin

_BREAKS = "\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thought before it."""

    text: str


Piece = Content | Reasoning | CallBegin | CallArguments


class TextState:
    """One choice; mutable, owned by the request that reads it.

    Attributes:
        stopped: a stop string was met; feed nothing more, and cancel the choice.
        tokens: how many tokens made the answer, the one that completed a stop string included.
        reasoning_tokens: how many of them were spent inside reasoning.
        calls: how many tool calls there are so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        stop_ids: Iterable[int] = (),
        chat: bool = True,
        tools: list[dict[str, Any]] | None = None,
        reasoning: bool = False,
        continues: bool = False,
        show_special: bool = False,
        earlier_calls: Iterable[str] = (),
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`chat`: look for reasoning and, if there are `tools`, for calls. `reasoning`: the prompt opened a block.
        `continues`: it ends inside the answer's content. `stop_ids` end the answer and are no part of it.
        `earlier_calls`: ids that the conversation's calls have already."""
        edges, first = transitions(tokenizer, tools=bool(tools)) if chat else ({}, NORMAL)
        first = REASONING if chat and reasoning else NORMAL if continues else first
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._show_special = show_special
        self._tools = tools
        parser = tokenizer.tool_format.name if tokenizer.tool_format else ""
        self._ids = CallIds(parser, earlier_calls, new_id)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._channels = Channels(edges, first)
        self._stops = stops
        self._content = _Flow(stops)
        self._thought = _Flow(stops, trim=_BREAKS)
        self._block: Block | None = None
        self._origin = (NORMAL, "")  # the state before the block, and the tag that opened it
        self._pieces: list[Piece] = []
        self.stopped = False
        self.tokens = self.reasoning_tokens = self.calls = 0

    def feed(self, tokens: Iterable[int]) -> list[Piece]:
        """What these tokens add for the client to see."""
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            self.reasoning_tokens += self._channels.state == REASONING
            if token not in self._stop_ids:
                self._feed(token)
        return self._taken()

    def finish(self) -> list[Piece]:
        """The answer is over: what was held back for nothing. Half a character at the end is dropped."""
        if not self.stopped:
            self._place(self._channels.finish())
        if not self.stopped and self._block is not None:
            self._close_block("")
        self._say(Reasoning, "" if self._thought.stopped else self._thought.rest())
        self._say(Content, "" if self._content.stopped else self._content.rest())
        return self._taken()

    def _feed(self, token: int) -> None:
        data = self._tokenizer.token_bytes(token)
        hidden = self._tokenizer.is_special(token) and not self._show_special
        text = data.decode("utf-8", "replace") if hidden else self._utf8.decode(data)
        for segment in self._channels.feed(text, hidden=hidden):
            self._place(segment)
            if segment.tag and hidden:
                self._utf8.reset()  # half a character before a tag has no other half behind it
            if self.stopped:
                break

    # ---------------------------------------------------------------- where text goes
    def _place(self, segment: Segment) -> None:
        if segment.state == TOOL:
            self._in_block(segment)
        elif segment.state == REASONING:
            self._write(Reasoning, self._thought, segment.text)
        elif segment.state == NORMAL:
            self._write(Content, self._content, segment.text)
        if segment.tag and not self.stopped:
            self._pass(segment)

    def _write(self, kind: type[Content] | type[Reasoning], flow: _Flow, text: str) -> None:
        self._say(kind, flow.write(text))
        self.stopped = self.stopped or flow.stopped

    def _pass(self, segment: Segment) -> None:
        """A tag was read: the state has changed."""
        if self._channels.state == TOOL:
            self._origin = (segment.state, segment.tag)
        elif segment.state == REASONING and self._channels.state != REASONING:
            self._end_reasoning()

    def _end_reasoning(self) -> None:
        self._say(Reasoning, self._thought.rest(trimmed=True))
        self._thought = _Flow(self._stops, trim=_BREAKS)
        self._content.trim(_BREAKS)

    def _in_block(self, segment: Segment) -> None:
        form = self._tokenizer.tool_format
        if self._block is None and form is not None:
            self._block = Block(form, self._tools, self.calls, self._ids)
        if self._block is not None:
            self._tell(self._block.feed(segment.text))
            if segment.tag:
                self._close_block(segment.tag)

    def _close_block(self, tag: str) -> None:
        """The calls of a complete block; a block that is no call goes back to where it came from, tags and all."""
        block, self._block = self._block, None
        assert block is not None
        ended = block.end()
        self.calls += block.calls
        if ended is not None:
            self._tell(ended)
            self._content.trim(None)
            return
        state, opening = self._origin
        if state == REASONING:
            self._channels.enter(REASONING)
            self._write(Reasoning, self._thought, opening + block.text + tag)
        else:
            self._write(Content, self._content, opening + block.text + tag)

    def _tell(self, pieces: Sequence[Piece]) -> None:
        """Pieces of calls. One inside reasoning ends it."""
        if pieces and self._origin[0] == REASONING:
            self._origin = (NORMAL, "")
            self._end_reasoning()
        self._pieces += pieces

    # ---------------------------------------------------------------- pieces
    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content | Reasoning) and type(last) is kind:
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


class _Flow:
    """The text of one kind, on its way through the stop strings; mutable, owned by a `TextState`."""

    def __init__(self, stops: Sequence[str], *, trim: str | None = "") -> None:
        self._watch = Watch(stops)
        self._trim = trim  # characters that are left out until others come; None: any white space
        self._trims_end = bool(trim)
        self._held = ""
        self._breaks = ""  # at the end, held while reasoning might end with them
        self.stopped = False

    def trim(self, characters: str | None) -> None:
        self._trim = characters

    def write(self, text: str) -> str:
        """What may be shown now."""
        if self._trim != "":
            text = text.lstrip(self._trim)
        if not text:
            return ""
        self._trim = ""
        whole = self._held + text
        found = self._watch.find(whole, len(self._held))
        if found:
            self.stopped = True
            return self._take_breaks() + whole[: found[0] - len(found[1])]
        safe = len(whole) - self._watch.pending
        self._held = whole[safe:]
        return self._without_breaks(whole[:safe])

    def rest(self, *, trimmed: bool = False) -> str:
        """What was held back and completes no stop string any more."""
        whole = self._take_breaks() + self._held
        self._held = ""
        return whole.rstrip(_BREAKS) if trimmed else whole

    def _without_breaks(self, text: str) -> str:
        if not self._trims_end:
            return text
        whole = self._take_breaks() + text
        kept = whole.rstrip(_BREAKS)
        self._breaks = whole[len(kept) :]
        return kept

    def _take_breaks(self) -> str:
        breaks, self._breaks = self._breaks, ""
        return breaks


# ---------------------------------------------------------------- plain answers
@dataclass(slots=True)
class Call:
    """One complete tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All pieces of one choice, put together; mutable while it is collected by its request."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(_, id, name):
                    self.calls.append(Call(id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
