"""What is worth keeping of what rows have read, and who had better wait for it.

Owns the rules, and nothing of what is kept: that is `prefix_cache`'s. Runs in the engine process's main thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from server.cache_guard import Caches, parts
from server.compute.rows import Row
from server.engine.prefix_cache import WORTH_KEEPING, PrefixCache, can_trim

_WINDOWS = ("max_size", "chunk_size")  # attributes that say after how many positions a cache drops its oldest


class PrefixPolicy:
    """Owned by the loop."""

    def __init__(self, prefix: PrefixCache, fresh: Caches, row_bytes: Callable[[int], int]) -> None:
        """`fresh`: empty caches of the model; `row_bytes(length)`: what a copy of a row's caches takes."""
        self._prefix = prefix
        self._row_bytes = row_bytes
        windows = [size for part in parts(fresh) for name in _WINDOWS if (size := getattr(part, name, None))]
        self._trims_below = 0
        if can_trim(fresh):
            self._trims_below = min(windows, default=sys.maxsize)

    def ends(self, row: Row) -> list[int]:
        """Lengths at which a snapshot is due, also of a continued row the prompt alone: its fellow choices and the
        next turn begin with it. Caches that can be trimmed need no others."""
        ends = {len(row.sequence.prompt) - 1, len(row.tokens) - 1}
        if not self._trims(row):
            ends.update(mark for mark in row.sequence.marks if mark >= WORTH_KEEPING)
        return sorted(ends)

    def _trims(self, row: Row) -> bool:
        """Whether the row's caches can still be trimmed once its prompt is read."""
        return len(row.tokens) < self._trims_below

    def _trims_to_its_end(self, row: Row) -> bool:
        """Whether they can, however long the answer gets: a window that turns over on the way forgets the prompt."""
        return len(row.tokens) + row.sequence.max_tokens - row.produced < self._trims_below

    # ------------------------------------------------------------ keep
    def keeps_read(self, length: int, room: int) -> bool:
        """Whether to keep what an ended row has read, so many tokens. It takes a copy, and under pressure that would be
        the first to go; `room` is how many bytes rows may still take."""
        return self._prefix.enabled and self._row_bytes(length) <= room

    def keeps_begun(self, length: int, room: int) -> bool:
        """Whether to keep what a row has read whose answer was cut off (a stop string, a reader that left, a deadline).
        The engine was some tokens ahead of that, so it serves a later prompt only where these can be trimmed away."""
        return length < self._trims_below and self.keeps_read(length, room)

    def keeps_prompt(self, row: Row, length: int, waiting: Sequence[Row], room: int) -> bool:
        """Whether to keep a snapshot that is due. Caches that can be trimmed are kept whole when their row ends; before
        that a copy pays only if they won't be then, or if a row is `waiting` that begins alike."""
        if not self.keeps_read(length, room):
            return False
        return not self._trims_to_its_end(row) or self._is_awaited(row.tokens[:length], waiting)

    def _is_awaited(self, tokens: list[int], waiting: Sequence[Row]) -> bool:
        """Whether a row whose prompt isn't begun shares much of these, beyond what is kept already."""
        if not waiting:
            return False
        worth = self._prefix.reach([*tokens, 0]) + WORTH_KEEPING
        return worth <= len(tokens) and any(other.tokens[:worth] == tokens[:worth] for other in waiting)

    # ------------------------------------------------------------ wait
    def waits(self, row: Row, mates: Sequence[Row]) -> bool:
        """Whether what will be kept of a mate spares `row` much of its prompt, beyond what is kept already."""
        alike = [mate for mate in mates if row.tokens[:WORTH_KEEPING] == mate.tokens[:WORTH_KEEPING]]
        if not alike or not self._prefix.enabled:
            return False
        worth = self._prefix.reach(row.tokens) + WORTH_KEEPING
        return any(self._shares(row.tokens, mate, worth) for mate in alike)

    def _shares(self, tokens: list[int], mate: Row, worth: int) -> bool:
        """Whether `tokens` begin with so much, or more, of what will be kept of `mate`."""
        lengths = [worth]
        if not self._trims(mate):
            lengths = [length for length in self.ends(mate) if length >= worth]
        longest = min(len(tokens), len(mate.tokens)) - 1
        return any(length <= longest and tokens[:length] == mate.tokens[:length] for length in lengths)
