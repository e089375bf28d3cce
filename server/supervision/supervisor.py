"""The server's side of inference: takes sequences, keeps them going whatever happens to the engine, gives ids back.

Owns the request's way in (refusals before any work) and the server's way out (drain). Event-loop thread only. Engines
are `engine_lifecycle`'s, live generations `scheduler`'s. It knows no text and no HTTP, and evaluates no array.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from server.errors import Draining, StartupError
from server.ipc import messages
from server.ipc.sequence import TokenSequence, TokenTable
from server.settings import Settings
from server.supervision import engine_process
from server.supervision.admission import Capacity
from server.supervision.engine_lifecycle import EngineLifecycle
from server.supervision.generation import Generation, GenerationHandle, TokenLog
from server.supervision.outputs import OutputCounts
from server.supervision.scheduler import Scheduler
from server.supervision.timeouts import Backoff
from server.telemetry.engine_status import EngineStatus

__all__ = ["GenerationHandle", "OutputCounts", "Supervisor", "TokenLog"]


class Supervisor:
    """Generations that outlive their engine.

    Attributes:
        on_engine_gone: called with the last snapshot of each engine that ended.
        queue_limit: sequences that may wait.
        batch_limit: sequences that may run together.

    Args:
        counts: the metrics that count what happens (server/metrics.py).
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
        self.on_engine_gone = self._engines.on_engine_gone
        self.queue_limit = settings.queue_limit
        self.batch_limit = settings.max_rows
        self._stop_at = math.inf
        self._run: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- requests
    def open(
        self,
        sequences: Sequence[TokenSequence],
        *,
        endpoint: str,
        deadline: float | None = None,
        log: TokenLog | None = None,
        generated: Sequence[Sequence[int]] | None = None,
        background: bool = False,
    ) -> GenerationHandle:
        """A new request; enter the result at once.

        Args:
            deadline: a time of `clock`.
            log: saves the ids; they are read only afterwards.
            generated: ids of each sequence from an earlier life of the server: it goes on after them.
            background: a drain doesn't wait for it, as it goes on at the next start; it has no time limit.

        Raises before any work: Draining, NotReady, ContextLengthError, ExceedsMemory, FatalPrompt, QueueFull.
        """
        if self.draining:
            raise self._draining()
        if (known := self._engines.known) is None or self._engines.hopeless:
            raise self._engines.not_ready()
        capacity = Capacity(known, self._settings.context, self._settings.max_rows)
        for sequence in sequences:
            capacity.check(sequence)
            self._engines.quarantine.check(sequence.prompt)
        if deadline is None and not background and (seconds := self._settings.request_timeout_seconds) is not None:
            deadline = self.clock() + seconds
        return self._scheduler.enter(sequences, endpoint, deadline, log=log, generated=generated, background=background)

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
        """Give the engines the table of tokens; until then no grammar can be followed."""
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
        with an error. What goes on at the next start isn't waited for. On return nothing is left of any engine. A
        second call may bring the deadline forward.
        """
        self.draining = True
        self._engines.decided.set()  # those that wait for a first engine wait no longer
        self._stop_at = min(self._stop_at, deadline)
        while any(not live.background for live in self._scheduler.lives) and self.clock() < self._stop_at:
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
    def engine(self) -> EngineStatus:
        """The state of the engines now."""
        return self._engines.status()

    @property
    def is_ready(self) -> bool:
        """New work would start now."""
        return self._engines.is_up and self._engines.ending is None and not self.draining

    @property
    def down_reason(self) -> str | None:
        """Why new work wouldn't start; None while it would."""
        if self.is_ready:
            return None
        if self.draining:
            return "the server is shutting down"
        return self._engines.down_reason

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
