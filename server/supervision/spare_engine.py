"""A spare engine: a process that has imported all that an engine runs, has loaded nothing, and waits for its turn.

Owns that process from its start until it becomes the next engine or ends. Event-loop thread of the server only. It is
no engine yet: it has no epoch and isn't counted, and if it dies, hangs or can't be had, all that follows is that the
next engine starts from nothing. Never decides when an engine is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from server.ipc import messages
from server.supervision.engine_process import Engine, EngineConnection
from server.supervision.exit_status import describe_exit
from server.supervision.timeouts import Backoff

PREPARE_SECONDS = 300.0  # for imports that give way to everything else on the machine
ANSWER_SECONDS = 2.0  # for a spare to say that it is still there, before it is relied upon
BURY_SECONDS = 5.0

log = logging.getLogger("marathon")


class SpareEngine:
    """At most one spare process.

    Args:
        spawn: starts the process; raises OSError when there is none to be had.
        model_path: folder of the model whose code is imported.
        clock: monotonic seconds.
    """

    def __init__(self, spawn: Callable[[], Engine], model_path: str, clock: Callable[[], float]) -> None:
        self.is_ready = False  # it has imported everything
        self._spawn = spawn
        self._prepare = messages.Prepare(model_path)
        self._clock = clock
        self._backoff = Backoff(first=1.0, longest=600.0)
        self._connection: EngineConnection | None = None
        self._answered = asyncio.Event()
        self._began = self._not_before = 0.0
        self._burials: set[asyncio.Task[None]] = set()

    def look(self, *, is_wanted: bool) -> None:
        """Start one if it's wanted and there is none; end one that can't get ready."""
        connection = self._connection
        if connection is None:
            if is_wanted and self._clock() >= self._not_before:
                self._begin()
        elif connection.lost.done():
            self._give_up("ended")
        elif not self.is_ready and self._clock() > self._began + PREPARE_SECONDS:
            self._give_up(f"wasn't ready after {PREPARE_SECONDS:.0f} s")

    def _begin(self) -> None:
        try:
            process = self._spawn()
        except OSError as error:
            self._wait_longer()
            log.debug("no spare engine can be started: %s", error)
            return
        self._began = self._clock()
        self._connection = EngineConnection(process, messages.NO_EPOCH, self._hear)
        self._connection.send(self._prepare)

    def _hear(self, event: messages.Event) -> None:
        if isinstance(event, messages.Preparation):
            self.is_ready = True
            self._answered.set()

    def _wait_longer(self) -> None:
        self._backoff.bad()
        self._not_before = self._clock() + self._backoff.seconds()

    def _give_up(self, why: str) -> None:
        assert self._connection is not None
        self._wait_longer()
        log.info(
            "the spare engine %d %s; the next one comes in %.3g s", self._connection.pid, why, self._backoff.seconds()
        )
        self._bury(self._connection)

    async def take(self) -> Engine | None:
        """The process, if there is one that is ready and answers; it's the caller's from now on.

        One that isn't is killed: it would compete with the engine that is started in its place.
        """
        connection = self._connection
        if connection is None:
            return None
        if self.is_ready and await self._answers(connection):
            self._forget()
            self._backoff.good()
            return connection.release()
        if connection is self._connection:
            self._bury(connection)
        return None

    async def _answers(self, connection: EngineConnection) -> bool:
        self._answered.clear()
        connection.send(self._prepare)
        answer = asyncio.ensure_future(self._answered.wait())
        either: list[asyncio.Future[Any]] = [answer, connection.lost]
        await asyncio.wait(either, timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        answer.cancel()
        return self._answered.is_set() and not connection.lost.done()

    async def end(self) -> None:
        """On return no spare process is left."""
        if self._connection is not None:
            self._bury(self._connection)
        await asyncio.gather(*self._burials)

    def _forget(self) -> None:
        self._connection = None
        self.is_ready = False

    def _bury(self, connection: EngineConnection) -> None:
        self._forget()
        burial = asyncio.ensure_future(self._buried(connection))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    @staticmethod
    async def _buried(connection: EngineConnection) -> None:
        status = await connection.bury(BURY_SECONDS)
        log.debug("the spare engine %d %s", connection.pid, describe_exit(status))
