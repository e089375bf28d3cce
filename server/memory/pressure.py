"""How near a resource is to its end, and what is due about it: arithmetic, no device.

Owns the slope of a quantity over tokens and the state machine calm → reclaim → hold → rotate. Runs in the engine's
main thread. Never touches MLX and never acts: it returns what is due, and the loop does it.

The order is always the same: whatever rises above calm asks for a reclaim first, and only a reading taken straight
after one may hold, preempt or rotate. So no guard refuses on what the server itself can free.

Ratios are of the room beside the weights: what an engine holds for as long as it lives is no pressure, since nothing
can relieve it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

HYSTERESIS = 0.05  # a level is left this far below the ratio at which it was entered
RECLAIM_SECONDS = 10.0  # while a level lasts, reclaim is tried again so often
RETRY_SECONDS = 1.0  # and so often while a reading is above the level, or at the last one
NOISE = 1.01  # a reading in mid-step may be so much higher than the one before
ROTATE_READINGS = 2  # settled readings above the last rung before the engine is replaced


class Level(IntEnum):
    CALM = 0
    RECLAIM = 1
    HOLD = 2
    ROTATE = 3


class Verb(StrEnum):
    RECLAIM = "reclaim"  # evaluate everything, drop the pool, evict idle prefixes where that helps, read again
    HOLD = "hold"  # admit nothing new
    PREEMPT = "preempt"  # the newest row gives its memory back
    ROTATE = "rotate"  # replace the engine


@dataclass(frozen=True, slots=True)
class Rungs:
    """Shares of the room at which a level is entered."""

    reclaim: float
    hold: float
    rotate: float

    def level(self, ratio: float, current: Level) -> Level:
        for level, rung in ((Level.ROTATE, self.rotate), (Level.HOLD, self.hold), (Level.RECLAIM, self.reclaim)):
            if ratio >= rung - (HYSTERESIS if level <= current else 0):
                return level
        return Level.CALM

    def at(self, level: Level) -> float:
        return (0.0, self.reclaim, self.hold, self.rotate)[level]


BUFFERS = "buffers"
BYTES = "bytes"
RUNGS = {BUFFERS: Rungs(0.75, 0.85, 0.92), BYTES: Rungs(0.80, 0.90, 0.95)}


@dataclass(frozen=True, slots=True)
class PressureReading:
    """A settled reading of one resource.

    `rising`: its slope is positive beyond doubt. `floor`: what the engine holds for as long as it lives, its weights.
    `idle`: what kept prefixes hold of it.
    """

    resource: str
    value: float
    limit: float
    rising: bool = False
    floor: float = 0.0
    idle: float = 0.0

    def ratio(self, freed: float = 0.0) -> float:
        """Share of the room that is taken, once so much is freed."""
        return (self.value - freed - self.floor) / _room(self.limit, self.floor)

    def at(self, share: float) -> float:
        """The reading at which such a share is taken."""
        return self.floor + share * _room(self.limit, self.floor)


def _room(limit: float, floor: float) -> float:
    """What may be taken; weights beyond the limit leave next to nothing."""
    return max(1.0, limit - floor)


@dataclass(frozen=True, slots=True)
class PressureAction:
    """What is due, and why."""

    name: Verb
    resource: str
    reading: float
    threshold: float


class Pressure:
    """The level of each resource. Owned by Residency."""

    def __init__(self, now: float) -> None:
        self._ladders = {resource: _Ladder(resource, rungs) for resource, rungs in RUNGS.items()}
        self._calm_since = now

    @property
    def level(self) -> Level:
        return max(ladder.level for ladder in self._ladders.values())

    @property
    def admits(self) -> bool:
        """Whether something new may start."""
        return self.level < Level.HOLD

    def calm_seconds(self, now: float) -> float:
        """How long all has been calm; 0 while it isn't."""
        if self.level == Level.CALM:
            return now - self._calm_since
        return 0.0

    def urgent_bytes(self, limit: float, floor: float = 0.0) -> float:
        """Active bytes from which on no period is waited for."""
        return self._ladders[BYTES].urgent(PressureReading(BYTES, 0.0, limit, floor=floor))

    def surplus(self, reading: PressureReading) -> float:
        """How much of what kept prefixes hold must go for the level to fall; 0 where letting go of all can't do it."""
        return self._ladders[reading.resource].surplus(reading)

    def judge(
        self, readings: Iterable[PressureReading], now: float, *, reclaimed: bool = False
    ) -> list[PressureAction]:
        """Acts that are due. `reclaimed`: the readings were taken straight after a reclaim; then none is asked for."""
        ladders = [(self._ladders[reading.resource], reading) for reading in readings]
        acts = [ladder.act(reading) if reclaimed else ladder.ask(reading, now) for ladder, reading in ladders]
        if self.level != Level.CALM:
            self._calm_since = now
        due = [act for act in acts if act]
        return due if reclaimed else due[:1]  # one reclaim serves all


