"""The fewest tokens that a text can have.

Owns a bound that is true or absent: the bytes of a text, by those of the longest token. It shows without encoding that
a text can't fit. Runs on whichever thread or process encodes; never encodes itself.

The bound holds where every byte of a text is part of some token. What may drop some of them (a normalizer that
collapses blanks, an unknown word that becomes one token, an added token that takes the blanks beside it) leaves the
tokenizer without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

# To what part of its bytes a text may come down; one of ASCII alone doesn't.
_SHRINKS = {"NFC": 4, "NFD": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})  # pre-tokenizers
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class Least:
    """Of one tokenizer; found out when a text is first long enough. Any thread."""

    def __init__(self, backend: Any, spellings: Callable[[], Iterable[bytes]]) -> None:
        """`spellings`: the bytes of every token that there is."""
        self._backend = backend
        self._spellings = spellings

    def tokens(self, text: str) -> int:
        """No encoding of `text` has fewer; 0 where that can't be said."""
        if not self._longest:
            return 0
        if text.isascii():
            kept = len(text)
        else:
            kept = len(text.encode("utf-8", "replace")) // self._shrinks
        return -(-kept // self._longest)

    @cached_property
    def _shrinks(self) -> int:
        return _kept(self._backend)

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token; 0 where a token may stand for any number of a text's."""
        if self._shrinks:
            return max(map(len, self._spellings()))
        return 0


def _kept(backend: Any) -> int:
    """1 if tokens have all bytes of a text, n if they have at least an n-th of them, 0 if there is no such number."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return 0
    steps = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    if any(step["type"] not in _KEEPS or step.get("behavior") == "Removed" for step in steps):
        return 0
    before = list(_steps(backend.normalizer, "normalizers"))
    by_bytes = any(step["type"] == "ByteLevel" for step in before + steps)
    if _knows_every_byte(backend, by_bytes):
        return _shrinks(before)
    return 0


def _knows_every_byte(backend: Any, by_bytes: bool) -> bool:
    from tokenizers import models, pre_tokenizers

    if not isinstance(backend.model, models.BPE):
        return False
    if by_bytes:
        spellings = pre_tokenizers.ByteLevel.alphabet()
    elif backend.model.byte_fallback:
        spellings = _BYTES
    else:
        return False
    return all(backend.model.token_to_id(spelling) is not None for spelling in spellings)


def _shrinks(normalizers: Iterable[dict[str, Any]]) -> int:
    whole = 1
    for step in normalizers:
        factor = _SHRINKS.get(step["type"], 0)
        if step["type"] == "Replace" and (found := step["pattern"].get("String")):
            factor = int(len(step["content"].encode()) >= len(found.encode()))
        whole *= factor
    return whole


def _steps(part: Any, inside: str) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer, its members if it is a sequence of them."""
    if part is not None:
        state = json.loads(part.__getstate__())
        yield from state[inside] if state["type"] == "Sequence" else [state]
