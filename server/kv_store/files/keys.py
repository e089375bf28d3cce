"""What token ids are called on disk: a chained hash over blocks of them.

Owns the rule by which a prefix gets its name. Runs in every process; does no I/O. The name of `n` ids follows from the
root (model and layout of its caches) and from the ids alone, wherever the files that hold them are cut.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

BLOCK = 256  # ids a link of the chain
KEY_BYTES = 16


def digest(*parts: bytes) -> bytes:
    """Hash a few byte strings; its length keeps each apart from its neighbours."""
    state = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def packed_ids(ids: Iterable[int]) -> bytes:
    """Token ids as 4 bytes each, as the machine orders them."""
    return array("I", ids).tobytes()


class KeyChain:
    """The names of all prefixes of one list of ids, which may grow at its end while it is used."""

    def __init__(self, root: bytes, tokens: list[int], first: int = 0) -> None:
        """`tokens` is read when a name is asked for; ids that were named once must not change. `first`: ids before
        them, whole blocks, of which only the name is known, `root`."""
        self.tokens = tokens
        self._first = first
        self._borders = [root]

    def key(self, length: int) -> bytes:
        """Name the first `length` ids."""
        length -= self._first
        whole, rest = divmod(length, BLOCK)
        while len(self._borders) <= whole:
            first = BLOCK * (len(self._borders) - 1)
            self._borders.append(digest(self._borders[-1], packed_ids(self.tokens[first : first + BLOCK])))
        if not rest:
            return self._borders[whole]
        return digest(self._borders[whole], packed_ids(self.tokens[whole * BLOCK : length]))

    def border(self, length: int) -> tuple[bytes, list[int]]:
        """The name at the last border of a block among the first `length` ids, and the ids since then."""
        first = length // BLOCK * BLOCK
        return self.key(first), self._between(first, length)

    def repeated(self, start: int, end: int) -> tuple[int, ...]:
        """The ids that a file repeats: a piece's own, and of a state those since the last border of a block."""
        if start == end:
            start = (max(end, 1) - 1) // BLOCK * BLOCK
        return tuple(self._between(start, end))

    def _between(self, start: int, end: int) -> list[int]:
        return self.tokens[start - self._first : end - self._first]
