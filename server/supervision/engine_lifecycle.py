"""One engine after the other: start, feed, watch, end, start again.

Owns the living engine and decides when it ends and when the next one begins. Event-loop thread only. The generations
are the scheduler's: it learns when there is an engine to feed and when that is lost. Requests, HTTP and shutdown are
the supervisor's.

Planned or not, the end of an engine is always the same: what it still said is heard, its generations are taken back,
what is left of its process is killed and reaped, and only then the next one starts and goes on with them. While none
can be started, new requests are refused and answers under way are kept, for as long as `outage_seconds` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from server.errors import FatalPrompt, GenerationError, NotReady
from server.ipc import messages
from server.ipc.sequence import TokenTable
from server.ipc.snapshot import Action, Snapshot
from server.settings import Settings
from server.supervision.admission import Capacity
from server.supervision.engine_process import Engine, EngineConnection
from server.supervision.exit_status import describe_exit
from server.supervision.generation import Cause, Generation
from server.supervision.liveness import Liveness, Overdue
from server.supervision.outputs import OutputCounts
from server.supervision.prefill_log import PrefillLog
from server.supervision.probation import MAX_BLAMED
from server.supervision.quarantine import Quarantine
from server.supervision.scheduler import Scheduler
from server.supervision.spare_engine import SpareEngine
from server.supervision.timeouts import GOOD_LIFE, HASTY_ROTATIONS, Backoff, RotationPace, StallLimit
from server.telemetry.engine_status import EngineStatus
from server.telemetry.repetition import Repetition

FAILED_STARTS = 3  # in a row, until new requests are refused
AWAITED_SECONDS = 5.0  # longest pause after a failed start while answers wait for the next
DRAIN_SECONDS = 10.0  # for an engine to leave in good order before the next one starts
LEAVE_SECONDS = 2.0  # and when the server itself ends: no engine needs its memory back in order
BURY_SECONDS = 20.0  # for a killed one to give its memory back
HASTY_DEATH_SECONDS = 2.0  # longest pause after an engine that had been ready
SETTLED_SECONDS = 5.0  # after an engine was ready: then a spare one may be prepared beside it,
UNSETTLED_SECONDS = 60.0  # and then also while prompts are read
WATCH_SECONDS = 0.2  # between two looks at the engine
PAUSE_SECONDS = 0.5  # a look that comes later by so much shows that the server itself stood still
LONG_PAUSE_SECONDS = 2.0  # of those, the ones that an operator should know of
_KEPT_ACTIONS = 100

Ending = Literal["stall", "rotation", "start", "stop"]  # why we end it ourselves

log = logging.getLogger("marathon")


class EngineLifecycle:
    """The engines of one server. Attributes are for reading; `down` says in words why there is none to be had."""

    def __init__(
        self,
        settings: Settings,
        model_path: str,
        counts: OutputCounts,
        scheduler: Scheduler,
        spawn: Callable[[int], Engine],
        on_load_failed: Callable[[str], None],
        backoff: Backoff,
    ) -> None:
        self.ready: messages.Ready | None = None
        self.known: messages.Ready | None = None
        self.snapshot: Snapshot | None = None
        self.connection: EngineConnection | None = None
        self.ending: Ending | None = None
        self.worked = -math.inf  # when an engine got something done last: a step, or a chunk of a prompt
        self.epoch = self.restarts = self.failed_starts = 0
        self.stage = ""  # of the newest engine, in its own words
        self.weights: messages.WeightsRead | None = None  # of the same, while it reads them
        self.down = "the engine is starting"
        self.load_failed: str | None = None
        self.decided = asyncio.Event()  # an engine was ready, or it's known that there can be none for now
        self.backoff = backoff
        self.actions: deque[Action] = deque(maxlen=_KEPT_ACTIONS)
        self.on_engine_gone: list[Callable[[Snapshot], None]] = []
        self._settings = settings
        self._model_path = model_path
        self._counts = counts
        self._scheduler = scheduler
        self._clock = scheduler.clock
        self.quarantine = Quarantine(scheduler.clock)
        self._spawn = spawn
        self._spare = SpareEngine(lambda: spawn(messages.NO_EPOCH), model_path, scheduler.clock)
        self._on_load_failed = on_load_failed
        self._tokens: TokenTable | None = None
        self._stall = StallLimit(settings.stall_seconds)
        self._rotation_pace = RotationPace(settings.rotate_min_seconds)
        self._prefill_log = PrefillLog(scheduler.clock)
        self._latest: asyncio.TimerHandle | None = None  # when one that was asked to leave is killed
        self._stopped = asyncio.Event()
        self._failure = ""  # what the engine itself said about a failed start
        self._life = Liveness(settings, self._stall, self._clock())
        self._served = False  # it delivered a token
        self._still = 0.0  # seconds of this outage in which the server itself stood still
        self._looks = (
            Repetition("looking at what waits", self._look_at_waits),
            Repetition("looking at the engine", self._look_at_engine),
            Repetition("looking at the spare engine", self._look_at_spare),
        )

    # ---------------------------------------------------------------- one life after the other
    async def run(self) -> None:
        """Until `end`."""
        while not self._stopped.is_set() and self.load_failed is None:
            pause = HASTY_DEATH_SECONDS
            try:
                pause = await self._one_life()
            except (
                Exception
            ):  # a fault of the server's own must not leave a server without an engine and without a word
                log.exception("supervising the engine failed; the next one starts in %.3g s", pause)
            if pause:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), pause)
        await self._spare.end()

    def end(self) -> None:
        """No further engine; the living one leaves now. `run` returns when nothing is left of it."""
        self._stopped.set()
        if self.connection is not None and self.ending != "stop":
            self._leave(self.connection, "stop")

    async def _one_life(self) -> float:
        """From spawn until nothing of the process is left. Returns the seconds to wait before the next."""
        spare = await self._spare.take()
        self.epoch += 1
        self._life = Liveness(self._settings, self._stall, self._clock())
        self._life.was_spare = spare is not None
        self._served = False
        self._failure = self.stage = ""
        self.weights = None
        self.ending = None
        try:
            engine = spare or self._spawn(self.epoch)
        except OSError as error:
            return self._start_failed(f"no process can be started: {error}")
        self.connection = connection = EngineConnection(engine, self.epoch, self._on_event)
        try:
            connection.send(self._start())
            if self._tokens is not None:
                connection.send(messages.Learn(self.epoch, self._tokens))
            if self._stopped.is_set():  # meanwhile
                self._leave(connection, "stop")
            await connection.lost
        finally:
            try:
                was_ready = self._take_down()
            finally:  # never a second engine beside what is left of this one
                status = await connection.bury(BURY_SECONDS)
        return self._account(connection, was_ready, describe_exit(status))

    def _start(self) -> messages.Start:
        """What the next engine is to load: after a first one the same model, whose costs are known."""
        settings = self._settings.for_a_process()
        start = messages.Start(self.epoch, self._model_path, settings)
        if self.known is not None:
            start = msgspec.structs.replace(start, probe=self.known.probe, files=self.known.files or None)
        return start

    def learn(self, tokens: TokenTable) -> None:
        """Give this engine and all later ones the table of tokens."""
        self._tokens = tokens
        if self.connection is not None:
            self.connection.send(messages.Learn(self.epoch, tokens))

    def _take_down(self) -> bool:
        """It's lost, and all that it said has been heard. True if it had been ready."""
        was_ready = self.ready is not None
        self.ready = None
        self.connection = None
        if self._served:
            self._still = 0.0
        if self._latest is not None:
            self._latest.cancel()
        cause: Cause = "crash"
        if self.ending == "stall" or self.ending == "rotation":
            cause = self.ending
        if self.ending != "stop":
            self.restarts += 1
            self._counts.engine_restarted(cause)
            if cause == "rotation":
                self.down = "the engine is being replaced"
            else:
                self.down = "the engine was lost and starts anew"
        for generation in self._scheduler.take_back(cause, planned=self.ending in ("rotation", "stop")):
            self._end_in_quarantine(generation)
        if self.snapshot is not None:
            last = self.snapshot
            self.snapshot = None
            for callback in self.on_engine_gone:
                callback(last)
        return was_ready

    def _end_in_quarantine(self, generation: Generation) -> None:
        past = generation.past
        log.warning(
            "sequence %d has cost %d engines without a token (limit %d) and is ended",
            generation.seq, past.barren, MAX_BLAMED,
        )  # fmt: skip
        self._act("quarantine", past.barren, MAX_BLAMED)
        message = f"The engine was lost {past.deaths} times while it worked on this request; it isn't tried again."
        self.quarantine.add(generation.sequence.prompt)
        self._scheduler.fail(generation.live, FatalPrompt(message))

    def _account(self, connection: EngineConnection, was_ready: bool, end: str) -> float:
        """What its end means for the next start: seconds to wait."""
        if connection.garbage is not None:
            end = f"sent what is no message ({connection.garbage}) and {end}"
        if self.load_failed is not None:  # that is said in one line, by the code that ends the server
            return 0
        if self.ending == "stop":
            log.info("engine %d %s", connection.pid, end)
            return 0
        if not was_ready:
            return self._start_failed(self._failure or f"it {end}")
        log.warning(
            "engine %d (epoch %d) %s; waiting for the next: %d",
            connection.pid,
            connection.epoch,
            end,
            self._scheduler.waiting,
        )
        if self._served or self.ending == "rotation" or self._age() > GOOD_LIFE:
            self.backoff.good()
        else:
            self.backoff.bad()
        return min(self.backoff.seconds(), HASTY_DEATH_SECONDS)

    def _start_failed(self, why: str) -> float:
        self.failed_starts += 1
        self.backoff.bad()
        pause = min(self.backoff.seconds(), AWAITED_SECONDS if self._scheduler.waiting else math.inf)
        times = ""
        if self.failed_starts != 1:
            times = f", {self.failed_starts} times in a row"
        self.down = f"the engine couldn't be started{times}: {why}"
        log.error("%s; the next try is in %.3g s; waiting for it: %d", self.down, pause, self._scheduler.waiting)
        if self.hopeless:
            self.decided.set()
            self._scheduler.fail_unbegun(self.not_ready())
        return pause

    def status(self) -> EngineStatus:
        """The state of the engines at this moment."""
        age = self._clock() - self.worked
        return EngineStatus(
            ready=self.ready,
            known=self.known,
            snapshot=self.snapshot,
            stage=self.stage,
            weights=self.weights,
            paces=self._prefill_log.paces(),
            epoch=self.epoch,
            pid=self.connection.pid if self.connection else None,
            restarts=self.restarts,
            is_up=self.is_up,
            last_step_age_seconds=age if math.isfinite(self.worked) else None,
            spare=self._spare.is_ready,
            actions=tuple(self.actions),
        )

    @property
    def is_up(self) -> bool:
        """An engine has its model loaded and gives its signs of life."""
        return self.ready is not None and not self._life.silent

    @property
    def down_reason(self) -> str:
        """Why none is up."""
        if self.ready is not None and self._life.silent:
            return "the engine gives no sign of life"
        return self.down

    @property
    def hopeless(self) -> bool:
        """So many starts have failed that no new request should wait for the next."""
        return self.failed_starts >= FAILED_STARTS

    def not_ready(self) -> NotReady:
        """The refusal while there is no engine."""
        wait = 5
        if self.failed_starts:
            wait = max(1, round(self.backoff.seconds()))
        return NotReady(f"No engine is ready: {self.down}.", retry_after=wait)

    # ---------------------------------------------------------------- what it says
    def _on_event(self, event: messages.Event) -> None:
        self._life.hear(self._clock())
        match event:
            case messages.Steps():
                self.worked = self._life.heard
                self._life.move(self.worked)
                if event.tokens:
                    self._served = True
                self._scheduler.steps(event)
            case messages.RowIntake():
                self._scheduler.taken(event.seq)
            case messages.Progress():
                self._progressed(event)
            case messages.RowFailure():
                self._scheduler.failed(event)
            case messages.Preemption():
                self._scheduler.preempted(event.seq)
            case messages.Rotate():
                self._rotate(event)
            case messages.Ready():
                self._is_ready(event)
            case messages.LoadFailure():
                self._could_not_load(event.message)

    def _is_ready(self, ready: messages.Ready) -> None:
        assert self.connection is not None
        self.ready = self.known = ready
        self.failed_starts = 0
        self._life.is_ready(self._clock())
        self.decided.set()
        log.info(
            "engine %d (epoch %d) is ready after %.1f s", self.connection.pid, self.epoch, self._life.loading_seconds
        )
        if self.ending is None:
            capacity = Capacity(ready, self._settings.context, self._settings.max_rows)
            self._scheduler.feed(self.connection, capacity, self._life.loading_at)

    def _could_not_load(self, message: str) -> None:
        assert self.connection is not None
        self._failure = message
        self.connection.kill()
        if self.known is None:  # no engine ever did: it's the model or the settings, and no other try will help
            self.load_failed = self.down = message
            self.decided.set()
            self._scheduler.fail_all(self.not_ready())
            self._on_load_failed(message)

    def _progressed(self, progress: messages.Progress) -> None:
        self.stage = progress.stage
        self.weights = progress.weights
        if self._life.progressed(progress, self._clock()) and self._scheduler.running:
            self.worked = self._life.moved
        if progress.snapshot is not None:
            self.snapshot = progress.snapshot
            self._prefill_log.observe(progress.snapshot.prompts)
            self._scheduler.observe(progress.snapshot)

    # ---------------------------------------------------------------- ending it ourselves
    def _rotate(self, request: messages.Rotate) -> None:
        if self.ending is not None or self.connection is None:
            return
        age = self._age()
        log.warning(
            "engine %d %s after %.0f s: %s at %.6g, threshold %.6g",
            self.connection.pid, "ends" if request.late else "is replaced", age,
            request.reason, request.reading, request.threshold,
        )  # fmt: skip
        if not request.late:  # else it's a death, which it only announces
            self._act("rotate", request.reading, request.threshold)
            self._leave(self.connection, "rotation")
        if request.is_leak and self._rotation_pace.rotated(age, late=request.late):
            message = (
                f"A leak: {request.reason} at {request.reading:.6g}, threshold {request.threshold:.6g}, {age:.0f} s "
                f"after a new engine was ready, {HASTY_ROTATIONS} times in a row; replacing it more often than each "
                f"{self._rotation_pace.minimum:g} s (--rotate-min-seconds) doesn't help."
            )
            log.error("%s", message)
            self._scheduler.fail_running(GenerationError(message))

    def _leave(self, connection: EngineConnection, ending: Ending) -> None:
        """Asks it to go, and sees to it that it does."""
        self.ending = ending
        self._scheduler.hold()
        if self._latest is not None:
            self._latest.cancel()
        if self.ready is None:  # still loading: it couldn't listen
            connection.kill()
            return
        connection.send(messages.Drain(connection.epoch))
        seconds = DRAIN_SECONDS
        if self.ending == "stop":
            seconds = LEAVE_SECONDS
        self._latest = asyncio.get_running_loop().call_later(seconds, connection.kill)

    def _age(self) -> float:
        """Seconds since it was ready."""
        if self._life.ready_at is None:
            return 0.0
        return self._clock() - self._life.ready_at

    # ---------------------------------------------------------------- watching it
    async def watch(self) -> None:
        """Ends engines that are stuck, and waits that have become too long; for ever."""
        tick = min(WATCH_SECONDS, self._settings.stall_seconds / 4, self._settings.start_seconds / 4)
        last = self._clock()
        while True:
            await asyncio.sleep(tick)
            now = self._clock()
            if (late := now - last - tick) > PAUSE_SECONDS:
                if late > LONG_PAUSE_SECONDS:
                    level = logging.WARNING
                else:
                    level = logging.DEBUG
                log.log(level, "the server stood still for %.1f s; the engine isn't blamed for that time", late)
                self._life.excuse(late)
                self._still += late
            self.look()
            last = self._clock()

    def look(self) -> None:
        """Acts on what is overdue by now. A fault in one of its parts keeps none of the others from being done."""
        for part in self._looks:
            part()

    def _look_at_waits(self) -> None:
        if self.connection is None or self.ready is None:
            self._give_up()

    def _look_at_engine(self) -> None:
        if self.connection is not None and self.ending is None:
            self._check(self.connection)

    def _look_at_spare(self) -> None:
        self._spare.look(is_wanted=self._wants_spare())

    def _wants_spare(self) -> bool:
        """An engine serves, has settled, and reads no prompt, which the imports would hold up."""
        if not self._settings.spare_engine or self.ready is None or self.ending is not None:
            return False
        reads = self._scheduler.waiting or (self.snapshot is not None and self.snapshot.prefilling)
        return self._age() > SETTLED_SECONDS and not (reads and self._age() < UNSETTLED_SECONDS)

    def _give_up(self) -> None:
        """No engine for so long that the answers under way shouldn't wait for the next. While the server itself stood
        still, none could be started."""
        before = self._clock() - self._settings.outage_seconds - self._still
        if self._scheduler.waiting and self.worked <= before:
            self._scheduler.fail_lost(before, self.not_ready())

    def _check(self, connection: EngineConnection) -> None:
        if self.ready is not None and not self._scheduler.running:
            self._life.rest(self._clock())
        if self._overdue() or self._life.is_mute(self._clock()):
            connection.drain()  # if it was us who didn't listen, its news is here
        if connection is not self.connection or self.ending is not None:
            return
        if self._life.is_mute(self._clock()) and not self._life.silent:
            self._life.silent = True
            log.warning("engine %d hasn't been heard of for %.1f s", connection.pid, self._life.silence(self._clock()))
        if (overdue := self._overdue()) is not None:
            self._kill(connection, overdue)
        elif self.ready is not None and self._scheduler.running:
            self._stall.worked(self._life.work_seconds, self.snapshot)

    def _overdue(self) -> Overdue | None:
        return self._life.overdue(self._clock(), self.snapshot, self._scheduler.busy_since)

    def _kill(self, connection: EngineConnection, overdue: Overdue) -> None:
        log.warning("engine %d %s and is killed", connection.pid, overdue.words)
        self.ending = "stall"
        if self.ready is None:
            self.ending = "start"
            self._failure = f"it {overdue.words}"
        self._scheduler.hold()
        self._act("kill_stalled", overdue.age, overdue.limit)
        if overdue.what == "stall" and self._stall.killed():
            log.warning("engines were stuck twice in a row or more: the next stall limit is doubled")
        connection.kill()

    def _act(self, action: str, reading: float, threshold: float) -> None:
        self._counts.action(action)
        self.actions.append(Action(time.time(), action, reading, threshold))
