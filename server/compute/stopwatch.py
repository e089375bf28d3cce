"""A stopwatch for the parts of a step.

Owns nothing but the time of its last lap. Used in the engine process's main thread. What is timed never reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter


class Laps:
    """Measures nothing: for code that runs without being timed."""

    def start(self) -> None:
        """Begin the first lap."""

    def lap(self, part: str) -> None:
        """End a lap, which counts for `part`, and begin the next one."""


class Stopwatch(Laps):
    """Adds up seconds by part."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.clock = clock
        self._last = clock()

    def start(self) -> None:
        self._last = self.clock()

    def lap(self, part: str) -> None:
        now = self.clock()
        self.seconds[part] += now - self._last
        self._last = now
