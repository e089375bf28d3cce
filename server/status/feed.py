"""Reports of a server's state, one a second, for any number of readers.

Owns the history of the last minutes, the list of events, and the frames that readers get. Runs on the server's event
loop. Each second costs one reading and one encoding, however many read; a reader that falls behind skips frames and
gets the newest.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from itertools import count

import msgspec

from server.ipc.snapshot import Action
from server.metrics import Metrics
from server.status import state, verdict
from server.status.state import Status
from server.status.verdict import Deaths, Verdict
from server.supervision.supervisor import Supervisor
from server.telemetry.repetition import Repetition

TICK_SECONDS = 1.0
HISTORY_POINTS = 900
MOST_EVENTS = 200
DEATH_WINDOW_SECONDS = 600.0
FIRST_TOKEN_TICKS = 60  # over which the time to the first token is averaged
PLANNED = "rotation"
ENDINGS = {"crash": "died", "stall": "was stuck and was replaced", "rotation": "was replaced as planned"}
RESUME_WORDS = {
    "preemption": "went on once there was memory again",
    "restart": "went on after a restart of the server",
}

_encode = msgspec.json.Encoder().encode


class StatusEvent(msgspec.Struct, frozen=True):
    """One event of the page's list. `kind`: death, rotation, resume, ready or guard; `number` rises by 1."""

    number: int
    time: float
    kind: str
    text: str


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A second of the charts."""

    time: float
    tokens_per_second: float
    live_buffers: int | None
    pending: int | None
    active_bytes: int | None
    cache_bytes: int | None
    running: int
    waiting: int


class Report(msgspec.Struct, frozen=True):
    """The body of /status, and the data of each `report` event of /status/events."""

    verdict: Verdict
    status: Status
    events: list[StatusEvent]


class Feed:
    """The reports of one server. `run` makes one a second; `report` and `frames` read them."""

    def __init__(self, supervisor: Supervisor, metrics: Metrics, model: str) -> None:
        self.points: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self.events: deque[StatusEvent] = deque(maxlen=MOST_EVENTS)
        self._supervisor = supervisor
        self._metrics = metrics
        self._model = model
        self._began = time.monotonic()
        self._numbers = count(1)
        self._deaths: deque[float] = deque()
        self._restarts: Mapping[str, int] = dict(metrics.restarts)
        self._resumes: Mapping[str, int] = dict(metrics.resumes)
        self._acted = time.time()
        self._ready_epoch = 0
        self._first_tokens: deque[tuple[int, float]] = deque([metrics.first_tokens], maxlen=FIRST_TOKEN_TICKS)
        self._frame = b""
        self._tick = asyncio.Event()

    async def run(self) -> None:
        """Make a report each second, until cancelled."""
        advance = Repetition("making a report", self.advance)
        while True:
            advance()
            await asyncio.sleep(TICK_SECONDS)

    def advance(self) -> None:
        """Add a point for the second that has passed, note its events, and wake the readers."""
        self._first_tokens.append(self._metrics.first_tokens)
        self._note_events()
        report = self.report()
        self._add_point(_point(report.status))
        self._frame = frame("report", report)
        tick = self._tick
        self._tick = asyncio.Event()
        tick.set()

    def _add_point(self, point: Point) -> None:
        """Append a point, and keep the points in the order of their times when the clock was set back."""
        while self.points and self.points[-1].time >= point.time:
            self.points.pop()
        self.points.append(point)

    def report(self) -> Report:
        """Read the state of this moment."""
        status = state.read(
            self._supervisor, self._metrics, self._model, time.monotonic() - self._began, self._first_token()
        )
        return Report(verdict.judge(status, self._recent_deaths()), status, list(self.events))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the history, then a frame each second until the server is drained."""
        yield frame("history", list(self.points))
        while not self._is_over:
            tick = self._tick
            if self._frame:
                yield self._frame
            await tick.wait()

    @property
    def _is_over(self) -> bool:
        """Return whether the server ends and has nothing left to do: an open page must not delay it."""
        return self._supervisor.draining and not any(self._supervisor.generations())

    # ---------------------------------------------------------------- what happened since the last second
    def _note_events(self) -> None:
        self._note_endings()
        self._note_start()
        self._note_resumes()
        self._note_actions()

    def _note(self, kind: str, text: str) -> None:
        self.events.append(StatusEvent(next(self._numbers), time.time(), kind, text))

    def _note_endings(self) -> None:
        restarts = self._metrics.restarts
        for cause, number in _rises(self._restarts, restarts):
            kind = "rotation" if cause == PLANNED else "death"
            self._note(kind, f"{_some(number, 'engine')} {ENDINGS[cause]}")
            if kind == "death":
                self._deaths.extend([time.monotonic()] * number)
        self._restarts = dict(restarts)

    def _note_start(self) -> None:
        engine = self._supervisor.engine
        if engine.is_up and engine.epoch != self._ready_epoch:  # one may come and go between two seconds
            self._note("ready", f"engine {engine.epoch} is ready")
            self._ready_epoch = engine.epoch

    def _note_resumes(self) -> None:
        resumes = self._metrics.resumes
        for cause, number in _rises(self._resumes, resumes):
            words = RESUME_WORDS.get(cause, "went on where it was")
            self._note("resume", f"{_some(number, 'answer')} {words}")
        self._resumes = dict(resumes)

    def _note_actions(self) -> None:
        """Report the acts of the engine's guards; the server's own appear as the ends of engines."""
        snapshot = self._supervisor.engine.snapshot
        new = [action for action in snapshot.actions if action.time > self._acted] if snapshot else []
        for action in new:
            self._note("guard", _words(action))
        if new:
            self._acted = max(action.time for action in new)

    def _recent_deaths(self) -> Deaths:
        now = time.monotonic()
        while self._deaths and self._deaths[0] < now - DEATH_WINDOW_SECONDS:
            self._deaths.popleft()
        return Deaths(len(self._deaths), now - self._deaths[-1]) if self._deaths else Deaths()

    def _first_token(self) -> float | None:
        """Return the average seconds to the first token of the last minute's requests; None without any."""
        number, seconds = self._first_tokens[0]
        newest, total = self._first_tokens[-1]
        return (total - seconds) / (newest - number) if newest > number else None


def frame(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(data))


def _point(status: Status) -> Point:
    return Point(
        time=status.time,
        tokens_per_second=status.tokens_per_second,
        live_buffers=status.buffers.count,
        pending=status.buffers.pending,
        active_bytes=status.memory.active,
        cache_bytes=status.memory.caches,
        running=status.queue.running,
        waiting=status.queue.waiting,
    )


def _rises(before: Mapping[str, int], now: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(name, number - before.get(name, 0)) for name, number in now.items() if number > before.get(name, 0)]


def _some(number: int, noun: str) -> str:
    return f"an {noun}" if number == 1 else f"{number} {noun}s"


def _words(action: Action) -> str:
    return f"{action.action.replace('_', ' ')}: {action.reading:.6g}, threshold {action.threshold:.6g}"
