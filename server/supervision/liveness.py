"""One engine's signs of life, and when they are too old.

Owns the times of one engine: when it was started and ready, when it was heard of last, when it last got anything done.
No clock of its own, no timers, no process; event-loop thread only. What follows from its judgement
is `engine_lifecycle`'s.

Three silences are distinguished. An engine that starts has `start_seconds`. One that works must get something done
within the stall limit. And an engine sends a heartbeat each second, whatever it does; one that was given nothing to do
and sends none has been stopped, and would keep the next request waiting for as long as the stall limit is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.ipc import messages
from server.ipc.snapshot import Snapshot
from server.settings import Settings
from server.supervision.timeouts import StallLimit

SILENT_SECONDS = 2.5 * messages.PROGRESS_SECONDS  # then it isn't called ready any more
IDLE_SECONDS = 5 * messages.PROGRESS_SECONDS  # then one that has nothing to do is replaced,
LOADING_SHARE = 0.25  # unless this share of what it took to load is more: so long the next one takes to be there
FIRST_WORD_SECONDS = 10.0  # for one that had imported everything to say that it loads
LOADING_SECONDS = 30.0  # the least for one that loads: Python's imports may hold its other threads up


@dataclass(frozen=True, slots=True)
class Overdue:
    """What is too old, and how old it might be."""

    what: Literal["start", "stall", "silence"]
    age: float
    limit: float

    @property
    def words(self) -> str:
        if self.what == "start":
            return f"isn't ready after {self.age:.1f} s (start limit {self.limit:.1f} s)"
        if self.what == "silence":
            return f"hasn't been heard of for {self.age:.1f} s (limit {self.limit:.1f} s)"
        return f"hasn't moved for {self.age:.1f} s (stall limit {self.limit:.1f} s)"


class Liveness:
    """Begins with the engine's process. Attributes are for reading."""

    def __init__(self, settings: Settings, stall: StallLimit, now: float) -> None:
        self.began = self.heard = self.moved = now
        self.loading_at = now  # once it has imported everything
        self.ready_at: float | None = None
        self.silent = False  # it was found mute, and hasn't been heard of since
        self.was_spare = False  # it had imported everything before it was started
        self._settings = settings
        self._stall = stall
        self._count = -1

    # ---------------------------------------------------------------- what is seen of it
    def hear(self, now: float) -> None:
        """A message came, of whatever kind."""
        self.heard = now
        self.silent = False

    def is_ready(self, now: float) -> None:
        self.ready_at = self.moved = now

    def move(self, now: float) -> None:
        """It got something done."""
        self.moved = now

    def progressed(self, progress: messages.Progress, now: float) -> bool:
        """Its own count of what it got done. True if that has risen."""
        if progress.stage == messages.LOADING:
            self.loading_at = now
        if progress.count == self._count:
            return False
        self._count = progress.count
        self.moved = max(self.moved, now - progress.still)
        return True

    def rest(self, now: float) -> None:
        """It has nothing to do, and so owes nothing but its signs of life."""
        self.moved = now

    def excuse(self, seconds: float) -> None:
        """For so long the server itself stood still, and maybe the whole machine did."""
        self.began += seconds
        self.heard += seconds
        self.moved += seconds

    # ---------------------------------------------------------------- what to think of it
    @property
    def loading_seconds(self) -> float:
        """From its start until it was ready."""
        return (self.ready_at or self.began) - self.began

    @property
    def work_seconds(self) -> float:
        """From when it was ready until it got something done last."""
        return self.moved - (self.ready_at or self.moved)

    def silence(self, now: float) -> float:
        """Seconds since it was heard of."""
        return now - self.heard

    def is_mute(self, now: float) -> bool:
        """Signs of life are missing."""
        return self.ready_at is not None and self.silence(now) > SILENT_SECONDS

    def overdue(self, now: float, snapshot: Snapshot | None, busy_since: float) -> Overdue | None:
        """What is too old by now, if anything is. The engine has had work since `busy_since`, inf if it has none."""
        if self.ready_at is None:
            return self._late(now)
        limit = max(IDLE_SECONDS, LOADING_SHARE * self.loading_seconds)
        if self.heard <= busy_since and self.silence(now) > limit:
            return Overdue("silence", self.silence(now), limit)
        if now - self.moved > (limit := self._stall.seconds(snapshot)):
            return Overdue("stall", now - self.moved, limit)
        return None

    def _late(self, now: float) -> Overdue | None:
        limit = self._settings.start_seconds
        if now - self.began > limit:
            return Overdue("start", now - self.began, limit)
        limit = max(LOADING_SECONDS, self._settings.stall_seconds)
        if self.was_spare and self.heard == self.began:
            limit = FIRST_WORD_SECONDS
        if self.silence(now) > limit:
            return Overdue("silence", self.silence(now), limit)
        return None
