"""The server's side of inference: takes sequences, keeps them going whatever happens to the engine, gives ids back.

Owns the request's way in (refusals before any work) and the server's way out (drain). Event-loop thread only. Engines
are `succession`'s, live generations `scheduler`'s. It knows no text and no HTTP, and evaluates no array.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from server.errors import Draining, StartupError
from server.ipc import messages
from server.ipc.sequence import TokenSequence, TokenTable
from server.ipc.snapshot import Action, Snapshot
from server.settings import Settings
from server.supervision import engine_process
from server.supervision.admission import Capacity
from server.supervision.engine_lifecycle import EngineLifecycle
from server.supervision.generation import Generation, GenerationHandle
from server.supervision.outputs import OutputCounts
from server.supervision.scheduler import Scheduler
from server.supervision.timeouts import Backoff

__all__ = ["GenerationHandle", "OutputCounts", "Supervisor"]


class Supervisor:
    """Generations that outlive their engine.

    Args:
        counts: is told what happens (server/metrics.py).
        spawn: starts the engine of an epoch; raises OSError when there is no process to be had.
        clock: monotonic seconds; deadlines are times of it.
        on_load_failed: called with one sentence when the first engine can't load its model. No further one is tried.
        backoff: how long to wait after engines that were no good.
    """

    def __init__(
        self,
        settings: Settings,
        model_path: str | Path,
        counts: OutputCounts,
        *,
        spawn: Callable[[int], engine_process.Engine] = engine_process.spawn,
        clock: Callable[[], float] = time.monotonic,
        on_load_failed: Callable[[str], None] = lambda message: None,
        backoff: Backoff | None = None,
    ) -> None:
        self.draining = False
        self.clock = clock
        self._settings = settings
        self._scheduler = Scheduler(counts, clock, settings.queue_limit)
        self._engines = EngineLifecycle(
            settings, str(model_path), counts, self._scheduler, spawn, on_load_failed, backoff or Backoff()
        )
        self._stop_at = math.inf
        self._run: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- requests
    def open(
        self, sequences: Sequence[TokenSequence], *, endpoint: str, deadline: float | None = None
    ) -> GenerationHandle:
        """A new request; enter the result at once. `deadline` is a time of `clock`.

        Raises before any work: Draining, NotReady, ContextLengthError, ExceedsMemory, FatalPrompt, QueueFull.
        """
        if self.draining:
            raise self._draining()
        if (known := self._engines.known) is None or self._engines.hopeless:
            raise self._engines.not_ready()
        capacity = Capacity(known, self._settings.context, self._settings.max_rows)
        for sequence in sequences:
            capacity.check(sequence)
            self._engines.convictions.check(sequence.prompt)
        if deadline is None and (seconds := self._settings.request_timeout_seconds) is not None:
            deadline = self.clock() + seconds
        return self._scheduler.enter(sequences, endpoint, deadline)

    def _draining(self) -> Draining:
        return Draining("The server is shutting down.", retry_after=max(1, math.ceil(self._settings.drain_seconds)))

    # ---------------------------------------------------------------- start and stop
    async def start(self) -> None:
        """Returns at once; the engine loads in the background. A second call does nothing."""
        if self._run is not None:
            return
        self._run = asyncio.create_task(self._engines.run())
        self._watch = asyncio.create_task(self._engines.watch())

    def learn(self, tokens: TokenTable) -> None:
        """Tells the engines what the tokens say; until then no grammar can be followed."""
        self._engines.learn(tokens)

    async def wait_known(self) -> messages.Ready:
        """What the first engine says about its model.

        Raises StartupError when the model can't be loaded, NotReady when no engine can be started (more are tried).
        """
        await self._engines.decided.wait()
        if self._engines.load_failed is not None:
            raise StartupError(self._engines.load_failed)
        if self._engines.known is None:
            raise self._draining() if self.draining else self._engines.not_ready()
        return self._engines.known

    async def stop(self, deadline: float) -> None:
        """Nothing new from now on; what was taken goes on until `deadline` (a time of `clock`), what is left then ends
        with an error. On return nothing is left of any engine. A second call may bring the deadline forward.
        """
        self.draining = True
        self._engines.decided.set()  # whoever waits for a first engine waits no longer
        self._stop_at = min(self._stop_at, deadline)
        while self._scheduler.lives and self.clock() < self._stop_at:
            await asyncio.sleep(0.02)
        self._scheduler.hold()
        self._scheduler.fail_all(self._draining())
        self._engines.end()
        if self._run is not None and self._watch is not None:
            await asyncio.wait([self._run])
            self._watch.cancel()
            await asyncio.wait([self._watch])

    # ---------------------------------------------------------------- state, for /ready, /health, /metrics and /debug
    @property
    def is_ready(self) -> bool:
        """New work would start now."""
        return self.is_up and self._engines.ending is None and not self.draining

    @property
    def is_up(self) -> bool:
        """An engine has its model loaded and gives its signs of life."""
        return self._engines.is_up

    @property
    def down_reason(self) -> str | None:
        """Why it wouldn't."""
        if self.is_ready:
            return None
        if self.draining:
            return "the server is shutting down"
        return self._engines.down_reason

    @property
    def ready(self) -> messages.Ready | None:
        """Of the living engine."""
        return self._engines.ready

    @property
    def known(self) -> messages.Ready | None:
        """The newest of any engine."""
        return self._engines.known

    @property
    def stage(self) -> str:
        """What the newest engine is at, in its own words; empty before it has said anything."""
        return self._engines.stage

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest of the living engine."""
        return self._engines.snapshot

    @property
    def on_engine_gone(self) -> list[Callable[[Snapshot], None]]:
        """Called with the last snapshot of each engine that ended."""
        return self._engines.on_engine_gone

    @property
    def actions(self) -> deque[Action]:
        """The newest automatic acts of this side of the seam."""
        return self._engines.actions

    @property
    def epoch(self) -> int:
        return self._engines.epoch

    @property
    def pid(self) -> int | None:
        if self._engines.link:
            return self._engines.link.pid
        return None

    @property
    def restarts(self) -> int:
        """Engines lost so far, planned or not."""
        return self._engines.restarts

    @property
    def last_step_age_seconds(self) -> float | None:
        """Seconds since an engine last got something done: a step, or a chunk of a prompt. None before the first."""
        age = self.clock() - self._engines.worked
        if math.isfinite(age):
            return age
        return None

    @property
    def last_step_time(self) -> float | None:
        """The same as a time, in seconds since 1970."""
        age = self.last_step_age_seconds
        if age is None:
            return None
        return time.time() - age

    @property
    def running(self) -> int:
        """Sequences in the engine."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for room or for an engine."""
        return self._scheduler.waiting

    @property
    def hopeless(self) -> bool:
        """So many starts have failed that new requests are refused."""
        return self._engines.hopeless

    def generations(self) -> Iterator[Generation]:
        """Yield the generations that haven't ended, the oldest request first."""
        return self._scheduler.generations()

    @property
    def queue_limit(self) -> int:
        return self._settings.queue_limit

    @property
    def batch_limit(self) -> int:
        return self._settings.max_rows
