"""Token ids → what a client reads.

Owns the text of one choice while it is generated: UTF-8, tags, stop strings, tool calls. Runs on the server's event
loop, one `TextState` a choice, O(1) a token. Streamed and plain answers are the same pieces, sent at once or collected,
so they can't differ. Never sends, never waits, and survives a change of engines untouched.

What is held back: up to three bytes of a character, the beginning of a tag, the beginning of a stop string, line breaks
at the edge of reasoning, and what may be a call without tags. All of it is let go as soon as it can't become what it
was held for.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.text.calls.bare_calls import BareCalls
from server.text.calls.call_ids import CallIds
from server.text.calls.tool_calls import Block, CallArguments, CallBegin, CallPiece
from server.text.channels import FORMED, OPENING, Channels, Segment, Watch, formed, transitions
from server.text.tokenizer import Tokenizer, ToolFormat
from server.text.tokens.control import NORMAL, REASONING, TOOL, Transitions

_BREAKS = "\r\n"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_CONTENT = frozenset({NORMAL, OPENING, FORMED})


class Content(msgspec.Struct, frozen=True):
    """The next piece of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """The next piece of what the model thought before it."""

    text: str


Piece = Content | Reasoning | CallBegin | CallArguments


class TextState:
    """One choice; mutable, owned by the request that reads it.

    Attributes:
        stopped: a stop string was met; feed nothing more, and cancel the choice.
        stop: that string.
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
        call_seed: str = "",
        rows: int | None = None,
        follows: bool = False,
        reasons: bool = True,
    ) -> None:
        """`chat`: look for reasoning and, if there are `tools`, for calls. `reasoning`: the prompt opened a block.
        `continues`: it ends inside the answer's content. `stop_ids` end the answer and aren't part of it.
        `earlier_calls`: ids that the conversation's calls have already. `call_seed`: what new ids follow from; without
        it they are random. `rows`: how many ids the model has logits for,
        if not for all. `follows`: the answer follows a grammar; `reasons`: which lets it open a block of reasoning."""
        tags = tokenizer.tags(rows)
        edges, first = _course(tokenizer, chat=chat, tools=bool(tools), follows=follows, reasons=reasons)
        if chat and reasoning:
            first = REASONING
        elif continues:
            first = NORMAL
            if follows:
                first = OPENING if OPENING in edges else FORMED  # which its grammar lets begin as any other
        self._tokenizer = tokenizer
        self._mark = tags.mark
        self._texts = tags.texts
        self._stop_ids = frozenset(stop_ids)
        self._show_special = show_special
        self._tools = tools
        form = tokenizer.tool_format
        self._ids = CallIds(form.name if form else "", earlier_calls, new_id, seed=call_seed)
        self._bare: BareCalls | None = None
        if chat and tools and form and form.is_bare:
            self._bare = BareCalls(tools, self._ids, begins=follows or not continues)
        self._utf8 = _UTF8("replace")
        self._is_cut = False  # a character's end is missing
        self._channels = Channels(edges, first, tags, strings=bool(follows and form and form.is_json))
        self._stops = stops
        self._content = _Flow(stops)
        self._thought = _Flow(stops, trim=_BREAKS)
        self._block: Block | None = None
        self._origin = (NORMAL, "")  # the state before the block, and the tag that opened it
        self._doubt: _Doubt | None = None
        self._pieces: list[Piece] = []
        self.stopped = False
        self.stop = ""
        self.tokens = self.reasoning_tokens = self.calls = 0

    @property
    def in_text(self) -> bool:
        """What comes next is text, unless it is a tag."""
        return self._channels.state in _CONTENT

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

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """The answer is over: what was held back for nothing. Half a character at the end is dropped. `cut`: the model
        would have said more."""
        if not self.stopped:
            self._place(self._channels.finish())
        if not self.stopped and self._block is not None:
            self._end_block(cut)
        if not self.stopped and self._bare is not None:
            self._emit(self._bare.interrupt(ended=not cut))
        self._say(Reasoning, "" if self._thought.stopped else self._thought.rest())
        self._say(Content, "" if self._content.stopped else self._content.rest())
        return self._taken()

    def _feed(self, token: int) -> None:
        hidden = False
        text = self._texts.get(token)
        if text is None or self._is_cut:
            special = self._tokenizer.is_special(token)
            hidden = special and not self._show_special
            text = self._text(token, special)
        for segment in self._channels.feed(text, hidden=hidden):
            self._place(segment)
            if self.stopped:
                break

    def _text(self, token: int, special: bool) -> str:
        if mark := self._mark(token):
            self._utf8.reset()  # half a character before a tag has no other half behind it
            self._is_cut = False
            return mark
        data = self._tokenizer.token_bytes(token)
        if special and not self._show_special:
            return data.decode("utf-8", "replace")
        was_cut = self._is_cut
        text = self._utf8.decode(data)
        self._is_cut = bool(self._utf8.getstate()[0])
        if not (special or was_cut or self._is_cut):
            self._texts[token] = text
        return text

    # ---------------------------------------------------------------- where text goes
    def _place(self, segment: Segment) -> None:
        if segment.state == TOOL:
            self._in_block(segment)
        elif segment.state == REASONING:
            self._write(Reasoning, self._thought, segment.text)
        elif segment.state in _CONTENT and self._bare is not None:
            self._search(self._bare, segment)
        elif segment.state in _CONTENT:
            self._write(Content, self._content, segment.text)
        if segment.tag and not self.stopped:
            self._pass(segment)

    def _write(self, kind: type[Content] | type[Reasoning], flow: _Flow, text: str) -> None:
        self._say(kind, flow.write(text))
        if flow.stopped:
            self.stopped = True
            self.stop = self.stop or flow.stop

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

    # ---------------------------------------------------------------- tool calls
    def _search(self, bare: BareCalls, segment: Segment) -> None:
        self._emit(bare.feed(segment.text))
        if segment.tag:
            self._emit(bare.interrupt())
        self.calls = bare.calls

    def _in_block(self, segment: Segment) -> None:
        form = self._tokenizer.tool_format
        text = segment.text
        if form is None:
            return
        if self._doubt is not None:
            self._doubt.add(text)
            if self._doubt.lasts:
                if segment.tag:
                    self._stay_in_block(form, segment.tag)
                return
            text = self._resolve(form, self._doubt)
        self._block = self._block or Block(form, self._tools, self._origin[1], self.calls, self._ids)
        self._emit(self._block.feed(text))
        if segment.tag and self._block.in_value and not self._tokenizer.speaks_harmony:
            self._stay_in_block(form, segment.tag)
        elif segment.tag:
            self._close_block(segment.tag)

    def _stay_in_block(self, form: ToolFormat, tag: str) -> None:
        """The tag may be part of an argument, and is if the argument has its opening one, too."""
        self._channels.enter(TOOL)
        if self._block is not None and self._block.quotes_tags:
            self._emit(self._block.feed(tag))
        elif self._doubt is None:
            self._doubt = _Doubt(tag, form.start)
        else:
            self._doubt.add(tag)

    def _resolve(self, form: ToolFormat, doubt: _Doubt) -> str:
        """What to read after a doubt: the argument goes on, or the block was complete and there is another."""
        self._doubt = None
        if (following := doubt.next_block) is None:
            return doubt.text
        self._close_block(form.end, goes_on=True)
        self._origin = (self._origin[0], form.start)
        return following

    def _end_block(self, cut: bool) -> None:
        """The answer ends inside a block, or behind a closing tag that was in doubt."""
        form = self._tokenizer.tool_format
        doubt = self._doubt
        self._doubt = None
        tag = ""
        if form and doubt:
            tag = form.end
        self._close_block(tag, whole=not cut)
        self._write(Content, self._content, doubt.text[len(tag) :] if doubt else "")

    def _close_block(self, tag: str, *, whole: bool = True, goes_on: bool = False) -> None:
        """The calls of a complete block; a block that is no call goes back to where it came from, tags and all.
        `goes_on`: the next block has begun."""
        block = self._block
        self._block = None
        assert block is not None
        ended = block.end(whole=whole, closed=bool(tag))
        self.calls += block.calls
        if ended is not None:
            self._emit(ended)
            self._content.trim(None)
            return
        text = block.whole_text + tag
        if self._origin[0] != REASONING:
            self._write(Content, self._content, text)
            return
        if not goes_on:
            self._channels.enter(REASONING)
        self._write(Reasoning, self._thought, text)

    def _emit(self, pieces: Sequence[CallPiece | str]) -> None:
        """Pieces of calls, and text beside them. They end reasoning."""
        if pieces and self._origin[0] == REASONING:
            self._origin = (NORMAL, "")
            self._end_reasoning()
        for piece in pieces:
            if not isinstance(piece, str):
                self._pieces.append(piece)
            elif not self.stopped:
                self._write(Content, self._content, piece)

    # ---------------------------------------------------------------- pieces
    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if not text:
            return
        last = None
        if self._pieces:
            last = self._pieces[-1]
        if isinstance(last, Content | Reasoning) and type(last) is kind:
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))

    def _taken(self) -> list[Piece]:
        pieces = self._pieces
        self._pieces = []
        return pieces


def _course(tokenizer: Tokenizer, *, chat: bool, tools: bool, follows: bool, reasons: bool) -> tuple[Transitions, str]:
    """Which tag leads where in an answer, and the state in which it begins if its prompt doesn't say."""
    if not chat:
        return {}, NORMAL
    if follows:
        return formed(tokenizer, tools=tools, reasons=reasons)
    return transitions(tokenizer, tools=tools)


