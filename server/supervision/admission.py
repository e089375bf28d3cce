"""May this sequence start, wait, or never fit? Arithmetic only.

Owns the numbers: what a row costs, what an engine can hold, how long answers usually get. No I/O, no clock, no
messages; any thread. The supervisor asks whether a sequence can ever fit, the scheduler whether it may start now.

A request doesn't reserve its max_tokens: most answers are far shorter. Room is planned for the length that answers
have had lately, and preemption covers what that leaves open. Memory that the engine can free by itself (the buffer
pool, idle prefixes) is never counted against a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from server.errors import ContextLengthError, ExceedsMemory
from server.ipc import messages
from server.ipc.probe import GROWTH, PLANNED_CHUNK
from server.ipc.sequence import TokenSequence

CALM_SECONDS = 10.0  # of calm before a preempted row may come back
_CLOSED = frozenset({"hold", "rotate"})


class Capacity:
    """What one engine can hold, from its `Ready` and the settings."""

    def __init__(self, ready: messages.Ready, context: int | None, max_rows: int) -> None:
        self.context = min(ready.context, context or ready.context)
        self.max_rows = max_rows
        self.limit = ready.memory_limit  # 0: unknown, then memory refuses none
        self.weights = ready.weights_bytes
        self._probe = ready.probe
        self._layers = Counter(ready.probe.row_cost)

    def cost(self, length: int) -> int:
        """Bytes of all caches of a row with `length` positions."""
        return sum(layer.bytes(length) * times for layer, times in self._layers.items())

    def largest(self, length: int) -> int:
        """Bytes of its largest cache array: joining and growing copy one at a time."""
        return max((layer.bytes(length) for layer in self._layers), default=0)

    def peak(self, unread: int) -> int:
        """Bytes that a prefill chunk needs for a while when so many tokens are yet to be read: the last one, which
        attends to all before it. The engine reads shorter chunks where memory is short, so a long prompt needn't wait
        until there's room for the longest."""
        size = min(unread, PLANNED_CHUNK)
        return self._probe.chunk_peak(size, unread - size)

    def least(self, length: int) -> int:
        """Bytes that the engine can't do without, with this row as its only one. What a chunk takes for a while is
        left out: that is an estimate, and the engine reads a lone prompt in chunks as short as need be."""
        return self.weights + self.cost(length) + self.largest(length)

    def check(self, sequence: TokenSequence) -> None:
        """Raises ContextLengthError or ExceedsMemory for a sequence that could never run."""
        length = len(sequence.prompt) + 1
        if length > self.context:
            raise ContextLengthError.of(len(sequence.prompt), self.context)
        if self.limit and self.least(length) > self.limit:
            raise ExceedsMemory(
                f"A prompt of {len(sequence.prompt)} tokens needs {self.least(length)} bytes, weights included; the "
                f"memory limit is {self.limit} bytes."
            )


class Outlook:
    """How long answers usually get: a running mean, pulled up at once by a row that had to give its memory back."""

    def __init__(self) -> None:
        self.typical = float(GROWTH)

    def finished(self, tokens: int) -> None:
        self.typical += (tokens - self.typical) / 8

    def preempted(self, tokens: int) -> None:
        self.typical = max(self.typical, float(tokens + GROWTH))

    def length(self, sequence: TokenSequence, generated: int) -> int:
        """Positions to plan for."""
        return len(sequence.prompt) + max(generated + 1, min(sequence.max_tokens, round(self.typical)))


class Room:
    """What is left at one moment for further rows. Made for one round of admissions, then dropped.

    Args:
        lengths: planned positions of the rows that run.
        unread: tokens that are yet to be read of the row that has most of them.
        pressure: of the newest snapshot.
        calm: seconds since pressure was last anything else than calm.
        padding: bytes that the groups hold by the bytes that their rows need.
    """

    def __init__(
        self,
        capacity: Capacity,
        lengths: Iterable[int],
        *,
        unread: int = 0,
        pressure: str = "calm",
        calm: float = 0,
        padding: float = 1,
    ) -> None:
        self._capacity = capacity
        self._pressure = pressure
        self._calm = calm
        self._padding = max(padding, 1.0)
        self._unread = unread
        self._rows = self._bytes = self._copies = 0
        for length in lengths:
            self.take(length)

    def take(self, length: int, unread: int = 0) -> None:
        """A row of `length` planned positions starts, by reading `unread` of them."""
        self._unread = max(self._unread, unread)
        self._rows += 1
        self._bytes += self._capacity.cost(length)
        self._copies += self._capacity.largest(length)

    def admits_new(self, length: int, unread: int = 0) -> bool:
        """A sequence that never ran. With nothing else running it may always start: one of them has to move."""
        return self._rows == 0 or (self._pressure not in _CLOSED and self.holds(length, unread))

    def admits_preempted(self, length: int) -> bool:
        """One that gave its memory back; `length` is what it has."""
        return self._rows == 0 or (
            self._pressure == "calm" and self._calm >= CALM_SECONDS and self.holds(length + GROWTH, length)
        )

    def holds(self, length: int, unread: int = 0) -> bool:
        """Rows and bytes allow it, whatever the pressure."""
        if self._rows >= self._capacity.max_rows:
            return False
        if self._rows == 0 or not self._capacity.limit:
            return True
        rows = (self._bytes + self._capacity.cost(length)) * self._padding
        copies = self._copies + self._capacity.largest(length)
        peak = self._capacity.peak(max(self._unread, unread))
        return self._capacity.weights + peak + rows + copies <= self._capacity.limit
