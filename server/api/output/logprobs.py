"""Log probabilities as clients read them: decoded tokens and their bytes, never the tokenizer's own spelling.

Owns both customary shapes, chat's list of entries and the text completion's parallel lists. Runs on the event loop;
pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from server.api.output.choices import ScoredToken
from server.ipc.sequence import TokenLogprobs
from server.text.tokenizer import Tokenizer

Spelling = Callable[[int], tuple[str, bytes]]  # a token as its reader sees it, and its true bytes
LOWEST = -9999.0  # instead of minus infinity, which is no JSON number


def entries(spell: Spelling, scored: Sequence[ScoredToken], count: int) -> dict[str, Any]:
    """Chat's shape, with `count` alternatives."""
    content = []
    for score in scored:
        top = [_entry(spell, token, logprob) for token, logprob in score.logprobs.top[:count]]
        content.append(_entry(spell, score.token, score.logprobs.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(spell: Spelling, token: int, logprob: float) -> dict[str, Any]:
    text, data = spell(token)
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}


class Lists:
    """The text completion's shape; mutable, one a choice, for the offsets go on from piece to piece."""

    def __init__(
        self, tokenizer: Tokenizer, count: int, spell: Spelling | None = None, *, shows_special: bool = False
    ) -> None:
        """`count`: alternatives. `shows_special`: the answer's text shows special tokens."""
        self._shows_special = shows_special
        self._tokenizer = tokenizer
        self._spell = spell or tokenizer.spell
        self._count = count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The prompt's tokens; nothing comes before the first, so nothing is known of it. Its text is whole by itself:
        the answer doesn't go on with half a character."""
        rest = [ScoredToken(token, score) for token, score in zip(ids[1:], logprobs, strict=True)]
        first = {"tokens": [self._spell(ids[0])[0]], "token_logprobs": [None], "top_logprobs": [None]}
        made = merged(first | {"text_offset": [self._advance(ids[0])]}, self._lists(rest, self._advance))
        self._offset += len(self._utf8.decode(b"", final=True))
        return made

    def answer(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        """Special tokens that an answer's text leaves out take no room."""
        return self._lists(scored, lambda token: self._offset if self._hides(token) else self._advance(token))

    def _hides(self, token: int) -> bool:
        return self._tokenizer.is_special(token) and not self._shows_special

    def _lists(self, scored: Sequence[ScoredToken], offset: Callable[[int], int]) -> dict[str, Any]:
        return {
            "tokens": [self._spell(score.token)[0] for score in scored],
            "token_logprobs": [max(score.logprobs.logprob, LOWEST) for score in scored],
            "top_logprobs": [self._alternatives(score) for score in scored],
            "text_offset": [offset(score.token) for score in scored],
        }

    def _alternatives(self, score: ScoredToken) -> dict[str, float]:
        """By text, the drawn token first; of several tokens with the same text the likeliest."""
        drawn = self._spell(score.token)[0]
        found = {drawn: score.logprobs.logprob}
        for token, logprob in score.logprobs.top[: self._count]:
            text = self._spell(token)[0]
            found[text] = max(logprob, found.get(text, LOWEST))
        return {text: max(logprob, LOWEST) for text, logprob in found.items()}

    def _advance(self, token: int) -> int:
        """Where the token's text begins, in characters. What is there of a character that it doesn't go on with is
        text of its own, before it."""
        data = self._tokenizer.token_bytes(token)
        pending = self._utf8.getstate()[0]
        begin = self._offset
        if pending and data and not _is_utf8(pending + data[:1]):
            begin += len(pending.decode("utf-8", "replace"))
        self._offset += len(self._utf8.decode(data))
        return begin


def _is_utf8(data: bytes) -> bool:
    """Whether the bytes are the beginning of some text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def by_id(tokenizer: Tokenizer) -> Spelling:
    """Tokens named by their ids, for readers who want to know exactly which."""
    return lambda token: (f"token_id:{token}", tokenizer.token_bytes(token))


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {key: first[key] + second[key] for key in first}