class _Ladder:
    """One resource's level."""

    def __init__(self, resource: str, rungs: Rungs) -> None:
        self.level = Level.CALM
        self._resource = resource
        self._rungs = rungs
        self._asked = -math.inf  # when a reclaim was last asked for
        self._reason = 0.0  # the reading that asked for it, until it's done
        self._harmless = 0.0  # up to such a reading a reclaim has left enough
        self._above = 0  # readings in a row above the last rung, each after a reclaim

    def ask(self, reading: PressureReading, now: float) -> PressureAction | None:
        """Falls at once. A rise, and a level that lasts, asks for a reclaim."""
        wanted = self._rungs.level(reading.ratio(), self.level)
        is_last = reading.value >= self.urgent(reading)
        if self._resource == BYTES and not is_last:
            wanted = min(wanted, Level.HOLD)
        wait = self._wait(reading, is_last=is_last, is_rise=wanted > self.level)
        self.level = max(min(wanted, self.level), min(wanted, Level.RECLAIM))
        if wanted == Level.CALM or now - self._asked < wait:
            return None
        self._asked = now
        self._reason = reading.value
        return self._due(Verb.RECLAIM, reading, wanted)

    def urgent(self, reading: PressureReading) -> float:
        """From such a reading on nothing may wait."""
        return max(reading.at(self._rungs.rotate), min(self._harmless, reading.limit))

    def surplus(self, reading: PressureReading) -> float:
        """Down to where the lowest level within reach is left for good, so that it isn't asked for again soon."""
        wanted = self._rungs.level(reading.ratio(), self.level)
        for level in Level:
            if level == wanted:
                break
            if self._rungs.level(reading.ratio(freed=reading.idle), self.level) <= level:
                above = self._rungs.at(Level(level + 1)) - HYSTERESIS
                return min(reading.idle, reading.value - reading.at(above) + 1)
        if reading.value >= self.urgent(reading):
            return reading.idle
        return 0.0

    def _wait(self, reading: PressureReading, *, is_last: bool, is_rise: bool) -> float:
        """Seconds since the last reclaim before the next. Above the last rung it's a race with the end: bytes are
        given back at once, and a count that rises is read again at once."""
        if is_last and (self._resource == BYTES or (reading.rising and self.level < Level.ROTATE)):
            return 0.0
        if is_last or is_rise:
            return RETRY_SECONDS
        return RECLAIM_SECONDS

    def act(self, reading: PressureReading) -> PressureAction | None:
        """What is left to do after a reclaim."""
        before = self.level
        ratio = reading.ratio()
        reason = self._reason
        self._reason = 0.0
        if ratio >= self._rungs.rotate:
            self._above = self._above + 1
        else:
            self._above = 0
        self.level = self._rungs.level(ratio, before)
        if self._resource == BYTES:
            if self._above:
                self._harmless = 0.0
            else:
                self._harmless = reading.floor + NOISE * (reason - reading.floor)
            if self._above:
                return self._due(Verb.PREEMPT, reading, Level.ROTATE)
        elif self.level == Level.ROTATE > before:
            if self._above >= ROTATE_READINGS and reading.rising:
                return self._due(Verb.ROTATE, reading, Level.ROTATE)
            self.level = Level.HOLD
        if self.level >= Level.HOLD > before:
            return self._due(Verb.HOLD, reading, Level.HOLD)
        return None

    def _due(self, name: Verb, reading: PressureReading, level: Level) -> PressureAction:
        return PressureAction(name, self._resource, reading.value, reading.at(self._rungs.at(level)))


# ---------------------------------------------------------------- the slope
MIN_POINTS = 5
RISE = 7.0  # standard deviations by which a rise stands out; readings that only step up once reach 6


@dataclass(frozen=True, slots=True)
class Fit:
    """A least-squares slope and the half-width of its 95 % interval. With a slope of `outstanding` the rise over the
    window stands out from the scatter of its readings."""

    slope: float
    half_width: float
    outstanding: float = 0.0

    @property
    def rising(self) -> bool:
        """Beyond doubt. The interval alone would say so too often: work in flight makes neighbouring readings alike."""
        return self.slope > max(self.half_width, self.outstanding)

    def exhaustion(self, room: float) -> float:
        """Tokens until the room is used up; infinite while it isn't certain that there is a rise."""
        if self.rising:
            return max(0.0, room) / self.slope
        return math.inf


class Slope:
    """How a quantity grows with tokens, over a window of readings.

    Readings closer than `spacing` to the last one kept are passed over, so that the window is long in tokens and
    short in points.
    """

    def __init__(self, points: int = 240, spacing: float = 64) -> None:
        self._points: deque[tuple[float, float, float]] = deque(maxlen=points)
        self._spacing = spacing
        self.fit: Fit | None = None  # none while there are too few points for a line

    def add(self, tokens: float, value: float, now: float) -> None:
        if not self._points or tokens - self._points[-1][0] >= self._spacing:
            self._points.append((tokens, value, now))
            if len(self._points) >= MIN_POINTS:
                self.fit = self._solve()
            else:
                self.fit = None

    def _solve(self) -> Fit | None:
        count = len(self._points)
        mean_x = math.fsum(x for x, _, _ in self._points) / count
        mean_y = math.fsum(y for _, y, _ in self._points) / count
        spread = math.fsum((x - mean_x) ** 2 for x, _, _ in self._points)
        if not spread:  # all at one and the same place
            return None
        slope = math.fsum((x - mean_x) * (y - mean_y) for x, y, _ in self._points) / spread
        rest = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y, _ in self._points)
        scatter = math.sqrt(rest / (count - 2))
        outstanding = RISE * scatter / (self._points[-1][0] - self._points[0][0])
        return Fit(slope, student(count - 2) * scatter / math.sqrt(spread), outstanding)

    def tokens_per_second(self) -> float:
        """Pace over the window, idle time included; 0 while unknown."""
        if len(self._points) < 2:
            return 0.0
        (first, _, began), (last, _, ended) = self._points[0], self._points[-1]
        if ended > began:
            return (last - first) / (ended - began)
        return 0.0


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion around the normal one; within 1 % from 3 on."""
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
