"""Token id → bytes.

Owns the table that turns ids into the bytes they stand for, filled as ids come up, and knows which ids are special.
Runs in the server process, on any thread (an entry is computed the same by whichever comes first). Never decodes a
sequence as a whole, and never touches MLX.

There are three kinds of tokenizer, and trials find out which one it is: the rule that reproduces what the tokenizer
itself decodes is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Rule = Callable[[int], bytes]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SAMPLES = ("Hello, world!", "  two spaces\n\tand a tab", "naïve 日本語 🎉 end")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's choice)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_alphabet()
_FOREIGN = re.compile("[^" + re.escape("".join(_ALPHABET)) + "]")
_AS_LATIN = {ord(char): byte for char, byte in _ALPHABET.items()}
TEXT_BYTES = frozenset([*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5)])  # all that UTF-8 consists of


def byte_level(token: str) -> bytes:
    """A token of a byte-level vocabulary. One with any foreign character is plain text, as an added token is."""
    if _FOREIGN.search(token):
        return token.encode("utf-8", "replace")
    return token.translate(_AS_LATIN).encode("latin-1")


def word_pieces(token: str) -> bytes:
    """A token of a SentencePiece vocabulary: ▁ is a space, <0x0A> a byte."""
    if match := _BYTE_PIECE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode("utf-8", "replace")


class Vocabulary:
    """What each id says. `tokenizer` is a Hugging Face tokenizer; the table is this object's own.

    Attributes:
        size: how many ids the tokenizer has; a model's may be padded beyond.
        special: ids that structure a chat and aren't part of what is said.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._table: dict[int, bytes] = {}
        added = tokenizer.added_tokens_decoder
        self.size: int = max([len(tokenizer), *(token + 1 for token in added)])
        flagged = (token for token, entry in added.items() if entry.special)
        self.special: frozenset[int] = frozenset([*flagged, *filter(_is_id, tokenizer.all_special_ids)])
        self._rule = self._find_rule()
        self._bytes: dict[int, int] | None = None

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; nothing for ids that the tokenizer doesn't have."""
        known = self._table.get(token)
        if known is None:
            known = self._table[token] = self._rule(token) if 0 <= token < self.size else b""
        return known

    def spellings(self) -> Iterator[bytes]:
        """The bytes of every id. They aren't kept: some hundred thousand of them are seldom wanted."""
        return (self._table.get(token) or self._rule(token) for token in range(self.size))

    def texts(self) -> list[bytes]:
        """What every id says, in their order; takes up to a second."""
        texts = list(self.spellings())
        ordinary = (token for token, text in enumerate(texts) if len(text) == 1 and token not in self.special)
        self._bytes = {}
        for token in ordinary:
            self._bytes.setdefault(texts[token][0], token)
        return texts

    def unspellable(self, rows: int) -> frozenset[int]:
        """Bytes of texts for which none of the first `rows` ids stands alone, so that not every text can be spelled."""
        if self._bytes is None:
            self.texts()
        assert self._bytes is not None
        return TEXT_BYTES - {byte for byte, token in self._bytes.items() if token < rows}

    def decode(self, tokens: Iterable[int], *, special: bool) -> str:
        """The text of some ids, its leading space kept; `special` tokens are spelled out or left out."""
        shown = (token for token in tokens if special or token not in self.special)
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    # ---------------------------------------------------------------- rules
    def _find_rule(self) -> Rule:
        for spell in (byte_level, word_pieces):
            if all(self._reproduces(spell, text) for text in _SAMPLES):
                return lambda token: spell(self._spelling(token))
        anchor = self._tokenizer.encode("a", add_special_tokens=False)[:1]
        return lambda token: self._behind(anchor, token)

    def _reproduces(self, spell: Callable[[str], bytes], text: str) -> bool:
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        ours = b"".join(spell(self._spelling(token)) for token in tokens).decode("utf-8", "replace")
        theirs = self._decode(tokens)
        return bool(tokens) and ours in (theirs, " " + theirs)

    def _spelling(self, token: int) -> str:
        try:
            spelling = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, OverflowError):  # a hole in the vocabulary
            return ""
        if isinstance(spelling, bytes):
            return spelling.decode("utf-8", "replace")
        return spelling or ""

    def _behind(self, anchor: list[int], token: int) -> bytes:
        """What the tokenizer's own decoding adds for `token` behind an ordinary one."""
        before = self._decode(anchor)
        both = self._decode([*anchor, token])
        return both.removeprefix(before).encode("utf-8", "replace")

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def _is_id(token: object) -> bool:
    return isinstance(token, int)
