"""Long texts are encoded in pieces.

Owns where a text may be cut so that the pieces have the ids of the whole, and the call of the tokenizers library. Runs
on whichever thread or process encodes. Never decides what a control token is.

A text at once takes some 200 times its size of memory, and one that is far too long for the model is read to its end
for nothing. Borders are tried out with each tokenizer, and no token of its vocabulary may lie across one; where none
is found, the text is encoded at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from server.errors import ContextLengthError

PIECE = 1 << 18  # characters
EXACT = 2  # times the tokens that there is room for: up to there they are counted exactly
SHORT = 1 << 11  # characters that take less than another thread's turn
_HEADS = ("Hello there", "\n\tfor", "it's", "x1 a", "(see", "1, naïve")
_TAILS = ("friend, 1 2", "a", "it's\n\n", "the  end.", "é")
_LINES = ("Hello there\n", "a \n\n", "x = {1};\r\n", "é…\n", "1,\n  \n", "'\n", "\t\n")
_BEGINNINGS = ("friend, 1 2", "a", "1", "42 \n", "Été\n", "日本", "it's", "X")

Measured = tuple[list[int], list[int]]  # ids, and where in the text each token ends


class Border:
    """One kind of place at which a text may be cut.

    Attributes:
        pattern: what lies there; it is part of neither piece.
        across: a token like this would lie across it.
    """

    def __init__(self, pattern: str, across: bytes, gap: str, heads: Iterable[str], tails: Iterable[str]) -> None:
        self.pattern = pattern
        self.across = re.compile(across)
        self._samples = [(head, gap, tail) for head in heads for tail in tails]

    def holds(self, encode: Callable[[str], Measured]) -> bool:
        """Whether the pieces on both sides have the ids of the whole."""
        return all(_same(encode, *sample) for sample in self._samples)


BORDERS = (
    Border(r"(?<=\n)(?=[^\W_])", rb"\n[0-9A-Za-z\x80-\xff]", "", _LINES, _BEGINNINGS),
    Border(r"(?<=[a-z])(?= [a-z])", rb"[a-z] [a-z]", "", _HEADS, [" " + tail for tail in _TAILS]),
    # For tokenizers that put a blank before each text.
    Border(r"(?<=[a-z]) (?=[a-z])", rb"[a-z] [a-z]", " ", _HEADS, _TAILS),
)


def _same(encode: Callable[[str], Measured], head: str, gap: str, tail: str) -> bool:
    (ids, ends), (more, further), start = encode(head), encode(tail), len(head) + len(gap)
    together, places = encode(head + gap + tail)
    expected = ends + [end + start for end in further]
    if gap:  # a blank that is put before the tail has no place there; in the whole it is a token's, maybe its own
        del places[len(ends)], expected[len(ends)]
    return (together, places) == (ids + more, expected)


def whole(backend: Any, text: str) -> Measured:
    """The text encoded at once. A batch of one lets other threads run meanwhile; `encode` of tokenizers 0.23 stops them
    all, so it may go back to that once it doesn't."""
    if len(text) <= SHORT:
        encoding = backend.encode(text, add_special_tokens=False)
    else:
        [encoding] = backend.encode_batch([text], add_special_tokens=False)
    return encoding.ids, [end for _, end in encoding.offsets]


class Cuts:
    """Where texts may be cut for one tokenizer; found out when a text is first long enough. Any thread."""

    def __init__(self, backend: Any, spellings: Callable[[], Iterable[bytes]]) -> None:
        """`spellings`: the bytes of every token that there is."""
        self._backend = backend
        self._spellings = spellings

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        tried = [border for border in BORDERS if border.holds(lambda text: whole(self._backend, text))]
        for data in self._spellings() if tried else ():
            tried = [border for border in tried if not border.across.search(data)]
        if tried:
            return re.compile("|".join(border.pattern for border in tried))
        return None

    def after(self, text: str, start: int) -> tuple[int, int]:
        """Where the piece that begins at `start` ends, and where the next one begins."""
        place = None
        if self.pattern:
            place = self.pattern.search(text, start + PIECE)
        if place:
            return place.span()
        return (len(text), len(text))


def measured(backend: Any, cuts: Cuts, text: str, most: int | None = None) -> Measured:
    """Ids of a text and where each token ends, one character more or less at a border.

    Raises ContextLengthError as soon as it is clear that there are many more than `most`.
    """
    if len(text) <= PIECE:
        return whole(backend, text)
    ids: list[int] = []
    ends: list[int] = []
    start = 0
    while start < len(text):
        end, following = cuts.after(text, start)
        more, further = whole(backend, text[start:end])
        ids += more
        ends += [place + start for place in further]
        start = following
        if most is not None and len(ids) > EXACT * most and start < len(text):
            raise ContextLengthError.of(len(ids), most, at_least=True)
    return ids, ends
