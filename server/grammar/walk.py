"""First bytes of answers that a grammar allows, in search of a place where llguidance gives up.

A grammar may compile, allow a first token, and go beyond llguidance's limits a few bytes later: an object with a
thousand optional properties does behind its opening brace. Owns the choice of the bytes. Runs in the process that
checks grammars, over single bytes and the control tokens that the grammar names. A limit that only a longer answer
meets isn't found here; its row then ends with `errors.GrammarTooComplex`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TOO_COMPLEX = "it is too complex to be followed"
MOST_BYTES = 300  # of one walk: some keys and values
MOST_IDS = 1_000_000
SECONDS = 0.1  # for all walks over a grammar; most take a few milliseconds
_TAG = re.compile(r"<\[[\^\d,*-]+\]>")
_NUMBER = re.compile(r"\d+")
_LIMIT = re.compile(r"max is|limit|fuel|too many", re.IGNORECASE)  # what else it says is of its tokens, or a dead end
_QUOTE = ord('"')
_MANY = 64  # more bytes than this are allowed inside a string alone
_LEADING = list(b'{[,:"')  # to the next key or value, the best first
_TRAILING = list(b"}] \t\r\n")
Choose = Callable[[list[int], Random], int]


class _WalkTokenizer:
    """Single bytes, and control tokens by the ids that a grammar names; the last id is the end of the text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, control: Sequence[int]) -> None:
        last = max([255, *control])
        self.tokens = [bytes([byte]) for byte in range(256)] + [b""] * (last - 254)
        for token in control:
            self.tokens[token] = f"<|{token}|>".encode()
        self.eos_token_id = last + 1
        self.special_token_ids = list(control)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the ids of forced text."""
        if isinstance(text, str):
            text = text.encode()
        return list(text)


def tokenizer(grammar: str) -> tuple[LLTokenizer, list[int]]:
    """Return the tokenizer for a walk over a grammar, and the ids that may be drawn."""
    numbers = {int(number[:9]) for tag in _TAG.findall(grammar) for number in _NUMBER.findall(tag)}
    control = tuple(sorted(number for number in numbers if 255 < number < MOST_IDS))
    return _tokenizer(control), [*range(256), *control]


@lru_cache(4)
def _tokenizer(control: tuple[int, ...]) -> LLTokenizer:
    """Make the tokenizer, which takes longer than checking a small grammar and is kept."""
    from llguidance import LLTokenizer

    return LLTokenizer(cast("Any", _WalkTokenizer(control)))


def fault(matcher: LLMatcher, ids: Sequence[int]) -> str:
    """Return where llguidance gives up, in one line; empty if no walk comes to such a place."""
    until = monotonic() + SECONDS
    for choose in (_structural, _any):
        if found := _walk(matcher.deep_copy(), ids, choose, until):
            return found
    return ""


def _walk(matcher: LLMatcher, ids: Sequence[int], choose: Choose, until: float) -> str:
    draw = Random(0)  # the same verdict on the same grammar
    for length in range(MOST_BYTES):
        mask = matcher.compute_bitmask()
        if error := matcher.get_error():
            return _said(error, length)
        allowed = [token for token in ids if mask[token >> 3] >> (token & 7) & 1]
        if not allowed or monotonic() > until:
            return ""
        if not matcher.consume_token(choose(allowed, draw)):
            return _said(matcher.get_error(), length + 1)
    return ""


def _said(error: str, length: int) -> str:
    line = error.strip().partition("\n")[0].removeprefix("Parser Error: ").partition("; consider")[0]
    if not _LIMIT.search(line):
        return ""
    return f"{TOO_COMPLEX} beyond {length} bytes of an answer: {line}"


def _structural(allowed: list[int], draw: Random) -> int:
    """Choose bytes that end strings and go on to the next key or value, where JSON is widest."""
    if _QUOTE in allowed and len(allowed) > _MANY:
        return _QUOTE
    for byte in _LEADING:
        if byte in allowed:
            return byte
    return _any([token for token in allowed if token not in _TRAILING] or allowed, draw)


def _any(allowed: list[int], draw: Random) -> int:
    return draw.choice(allowed)
