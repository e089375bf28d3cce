"""From the open port to the application.

Owns what answers while the model is looked for, fetched and read: probes, and people who look at the live page, get how
far it is; every other request waits. Makes the application meanwhile, in a thread of its own, and starts the engine as
soon as it is known where the model lies, since both take seconds to import. Runs on the event loop. Once the
application is made it only passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import server
from server.api.middleware import anthropic_errors
from server.api.middleware.security import Names
from server.errors import Draining, NotReady, RequestError
from server.metrics import CONTENT_TYPE, Metrics
from server.model_files.progress import amount
from server.serving.startup import Startup, StartupInterrupt
from server.settings import Settings
from server.supervision.supervisor import Supervisor

PROBES = frozenset({"/live", "/ready", "/health", "/metrics", "/status", "/status/events", "/"})
RETRY_SECONDS = 2
LOOK_SECONDS = 0.1  # between two looks at the engine's stage
# A refusal would be a server that is down, to Prometheus, whose alert waits a minute; a fetch may take longer.
NO_ENGINE = "# TYPE marathon_engine_up gauge\nmarathon_engine_up 0\n"
WAITING = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="2"><link rel="icon" href="data:,">
<title>Starting – Marathon</title><h1>Marathon starts</h1><p>{}</p>
<p>This page asks again every 2 seconds, and then becomes the live page.</p></html>
"""
WAITING_HEADERS = {
    "content-security-policy": "default-src 'none'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_LEAVE_SECONDS = 3.0  # for the thread to clear its work away

if TYPE_CHECKING:
    from fastapi import FastAPI  # takes half a second to import, while nothing answers

log = logging.getLogger("marathon")


class Entrance:
    """The application, before it is made and after. Owned by the server's start."""

    def __init__(self, settings: Settings, startup: Startup) -> None:
        self._settings = settings
        self._startup = startup
        self._names = Names(self, settings)
        self.name = ""  # of the model, once it is found
        self._app: ASGIApp | None = None
        self._fault: RequestError | None = None  # why there will be none
        self._decided = asyncio.Event()
        self._life = contextlib.AsyncExitStack()
        self._thread: threading.Thread | None = None
        self._following: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- requests
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if self._app is None and scope["path"] in PROBES:
            fault = self._names.fault(scope)
            await (_refusal(fault, scope) if fault else self._while_loading(scope))(scope, receive, send)
            return
        await self._decided.wait()
        if self._app is not None:
            await self._app(scope, receive, send)
        elif self._fault is not None:
            await _refusal(self._fault, scope)(scope, receive, send)

    def _while_loading(self, scope: Scope) -> Response:
        if scope["path"] == "/live":
            return JSONResponse({"status": "live"})
        reason = f"The model isn't loaded yet: {self._startup.reason}"
        if scope["path"] == "/metrics":
            return Response(NO_ENGINE, media_type=CONTENT_TYPE)
        if scope["path"] == "/":
            return HTMLResponse(WAITING.format(html.escape(reason)), headers=WAITING_HEADERS)
        if scope["path"] == "/health":
            return JSONResponse({"status": "not ready", "reason": reason, "version": server.__version__})
        return _refusal(NotReady(reason, retry_after=RETRY_SECONDS), scope)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._life.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    # ---------------------------------------------------------------- the application
    async def open(self) -> Supervisor:
        """Makes the application. Raises StartupError when there can be none, Ended after `give_up`."""
        loop = asyncio.get_running_loop()
        made: Future[tuple[FastAPI, Supervisor]] = Future()
        made.set_running_or_notify_cancel()

        def make() -> None:
            try:
                made.set_result(self._make(loop))
            except BaseException as error:
                made.set_exception(error)

        self._thread = threading.Thread(target=make, name="entrance", daemon=True)
        self._thread.start()
        try:
            app, supervisor = await asyncio.wrap_future(made)
            if self._fault is not None:
                raise StartupInterrupt
            await self._life.enter_async_context(app.router.lifespan_context(app))
        except Exception as error:
            self._refuse(NotReady(str(error)))
            raise
        self._app = app
        self._decided.set()
        return supervisor

    def _make(self, loop: asyncio.AbstractEventLoop) -> tuple[FastAPI, Supervisor]:
        """In the thread."""
        from server.model_files.locate import locate

        self._startup.begin("looking for the model")
        model = locate(self._settings, self._startup.say)
        metrics = Metrics(CollectorRegistry())
        supervisor = Supervisor(self._settings, model.path, metrics)
        self.name = model.name
        self._startup.begin(f"starting the engine for {model.name}")
        asyncio.run_coroutine_threadsafe(self._start(supervisor), loop).result()
        from server.api.openapi import encoded
        from server.app import assemble, create_app

        app = create_app(assemble(self._settings, model, metrics, supervisor))
        encoded(app)
        return app, supervisor

    async def _start(self, supervisor: Supervisor) -> None:
        await supervisor.start()
        self._following = asyncio.create_task(self._follow(supervisor))
        self._life.push_async_callback(self._stop, supervisor)

    async def _stop(self, supervisor: Supervisor) -> None:
        if self._following is not None:
            self._following.cancel()
        await supervisor.stop(supervisor.clock())

    async def _follow(self, supervisor: Supervisor) -> None:
        """The engine's stages are the start's, until it is ready."""
        read = None
        with contextlib.suppress(StartupInterrupt):
            while (engine := supervisor.engine).known is None:
                if engine.stage:
                    self._startup.begin(engine.stage)
                if engine.weights is not None and engine.weights != read:
                    read = engine.weights
                    self._startup.say(f"{engine.stage}: {amount(read.done, read.total)}", read.done / read.total)
                await asyncio.sleep(LOOK_SECONDS)

    def give_up(self) -> None:
        """The server is to end before the application is made."""
        self._startup.give_up()
        self._refuse(Draining("The server is shutting down."))

    async def leave(self) -> None:
        """The thread has cleared its work away, or a few seconds are over."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _LEAVE_SECONDS)

    @property
    def is_busy(self) -> bool:
        """The thread still works, which nothing can end: it may be anywhere in an import."""
        return self._thread is not None and self._thread.is_alive()

    def _refuse(self, fault: RequestError) -> None:
        if self._app is None:
            self._fault = fault
            self._decided.set()


def _refusal(error: RequestError, scope: Scope) -> Response:
    if anthropic_errors.speaks(scope["path"]):
        return JSONResponse(anthropic_errors.body(error), anthropic_errors.status(error), error.headers())
    return JSONResponse(error.body(), error.status, error.headers())
