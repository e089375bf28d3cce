"""The parts of an answer: reasoning, content, tool calls.

Owns the search for tags in a stream of characters and the state that they lead to. One `Channels` belongs to one
answer and is fed by the owner of that answer's text; no I/O. Never shows a tag or a piece of one, and never looks at a
character twice.

mlx-lm knows which tags a model uses. Two things are added here: a closing reasoning tag without an opening one is
dropped, and models that speak in the "harmony" format, for which mlx-lm has no states, get theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from server.text.calls.call_formats import UNTAGGED
from server.text.tokenizer import Tokenizer
from server.text.tokens import harmony
from server.text.tokens.control import NORMAL, REASONING, TOOL, Tags, Transitions

# Two more states, of answers that follow a grammar: before its text, which only a tag at the very beginning leaves for
# another state, and inside, where nothing is a tag however it is spelled.
OPENING = "opening"
FORMED = "formed"


class Watch:
    """Looks for the first of some words in a stream of characters; mutable, for one stream.

    The word that is complete first is found; of several complete at once the longest. That doesn't depend on how the
    stream is cut.

    Attributes:
        pending: how many of the last characters may be the beginning of a word.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word for word in words if word]
        self._fallbacks = [_fallbacks(word) for word in self._words]
        self._matched = [0] * len(self._words)
        self.pending = 0
        self._heads: re.Pattern[str] | None = None
        if self._words:
            self._heads = re.compile("[" + re.escape("".join({word[0] for word in self._words})) + "]")

    def passes(self, text: str) -> bool:
        """Whether no word goes on or begins in `text`, which then needn't be read."""
        return self._heads is None or not (self.pending or self._heads.search(text))

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Reads `text` from `start` on, to the end of the first word found: where that is, and the word."""
        position = start
        while self._heads is not None and position < len(text):
            if not self.pending:
                head = self._heads.search(text, position)
                if head is None:
                    break
                position = head.start()
            position += 1
            if word := self._step(text[position - 1]):
                return position, word
        return None

    def _step(self, char: str) -> str:
        complete = ""
        for n, word in enumerate(self._words):
            matched = self._matched[n]
            while matched and word[matched] != char:
                matched = self._fallbacks[n][matched - 1]
            matched += word[matched] == char
            if matched == len(word):
                complete = max(complete, word, key=len)
                matched = self._fallbacks[n][-1]
            self._matched[n] = matched
        self.pending = max(self._matched)
        return complete


def _fallbacks(word: str) -> list[int]:
    """For each prefix the length of its longest proper ending that is a prefix, too (Knuth, Morris, Pratt)."""
    lengths = [0] * len(word)
    matched = 0
    for n in range(1, len(word)):
        while matched and word[n] != word[matched]:
            matched = lengths[matched - 1]
        matched += word[n] == word[matched]
        lengths[n] = matched
    return lengths


class OutsideStrings(Watch):
    """Looks for words outside the strings of a JSON text, which may spell anything."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        self._heads = None  # each character may begin or end a string
        self._in_string = self._escaped = False

    def passes(self, text: str) -> bool:
        return not text

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        for position in range(start, len(text)):
            if word := self._step(text[position]):
                return position + 1, word
        return None

    def _step(self, char: str) -> str:
        if self._in_string:
            self._in_string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
            return ""
        self._in_string = char == '"'
        return super()._step(char)


class Segment(NamedTuple):
    """Text of one state, and the tag that ended the state, or ""."""

    state: str
    text: str
    tag: str


