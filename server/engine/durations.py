"""How long steps and chunks usually take, by their shape.

Owns the newest few durations of each shape that the engine has run. Main thread of the engine process only; never
touches MLX and has no clock of its own.

The server waits for a step in proportion to what it usually takes. A median forgets what was slow once, be it a kernel
that had to be compiled or a machine that was busy with something else; a maximum would remember it for ever.
"""

from __future__ import annotations

from collections import deque

KEPT = 15  # durations a shape


class Durations:
    """`usual` is how long the shape entered last takes as a rule; 0 while nothing like it has been run."""

    def __init__(self) -> None:
        self.usual = 0.0
        self.is_first = False  # the shape entered last has never been run
        self._entered = self._kind = ""
        self._known: dict[str, deque[float]] = {}  # by shape, and by kind

    def enter(self, kind: str, size: int) -> None:
        """A chunk or a step begins."""
        self._kind = kind
        self._entered = f"{kind} {size}"
        self.is_first = self._entered not in self._known
        self.usual = _median(self._known.get(self._entered) or self._known.get(kind))

    def leave(self, seconds: float) -> None:
        """What was entered last is done."""
        self.is_first = False
        for name in (self._entered, self._kind):
            self._known.setdefault(name, deque(maxlen=KEPT)).append(seconds)


def _median(seconds: deque[float] | None) -> float:
    """The lower one of two: the first run of a shape often was the slow one."""
    if seconds:
        return sorted(seconds)[(len(seconds) - 1) // 2]
    return 0.0
