"""How long steps and chunks usually take, by their shape.

Owns the newest few durations of each shape that the engine has run. Main thread of the engine process only; never
touches MLX and has no clock of its own.

The server waits for a step in proportion to what it usually takes. A median forgets what was slow once, be it a kernel
that had to be compiled or a machine that was busy with something else; a maximum would remember it for ever.
"""

from __future__ import annotations

from collections import deque

KEPT = 15  # durations a shape
FRESH = 5  # of them between two looks at their median, once all are there: a step asks for it each time


class Durations:
    """`usual` is how long the shape entered last takes as a rule; 0 while nothing like it has been run."""

    def __init__(self) -> None:
        self.usual = 0.0
        self.is_first = False  # the shape entered last has never been run
        self._entered: tuple[ShapeDurations, ShapeDurations] | None = None
        self._known: dict[tuple[str, int], ShapeDurations] = {}
        self._kinds: dict[str, ShapeDurations] = {}

    def enter(self, kind: str, size: int) -> None:
        """A chunk or a step begins."""
        own = self._known.get((kind, size))
        if own is None:
            own = self._known[kind, size] = ShapeDurations()
        alike = self._kinds.get(kind)
        if alike is None:
            alike = self._kinds[kind] = ShapeDurations()
        self._entered = own, alike
        self.is_first = not own.seconds
        self.usual = own.usual
        if self.is_first:
            self.usual = alike.usual

    def leave(self, seconds: float) -> None:
        """What was entered last is done."""
        self.is_first = False
        for durations in self._entered or ():
            durations.add(seconds)


class ShapeDurations:
    """The newest durations of one shape, or of all of a kind. `usual` is their median, of two the lower one: the first
    run of a shape often was the slow one."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.usual = 0.0
        self._fresh = 0  # added since the median was taken

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._fresh += 1
        if len(self.seconds) < KEPT or self._fresh >= FRESH:
            self._fresh = 0
            self.usual = sorted(self.seconds)[(len(self.seconds) - 1) // 2]
