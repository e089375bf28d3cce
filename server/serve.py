"""From the listening socket to the last closed one.

Owns the order of start and end of the server process, and what signals mean: the first one begins a drain with the
listener still open, the second ends the drain at once. Runs on the event loop of the main thread; signals arrive
there too. Never touches a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

import server
from server.api.middleware.security import read_keys
from server.config import child_place, open_files
from server.errors import Draining, NotReady, StartupError
from server.ipc.messages import Ready
from server.model_files.locate import at_hand
from server.serving.entrance import Entrance
from server.serving.http_connection import Protocol
from server.serving.listening import listen
from server.serving.notify import ServiceManager
from server.serving.startup import Startup, StartupInterrupt
from server.settings import Settings, http_address
from server.supervision.supervisor import Supervisor
from server.telemetry import logs
from server.telemetry.progress_bar import ProgressBar, is_terminal

KEEP_ALIVE_SECONDS = 75  # longer than clients keep a connection, so that none is closed under a request
LOOK_SECONDS = 0.2  # between two looks for a first engine, once some have failed to start
CLOSE_SECONDS = 3  # for the last bytes of requests and answers, once nothing generates any more
UNFINISHED = "ended before the model was loaded"

log = logging.getLogger("marathon")


# ---------------------------------------------------------------- HTTP
def config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


# ---------------------------------------------------------------- start and end
class Server(uvicorn.Server):
    """uvicorn's server with a drain before its end and an engine behind its start.

    Attributes:
        failure: why there can be no engine; the process should say so and exit with 2.
    """

    def __init__(
        self,
        app: ASGIApp,
        supervisor: Supervisor | None,
        settings: Settings,
        announce: Callable[[Ready], None],
        manager: ServiceManager | None = None,
    ) -> None:
        """Without a `supervisor` yet, `app` is an Entrance that makes it."""
        super().__init__(config(app))
        self.failure: StartupError | None = None
        self._entrance = app if isinstance(app, Entrance) else None
        self._supervisor = supervisor
        self._settings = settings
        self._announce = announce
        self._manager = manager or ServiceManager({})
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def serve_on(self, sockets: list[socket.socket]) -> None:
        """Serve on open sockets and leave the process's signal handlers alone, unlike uvicorn's `serve`."""
        await self._serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._tasks.append(asyncio.ensure_future(self._open()))
        self._tasks.append(asyncio.ensure_future(self._manager.watch()))

    async def _open(self) -> None:
        """Until a first engine is ready, or it is known that there can be none."""
        try:
            if self._entrance is not None:
                self._supervisor = await self._entrance.open()
            assert self._supervisor is not None
            gc.collect()
            gc.freeze()  # modules stay: a full collection would look through them for 40 ms while streams wait
            self._announce(await self._first_engine(self._supervisor))
            self._manager.ready()
        except StartupError as error:
            self.failure = error
            self.should_exit = True
        except (Draining, StartupInterrupt):
            log.info("%s", UNFINISHED)
        except Exception as error:  # a fault of the program must not leave a server that waits for ever
            log.exception("the start failed")
            self.failure = StartupError(f"the start failed: {type(error).__name__}: {error}")
            self.should_exit = True

    @staticmethod
    async def _first_engine(supervisor: Supervisor) -> Ready:
        """However many starts fail before it: /ready and every request say so meanwhile, and more are tried."""
        try:
            return await supervisor.wait_known()
        except NotReady as error:
            log.error("%s", error)
        while (known := supervisor.engine.known) is None:
            await asyncio.sleep(LOOK_SECONDS)
        return known

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal. uvicorn would raise it again at the end; a drained server has ended well."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._manager.stopping()
        if self._supervisor is None:
            assert self._entrance is not None
            self._entrance.give_up()
            self.should_exit = True
            return
        seconds = 0.0
        if not self._supervisor.draining:
            seconds = self._settings.drain_seconds
        log.info("draining for at most %g s%s", seconds, "; a second signal ends at once" if seconds else "")
        self._tasks.append(asyncio.ensure_future(self._end(self._supervisor, seconds)))

    async def _end(self, supervisor: Supervisor, seconds: float) -> None:
        await supervisor.stop(supervisor.clock() + seconds)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._entrance is not None:
            await self._entrance.leave()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def serve(settings: Settings) -> None:
    """Serves until a signal or until it is clear that it can't. Raises StartupError."""
    logs.configure(settings.log_level, settings.log_format)
    with logs.StrayLines() if settings.log_format == "json" else contextlib.nullcontext():
        _serve(settings)


def _bar(form: str) -> ProgressBar | None:
    """A bar below the log's lines, where these are text in a terminal."""
    if form == "text" and is_terminal(sys.stderr):
        return ProgressBar(sys.stderr)
    return None


def _serve(settings: Settings) -> None:
    open_files.raise_limit()
    child_place.make_import_path_whole()
    child_place.name_temporary_folder()
    read_keys(settings)  # a bad file is said before anything is fetched; the application reads it again
    # Fetching a model may take minutes and importing its tokenizer seconds: neither before the port is taken.
    sockets = listen(settings.host, settings.port)
    if settings.model is not None:
        at_hand(settings.model)  # so that a mistyped name is one line and no more
    address = http_address(settings.host, sockets[0].getsockname()[1]) + "/v1"
    with Startup(bar=_bar(settings.log_format)) as startup:

        def announce(ready: Ready) -> None:
            startup.finish()
            stages = "".join(f"; {seconds:.1f} s {stage}" for stage, seconds in startup.seconds.items())
            log.info("Marathon serves %s at %s (ready in %.1f s%s)", entrance.name, address, startup.total, stages)

        model = settings.model or "the starter model"
        startup.say(f"Marathon {server.__version__} loads {model}; {address} takes requests, which wait for it")
        entrance = Entrance(settings, startup)
        running = Server(entrance, None, settings, announce, ServiceManager())
        running.run(sockets=sockets)
    if running.failure is not None:
        raise running.failure
    if entrance.is_busy:
        log.info("%s", UNFINISHED)
        logging.shutdown()
        os._exit(0)  # Python's own end would abort: it takes away under an import what the C++ of a module stands on