class Channels:
    """Cuts one answer into segments; mutable, owned by that answer.

    Attributes:
        state: the part that the answer is in.
    """

    def __init__(self, transitions: Transitions, state: str, tags: Tags, *, strings: bool = False) -> None:
        """`tags` says which tags are control tokens: those are fed as their marks. `strings`: what stands between tool
        tags is JSON that a grammar holds to its form, so that no tag is looked for in its strings."""
        self._transitions = {s: tuple((tags.marked(tag), to) for tag, to in edges) for s, edges in transitions.items()}
        self._plain = tags.plain
        self._strings = strings
        self._held = ""  # may begin a tag
        self._shown: list[bool] | None = None  # for each held character whether it is for readers; None: all are
        self.enter(state)

    def feed(self, text: str, *, hidden: bool = False) -> Iterable[Segment]:
        """Segments in order. Hidden text (a special token's) counts in tool calls, and is shown nowhere else."""
        if hidden or self.state == OPENING or not self._watch.passes(text):
            return self._cut(text, hidden)
        return (Segment(self.state, self._plain(text), ""),) if text else ()

    def _cut(self, text: str, hidden: bool) -> Iterator[Segment]:
        whole = self._held + text
        shown = self._shown
        if hidden or shown is not None:
            shown = [*(shown or [True] * len(self._held)), *[not hidden] * len(text)]
        done = 0
        position = len(self._held)
        self._open(whole)
        while found := self._watch.find(whole, position):
            position, tag = found
            end = position - len(tag)
            segment = Segment(self.state, self._readable(whole, shown, done, end), self._plain(tag))
            done = position
            self.enter(self._next(tag))
            yield segment
            self._open(whole[done:])
        safe = len(whole) - self._watch.pending
        if safe > done:
            yield Segment(self.state, self._readable(whole, shown, done, safe), "")
        self._held = whole[safe:]
        if shown and self._held:
            self._shown = shown[safe:]
        else:
            self._shown = None

    def enter(self, state: str) -> None:
        """Go on in another state, directly behind what was read."""
        self.state = state
        self._watch = self._watch_for(state)

    def finish(self) -> Segment:
        """What was held back and now begins no tag any more."""
        held = self._held
        shown = self._shown
        self._held = ""
        self._shown = None
        return Segment(self.state, self._readable(held, shown, 0, len(held)), "")

    def _readable(self, text: str, shown: list[bool] | None, start: int, end: int) -> str:
        text = text[start:end]
        return self._plain(text if shown is None or self.state == TOOL else "".join(compress(text, shown[start:end])))

    def _open(self, text: str) -> None:
        """Once a text that follows a grammar begins with anything but a tag, it holds none."""
        if self.state != OPENING or not (begun := text.lstrip("\n")):
            return
        words = [word for word, _ in self._transitions.get(OPENING, ())]
        if not any(word.startswith(begun) or begun.startswith(word) for word in words):
            self.enter(FORMED)

    def _next(self, tag: str) -> str:
        return next(state for word, state in self._transitions[self.state] if word == tag)

    def _watch_for(self, state: str) -> Watch:
        words = [word for word, _ in self._transitions.get(state, ())]
        if self._strings and state == TOOL:
            return OutsideStrings(words)
        return Watch(words)


def transitions(tokenizer: Tokenizer, *, tools: bool) -> tuple[Transitions, str]:
    """Which tag leads where for this model, and the state in which an answer begins."""
    if tokenizer.speaks_harmony:
        return _offered(harmony.HARMONY, tools), harmony.HEADER
    edges: dict[str, list[tuple[str, str]]] = {NORMAL: [], REASONING: [], TOOL: []}
    if tokenizer.think:
        opening, closing = tokenizer.think
        edges[NORMAL] += [(opening, REASONING), (closing, NORMAL)]
        edges[REASONING] += [(opening, REASONING), (closing, NORMAL)]
    edges[NORMAL] += [(tag, NORMAL) for tag in tokenizer.silent]
    for state, more in tokenizer.transitions.items():
        edges.setdefault(state, []).extend(more)
    led = any(state == TOOL for more in edges.values() for _, state in more)
    form = tokenizer.tool_format
    if form and form.is_bare:
        edges[NORMAL] += [(form.start, NORMAL)]
    elif form:
        if not led:
            edges[NORMAL] += [(form.start, TOOL)]
        edges[NORMAL] += [(tag, TOOL) for name, tag in UNTAGGED.items() if name == form.name]
        edges[REASONING] += [(form.start, TOOL)]
        if form.end:
            edges[TOOL] += [(form.end, NORMAL)]
    return _offered(edges, tools), tokenizer.first_state or NORMAL


def formed(tokenizer: Tokenizer, *, tools: bool, reasons: bool) -> tuple[Transitions, str]:
    """The same for an answer that follows a grammar; `reasons`: which lets it open a block of reasoning."""
    if tokenizer.speaks_harmony or tokenizer.first_state is not None:
        return transitions(tokenizer, tools=tools)
    edges: dict[str, list[tuple[str, str]]] = {OPENING: [], REASONING: [], TOOL: []}
    if tokenizer.think:
        opening, closing = tokenizer.think
        if reasons:
            edges[OPENING] += [(opening, REASONING)]
        edges[REASONING] += [(closing, OPENING)]
    if (form := tokenizer.tool_format) and not form.is_bare:
        edges[OPENING] += [(form.start, TOOL)]
        if form.end:
            edges[TOOL] += [(form.end, OPENING)]
    return _offered(edges, tools), OPENING


def _offered(edges: Mapping[str, Sequence[tuple[str, str]]], tools: bool) -> Transitions:
    return {state: tuple(e for e in more if tools or e[1] != TOOL) for state, more in edges.items()}
