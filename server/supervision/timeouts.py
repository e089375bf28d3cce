"""How long is too long, and how soon is too soon.

Owns four small judgements about an engine's life, each over times that its caller gives: when it counts as stuck, how
long to wait before the next start, whether it is replaced too often, and when a waiting client should ask again. No
clock of its own, no timers, no engine; any thread.
"""

from __future__ import annotations

from collections import deque

from server.ipc.snapshot import Snapshot

LONGEST_STALL = 600.0  # of the limits that aren't set but follow from how long steps take
STEPS_FACTOR = 20
FIRST_SHAPE_FACTOR = 5
HASTY_ROTATIONS = 3
GOOD_LIFE = 10.0  # seconds after which an engine's death says nothing about the next start


class StallLimit:
    """Seconds without progress after which an engine counts as stuck."""

    def __init__(self, stall_seconds: float) -> None:
        self._base = stall_seconds
        self._kills = 0

    def seconds(self, snapshot: Snapshot | None) -> float:
        """The limit for the step or chunk under way."""
        factor = 1
        if snapshot and snapshot.first_shape:
            factor = FIRST_SHAPE_FACTOR
        doubled: float = self._usual(snapshot) * factor * 2 ** max(0, self._kills - 1)
        return max(self._base, min(doubled, LONGEST_STALL))

    def killed(self) -> bool:
        """One more engine was stuck. True: the limit has just been raised."""
        self._kills += 1
        return self._kills > 1

    def worked(self, seconds: float, snapshot: Snapshot | None) -> None:
        """An engine has worked for so long. Beyond twice the limit that it had at first, whatever was slow is over;
        a limit that was raised doesn't count, or it would itself take ever longer to be undone."""
        if seconds > 2 * self._usual(snapshot):
            self._kills = 0

    def _usual(self, snapshot: Snapshot | None) -> float:
        """Steps that take long as a rule are waited for; one that took long once makes none after it wait."""
        return max(self._base, min(STEPS_FACTOR * (snapshot.typical_step_seconds if snapshot else 0.0), LONGEST_STALL))


class Backoff:
    """Seconds to wait before the next start: none after a good life, twice as long after each bad one."""

    def __init__(self, first: float = 0.25, longest: float = 30.0) -> None:
        self._first = first
        self._longest = longest
        self._bad = 0

    def good(self) -> None:
        self._bad = 0

    def bad(self) -> None:
        self._bad += 1

    def seconds(self) -> float:
        if self._bad:
            return min(self._first * 2.0 ** (min(self._bad, 30) - 1), self._longest)
        return 0.0


class RotationPace:
    """Counts engines that had to be replaced sooner than `minimum` seconds after they were ready."""

    def __init__(self, minimum: float) -> None:
        self.minimum = minimum
        self._hasty = 0

    def rotated(self, age: float, *, late: bool = False) -> bool:
        """An engine asks to be replaced at `age` seconds, or too `late`. True: too soon too often, replacing doesn't
        help."""
        if late or age < self.minimum:
            self._hasty = self._hasty + 1
        else:
            self._hasty = 0
        if self._hasty < HASTY_ROTATIONS:
            return False
        self._hasty = 0
        return True


class DrainRate:
    """When sequences left lately; says when it's worth asking again."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=32)

    def left(self, now: float) -> None:
        self._times.append(now)

    def retry_after(self, waiting: int) -> int:
        """Whole seconds, 1 to 60, until about `waiting` more have left."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return 5
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return max(1, min(60, round(pace * max(waiting, 1))))