class _Doubt:
    """A closing tag inside an argument, and what has come since; mutable, owned by a `TextState`.

    It is part of the argument, unless another block or the answer's end follows.

    Attributes:
        text: all of it.
    """

    def __init__(self, tag: str, opening: str) -> None:
        self._tag = tag
        self._opening = opening
        self._at = 0  # where something else than this tag and white space begins
        self.text = tag

    def add(self, text: str) -> None:
        self.text += text
        while self._at < len(self.text):
            if self.text.startswith(self._tag, self._at):
                self._at += len(self._tag)
            elif self.text[self._at].isspace():
                self._at += 1
            else:
                break

    @property
    def lasts(self) -> bool:
        """Whether what follows may still become either."""
        return len(self.text) - self._at < len(self._opening) and self._opening.startswith(self.text[self._at :])

    @property
    def next_block(self) -> str | None:
        """The text of the block that follows, if one does."""
        if not self.text.startswith(self._opening, self._at):
            return None
        return self.text[self._at + len(self._opening) :]


class _Flow:
    """The text of one kind, on its way through the stop strings; mutable, owned by a `TextState`."""

    def __init__(self, stops: Sequence[str], *, trim: str | None = "") -> None:
        self._watch = Watch(stops)
        self._trim = trim  # characters that are left out until others come; None: any white space
        self._trims_end = bool(trim)
        self._held = ""
        self._breaks = ""  # at the end, held while reasoning might end with them
        self.stopped = False
        self.stop = ""

    def trim(self, characters: str | None) -> None:
        self._trim = characters

    def write(self, text: str) -> str:
        """What may be shown now."""
        if self._trim != "":
            text = text.lstrip(self._trim)
        if not text:
            return ""
        self._trim = ""
        if self._watch.passes(text):
            return self._without_breaks(text)
        whole = self._held + text
        found = self._watch.find(whole, len(self._held))
        if found:
            self.stopped = True
            self.stop = found[1]
            return self._take_breaks() + whole[: found[0] - len(found[1])]
        safe = len(whole) - self._watch.pending
        self._held = whole[safe:]
        return self._without_breaks(whole[:safe])

    def rest(self, *, trimmed: bool = False) -> str:
        """What was held back and completes no stop string any more."""
        whole = self._take_breaks() + self._held
        self._held = ""
        if trimmed:
            return whole.rstrip(_BREAKS)
        return whole

    def _without_breaks(self, text: str) -> str:
        if not self._trims_end:
            return text
        whole = self._take_breaks() + text
        kept = whole.rstrip(_BREAKS)
        self._breaks = whole[len(kept) :]
        return kept

    def _take_breaks(self) -> str:
        breaks = self._breaks
        self._breaks = ""
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
