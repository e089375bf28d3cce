"""How far long prompts are, in the log, and how fast they are read.

Owns the lines about prompts whose reading takes so long that a user may wonder, and the pace of each. Event-loop
thread only, over what the engine says each second. No timers: an engine that says nothing has no progress to report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.ipc.snapshot import PromptProgress

EVERY_SECONDS = 10.0
PACE_SECONDS = 2.0  # of reading that show its pace better than the ten seconds before them

log = logging.getLogger("marathon")


@dataclass(slots=True)
class _Course:
    """One prompt while it is read; times are those at which the engine's news came."""

    done: int
    moved: float  # when `done` became what it is
    written: float  # when the last line was written, or the prompt was seen first
    written_done: int  # what `done` and `moved` were then
    written_moved: float
    rate: float = 0.0  # tokens a second, over the lines that had news

    def move(self, done: int, now: float) -> None:
        if done != self.done:
            self.done = done
            self.moved = now

    def mark_written(self, now: float) -> None:
        if self.moved > self.written_moved:
            self.rate = max(0.0, (self.done - self.written_done) / (self.moved - self.written_moved))
        self.written = now
        self.written_done = self.done
        self.written_moved = self.moved

    def pace(self) -> float | None:
        """Tokens a second, lately. None before there was news a second time."""
        took = self.moved - self.written_moved
        if took > 0 and (took >= PACE_SECONDS or not self.rate):
            return (self.done - self.written_done) / took
        return self.rate or None

    def seconds_left(self, total: int) -> int | None:
        """None while nothing is known of the pace."""
        if not self.rate:
            return None
        return max(0, round((total - self.done) / self.rate - (self.written - self.moved)))


class PrefillLog:
    """A line every ten seconds for each prompt that is being read; mutable, owned by the engine lifecycle."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._courses: dict[int, _Course] = {}

    def observe(self, prompts: Sequence[PromptProgress]) -> None:
        """These are being read now, or wait for it: those of which nothing has been read."""
        now = self._clock()
        begun = [prompt for prompt in prompts if prompt.done]
        self._courses = {p.seq: self._courses.get(p.seq) or _Course(p.done, now, now, p.done, now) for p in begun}
        for prompt in begun:
            course = self._courses[prompt.seq]
            course.move(prompt.done, now)
            if now - course.written >= EVERY_SECONDS:
                course.mark_written(now)
                left = course.seconds_left(prompt.total)
                facts = {"sequence": prompt.seq, "done": prompt.done, "total": prompt.total, "seconds_left": left}
                log.info("a long prompt is being read", extra={"facts": facts})

    def paces(self) -> dict[int, float]:
        """Tokens a second by sequence, of those that are being read and whose pace is known."""
        found = {seq: course.pace() for seq, course in self._courses.items()}
        return {seq: pace for seq, pace in found.items() if pace}
