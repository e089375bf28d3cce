"""Texts encoded lately, so that of one that begins alike only the rest has to be.

Owns the texts, their ids and where they may be cut: a conversation comes back with each of its turns, and encoding
100,000 tokens takes some 200 ms. Never decides what a special token is. Any thread.

A tokenizer cuts a text at its special tokens before it does anything else, so what stands before one has the same ids
whatever follows. That holds for those that don't swallow the blanks before them, and is tried out for each.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from threading import Lock
from typing import Protocol

SHORTEST = 2_000  # characters of a text worth keeping
MOST = 32  # texts
MOST_CHARACTERS = 4_000_000  # of all together
GROWN = 0.8  # share of an earlier text that one which begins alike must have to take its place

Encoded = tuple[list[int], list[int]]  # ids, and where each token ends


class Encode(Protocol):
    """Encodes a text. May raise for one that has many more than `most` tokens."""

    def __call__(self, text: str, most: int | None = None, /) -> Encoded: ...


@dataclass(frozen=True, slots=True)
class _Text:
    text: str
    ids: array[int]
    ends: array[int]  # position after each token
    cuts: list[tuple[int, int]]  # positions at which a special token begins, and its place among the ids


class EncodeCache:
    """Newest texts last."""

    def __init__(self, encode: Encode, cuts: Mapping[int, str], longest: int) -> None:
        """`cuts`: special tokens before which a text may be cut, by id; `longest`: characters of the longest added
        token, since what begins before a difference may end behind it."""
        self._encode = encode
        self.cuts = cuts
        self.longest = longest
        self.texts: list[_Text] = []
        self._lock = Lock()

    def encode(self, text: str, most: int | None = None) -> Encoded:
        """Ids of the whole text and where each token ends."""
        if not (SHORTEST <= len(text) <= MOST_CHARACTERS and self.cuts):
            return self._encode(text, most)
        with self._lock:
            texts = list(self.texts)
        known, shared, cuts = self._best(text, texts)
        cut, index = cuts[-1] if cuts else (0, 0)
        ids, ends = self._encode(text[cut:], most)
        if known is not None:
            ids = known.ids[:index].tolist() + ids
            ends = known.ends[:index].tolist() + [end + cut for end in ends]
        if most is not None and len(ids) > most:  # nothing will be generated from it
            return ids, ends
        new = _Text(text, array("I", ids), array("I", ends), cuts + self._places(text, ids, ends, index + 1))
        self._keep(new, known if known is not None and shared >= GROWN * len(known.text) else None)
        return ids, ends

    def _best(self, text: str, texts: Sequence[_Text]) -> tuple[_Text | None, int, list[tuple[int, int]]]:
        """The text with which most can be spared, how much of it is shared, and where that may be cut."""
        best: tuple[_Text | None, int, list[tuple[int, int]]] = (None, 0, [])
        for known in texts:
            shared = common_prefix(known.text, text)
            cuts = known.cuts[: bisect_right(known.cuts, shared - self.longest, key=itemgetter(0))]
            if cuts and cuts[-1] > max(best[2], default=(0, 0)):
                best = known, shared, cuts
        return best

    def _places(self, text: str, ids: list[int], ends: list[int], first: int) -> list[tuple[int, int]]:
        """Where the text may be cut, before which of the ids from `first` ≥ 1 on."""
        found = [(ends[i - 1], i) for i in range(first, len(ids)) if ids[i] in self.cuts]
        return [(cut, i) for cut, i in found if text.startswith(self.cuts[ids[i]], cut)]

    def _keep(self, new: _Text, outgrown: _Text | None) -> None:
        with self._lock:
            self.texts = [text for text in self.texts if text is not outgrown]
            self.texts.append(new)
            while len(self.texts) > MOST or sum(len(text.text) for text in self.texts) > MOST_CHARACTERS:
                self.texts.pop(0)


def may_cut(encode: Encode, special: str, token: int) -> bool:
    """Whether what stands before this special token has the ids that it has alone, and the rest too."""
    for before, after in (("Hello there", " friend, 1 2"), ("a \n ", "\n\nb "), ("…", "é")):
        whole = encode(f"{special}{before}{special}{after}")
        head = encode(f"{special}{before}")
        tail = encode(f"{special}{after}")
        width = len(special) + len(before)
        if whole != (head[0] + tail[0], head[1] + [end + width for end in tail[1]]) or tail[0][:1] != [token]:
            return False
    return True


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common beginning; slices are compared, so that long texts cost little."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
