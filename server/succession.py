"""One engine after the other: start, feed, watch, end, start again.

Owns the living engine and decides when it ends and when the next one begins. Event-loop thread only. The generations
are the roster's: it's told when there is an engine to feed and when that is lost. Requests, HTTP and shutdown are the
supervisor's.

Planned or not, the end of an engine is always the same: what it still said is heard, its generations are taken back,
what is left of its process is killed and reaped, and only then the next one starts and goes on with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from server import link as seam
from server import messages
from server.admission import Capacity
from server.delivery import Counts
from server.errors import GenerationFailed, NotReady
from server.link import Engine, Link
from server.live import Cause, Generation
from server.probation import MAX_DEATHS, MAX_STRIKES
from server.roster import Roster
from server.settings import Settings
from server.watch import GOOD_LIFE, HASTY_ROTATIONS, Backoff, RotationPace, StallLimit

FAILED_STARTS = 3  # in a row, until requests are told that there is no engine
DRAIN_SECONDS = 10.0  # for an engine to leave in good order before the next one starts
LEAVE_SECONDS = 2.0  # and when the server itself ends: nobody needs its memory back in order
BURY_SECONDS = 20.0  # for a killed one to give its memory back
HASTY_DEATH_SECONDS = 2.0  # longest pause after an engine that had been ready
_KEPT_ACTIONS = 100
_PRIVATE = {"api_key", "api_key_file"}

Ending = Literal["stall", "rotation", "start", "stop"]  # why we end it ourselves

log = logging.getLogger("marathon")


class Succession:
    """The engines of one server. Attributes are for reading; `down` says in words why there is none to be had."""

    def __init__(
        self,
        settings: Settings,
        model_path: str,
        counts: Counts,
        roster: Roster,
        spawn: Callable[[int], Engine],
        on_load_failed: Callable[[str], None],
    ) -> None:
        self.ready: messages.Ready | None = None
        self.known: messages.Ready | None = None
        self.snapshot: messages.Snapshot | None = None
        self.link: Link | None = None
        self.ending: Ending | None = None
        self.epoch = self.restarts = self.failed_starts = 0
        self.stepped = 0.0  # when a token came last
        self.stage = ""  # of the newest engine, in its own words
        self.down = "the engine is starting"
        self.load_failed: str | None = None
        self.decided = asyncio.Event()  # an engine was ready, or it's known that there can be none for now
        self.backoff = Backoff()
        self.actions: deque[messages.Action] = deque(maxlen=_KEPT_ACTIONS)
        self.on_engine_gone: list[Callable[[messages.Snapshot], None]] = []
        self._settings = settings
        self._model_path = model_path
        self._counts = counts
        self._roster = roster
        self._clock = roster.clock
        self._spawn = spawn
        self._on_load_failed = on_load_failed
        self._stall = StallLimit(settings.stall_seconds)
        self._pace = RotationPace(settings.rotate_min_seconds)
        self._overdue: asyncio.TimerHandle | None = None
        self._stopped = asyncio.Event()
        self._failure = ""  # what the engine itself said about a failed start
        self._began = self._ready_at = self._moved = 0.0
        self._count = -1
        self._served = False  # it delivered something

    # ---------------------------------------------------------------- one life after the other
    async def run(self) -> None:
        """Until `end`."""
        while not self._stopped.is_set() and self.load_failed is None:
            pause = HASTY_DEATH_SECONDS
            try:
                pause = await self._one_life()
            except Exception:  # a fault of ours must not leave a server without an engine and without a word
                log.exception("supervising the engine failed; the next one starts in %.3g s", pause)
            if pause:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), pause)

    def end(self) -> None:
        """No further engine; the living one leaves now. `run` returns when nothing is left of it."""
        self._stopped.set()
        if self.link is not None and self.ending != "stop":
            self._leave(self.link, "stop")

    async def _one_life(self) -> float:
        """From spawn until nothing of the process is left. Returns the seconds to wait before the next."""
        self.epoch += 1
        self._began, self._count, self._served, self._failure, self.ending = self._clock(), -1, False, "", None
        try:
            engine = self._spawn(self.epoch)
        except OSError as error:
            return self._start_failed(f"no process can be started: {error}")
        self.link = link = Link(engine, self.epoch, self._on_event)
        try:
            probe = self.known.probe if self.known else None  # the model is the same; what it costs is known
            settings = self._settings.model_dump_json(exclude=_PRIVATE)
            link.send(messages.Start(self.epoch, self._model_path, settings, probe))
            await link.lost
        finally:
            was_ready = self._take_down()
            status = await link.bury(BURY_SECONDS)
        return self._account(link, was_ready, seam.describe_exit(status))

    def _take_down(self) -> bool:
        """It's lost, and all that it said has been heard. True if it had been ready."""
        was_ready, self.ready, self.link = self.ready is not None, None, None
        if self._overdue is not None:
            self._overdue.cancel()
        cause: Cause = self.ending if self.ending == "stall" or self.ending == "rotation" else "crash"
        if self.ending != "stop":
            self.restarts += 1
            self._counts.engine_restarted(cause)
            self.down = "the engine is being replaced" if cause == "rotation" else "the engine was lost and starts anew"
        for generation in self._roster.take_back(cause, planned=self.ending in ("rotation", "stop")):
            self._convict(generation)
        if self.snapshot is not None:
            last, self.snapshot = self.snapshot, None
            for callback in self.on_engine_gone:
                callback(last)
        return was_ready

    def _convict(self, generation: Generation) -> None:
        strikes, deaths = generation.past.strikes, generation.past.deaths
        reading, threshold = (strikes, MAX_STRIKES) if strikes >= MAX_STRIKES else (deaths, MAX_DEATHS)
        log.warning("sequence %d has cost %d engines (limit %d) and is ended", generation.seq, reading, threshold)
        self._act("quarantine", reading, threshold)
        message = f"The engine was lost {deaths} times while it worked on this request; it isn't tried again."
        self._roster.fail(generation.live, GenerationFailed(message))

    def _account(self, link: Link, was_ready: bool, end: str) -> float:
        """What its end means for the next start: seconds to wait."""
        if link.garbage is not None:
            end = f"sent what is no message ({link.garbage}) and {end}"
        if self.load_failed is not None:  # that is said in one line, by whoever ends the server
            return 0
        if self.ending == "stop":
            log.info("engine %d %s", link.pid, end)
            return 0
        if not was_ready:
            late = f"it wasn't ready after {self._settings.start_seconds:g} s"
            return self._start_failed(self._failure or (late if self.ending == "start" else f"it {end}"))
        log.warning(
            "engine %d (epoch %d) %s; %d sequences wait for the next", link.pid, link.epoch, end, self._roster.waiting
        )
        if self._served or self.ending == "rotation" or self._clock() - self._ready_at > GOOD_LIFE:
            self.backoff.good()
        else:
            self.backoff.bad()
        return min(self.backoff.seconds(), HASTY_DEATH_SECONDS)

    def _start_failed(self, why: str) -> float:
        self.failed_starts += 1
        self.backoff.bad()
        pause = self.backoff.seconds()
        self.down = f"the engine couldn't be started, {self.failed_starts} times in a row: {why}"
        log.error("%s; the next try is in %.3g s", self.down, pause)
        if self.hopeless:
            self.decided.set()
            self._roster.fail_all(self.not_ready())
        return pause

    @property
    def hopeless(self) -> bool:
        """So many starts have failed that nobody should wait for the next."""
        return self.failed_starts >= FAILED_STARTS

    def not_ready(self) -> NotReady:
        """The refusal while there is no engine."""
        wait = max(1, round(self.backoff.seconds())) if self.failed_starts else 5
        return NotReady(f"No engine is ready: {self.down}.", retry_after=wait)

    # ---------------------------------------------------------------- what it says
    def _on_event(self, event: messages.Event) -> None:
        match event:
            case messages.Steps():
                self._moved, self._served = self._clock(), True
                if event.tokens:
                    self.stepped = self._moved
                self._roster.steps(event)
            case messages.Progress():
                self._progressed(event)
            case messages.Failed():
                self._roster.failed(event)
            case messages.Preempted():
                self._roster.preempted(event.seq)
            case messages.Rotate():
                self._rotate(event)
            case messages.Ready():
                self._is_ready(event)
            case messages.LoadFailed():
                self._could_not_load(event.message)

    def _is_ready(self, ready: messages.Ready) -> None:
        assert self.link is not None
        self.ready = self.known = ready
        self.failed_starts = 0
        self._ready_at = self._moved = self._clock()
        self.decided.set()
        log.info("engine %d (epoch %d) is ready after %.1f s", self.link.pid, self.epoch, self._ready_at - self._began)
        if self.ending is None:
            self._roster.feed(self.link, Capacity(ready, self._settings.context, self._settings.max_rows))

    def _could_not_load(self, message: str) -> None:
        assert self.link is not None
        self._failure = message
        self.link.kill()
        if self.known is None:  # no engine ever did: it's the model or the settings, and no other try will help
            self.load_failed = self.down = message
            self.decided.set()
            self._roster.fail_all(self.not_ready())
            self._on_load_failed(message)

    def _progressed(self, progress: messages.Progress) -> None:
        self.stage = progress.stage
        if progress.count != self._count:
            self._count, self._moved = progress.count, max(self._moved, self._clock() - progress.still)
        if progress.snapshot is not None:
            self.snapshot = progress.snapshot
            self._roster.observe(progress.snapshot)

    # ---------------------------------------------------------------- ending it ourselves
    def _rotate(self, wish: messages.Rotate) -> None:
        if self.ending is not None or self.link is None:
            return
        age = self._clock() - self._ready_at
        log.warning(
            "engine %d %s after %.0f s: %s at %.6g, threshold %.6g",
            self.link.pid, "ends" if wish.late else "is replaced", age, wish.reason, wish.reading, wish.threshold,
        )  # fmt: skip
        if not wish.late:  # else it's a death, which it only foretells
            self._act("rotate", wish.reading, wish.threshold)
            self._leave(self.link, "rotation")
        if wish.is_leak and self._pace.rotated(age, late=wish.late):
            message = (
                f"A leak: {wish.reason} at {wish.reading:.6g}, threshold {wish.threshold:.6g}, {age:.0f} s after a new "
                f"engine was ready, {HASTY_ROTATIONS} times in a row; replacing it more often than each "
                f"{self._pace.minimum:g} s (--rotate-min-seconds) doesn't help."
            )
            log.error("%s", message)
            self._roster.fail_running(GenerationFailed(message))

    def _leave(self, link: Link, ending: Ending) -> None:
        """Asks it to go, and sees to it that it does."""
        self.ending = ending
        self._roster.hold()
        if self._overdue is not None:
            self._overdue.cancel()
        if self.ready is None:  # still loading: it couldn't listen
            link.kill()
            return
        link.send(messages.Drain(link.epoch))
        seconds = LEAVE_SECONDS if self.ending == "stop" else DRAIN_SECONDS
        self._overdue = asyncio.get_running_loop().call_later(seconds, link.kill)

    async def watch(self) -> None:
        """Ends engines that are stuck; for ever."""
        tick = min(0.2, self._settings.stall_seconds / 4, self._settings.start_seconds / 4)
        while True:
            await asyncio.sleep(tick)
            if self.link is not None and self.ending is None:
                self._check(self.link)

    def _check(self, link: Link) -> None:
        now = self._clock()
        if self.ready is None:
            if now - self._began > self._settings.start_seconds:
                self._kill(link, "start", now - self._began, self._settings.start_seconds)
        elif not self._roster.running:
            self._moved = now  # it owes us nothing
        elif now - self._moved > (limit := self._stall.seconds(self.snapshot)):
            link.drain()  # if it was us who didn't listen, its news is here
            if link is self.link and now - self._moved > limit:
                self._kill(link, "stall", now - self._moved, limit)
        else:
            self._stall.worked(self._moved - self._ready_at, self.snapshot)

    def _kill(self, link: Link, ending: Ending, age: float, limit: float) -> None:
        log.warning("engine %d hasn't moved for %.1f s (%s limit %.1f s) and is killed", link.pid, age, ending, limit)
        self.ending = ending
        self._roster.hold()
        self._act("kill_stalled", age, limit)
        if ending == "stall" and self._stall.killed():
            log.warning("engines were stuck twice in a row or more: the next stall limit is doubled")
        link.kill()

    def _act(self, action: str, reading: float, threshold: float) -> None:
        self._counts.action(action)
        self.actions.append(messages.Action(time.time(), action, reading, threshold))
