"""What may be spent over time, be it bytes that are written or seconds of the engine's time.

Owns the arithmetic of one budget. Used in the engine's main thread; does no work itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST = 0.25  # share of an hour's bytes that may be written at once; the rest is spread over the hour
HOUR = 3600.0


class Allowance:
    """Grows by `rate` a second up to `most`, with which it begins."""

    def __init__(self, most: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most = most
        self._rate = rate
        self._left = most
        self._then = clock()

    @classmethod
    def hourly(cls, size: int, clock: Callable[[], float] = time.monotonic) -> Allowance:
        """At most `size` in any hour."""
        return cls(BURST * size, (1 - BURST) * size / HOUR, clock)

    @property
    def left(self) -> float:
        """What may be spent now; negative after one thing that cost more."""
        now = self._clock()
        self._left = min(self._most, self._left + self._rate * (now - self._then))
        self._then = now
        return self._left

    def is_ample(self, share: float) -> bool:
        """Whether more than this share of the most is left."""
        return self.left > share * self._most

    def spend(self, amount: float) -> None:
        self._left = self.left - amount
