"""From the listening socket to the last closed one.

Owns the order of start and end of the server process, and what signals mean: the first one begins a drain with the
listener still open, the second ends the drain at once. Runs on the event loop of the main thread; signals arrive
there too. Never touches a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib.util
import json
import logging
import re
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server import logs
from server.api.access import ABORT
from server.api.security import read_keys
from server.errors import Draining, InvalidValue, NotReady, StartupError
from server.messages import Ready
from server.settings import Settings
from server.supervisor import Supervisor

KEEP_ALIVE_SECONDS = 75  # longer than clients keep a connection, so that none is closed under a request
CLOSE_SECONDS = 3  # for the last bytes of requests and answers, once nothing generates any more

log = logging.getLogger("marathon")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet. Raises StartupError that names the port."""
    with contextlib.ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            sock = undo.enter_context(socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError as error:
            raise _cannot_listen(error, host, port) from None
        undo.pop_all()
        return sock


def _cannot_listen(error: OSError, host: str, port: int) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is already in use; choose another with --port")
    return StartupError(f"can't listen on port {port} of {host}: {error.strerror or error}")


# ---------------------------------------------------------------- HTTP
class WithoutChunks(RequestResponseCycle):
    """An answer to an HTTP/1.0 client, which knows no chunks: its body ends with the connection.

    uvicorn 0.54 sends chunks to everybody; this may go once it doesn't.
    """

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


_HEAD = re.compile(rb"[A-Z]+ [^\r\n]+ HTTP/1\.1\r\n")
_UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    """A request that would rather speak another protocol, as one that wouldn't: Java's client asks for HTTP/2 with each
    request in the clear, and uvicorn 0.54 drops the body of whatever asks. This may go once it doesn't."""
    if not _HEAD.match(data):
        return data
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"X-Upgrade", head) + end + body


class Protocol(HttpToolsProtocol):
    """uvicorn's, with HTTP/1.0 done right, no upgrades, faults as JSON and a way to cut a connection."""

    def data_received(self, data: bytes) -> None:
        super().data_received(without_upgrade(data))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.__class__ = WithoutChunks
        cast("dict[str, Any]", cycle.scope)[ABORT] = self.transport.abort
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(InvalidValue(msg).body()).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


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
        self, app: ASGIApp, supervisor: Supervisor, settings: Settings, announce: Callable[[Ready], None]
    ) -> None:
        super().__init__(config(app))
        self.failure: StartupError | None = None
        self._supervisor = supervisor
        self._settings = settings
        self._announce = announce
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._tasks.append(asyncio.ensure_future(self._await_engine()))

    async def _await_engine(self) -> None:
        gc.collect()
        gc.freeze()  # modules stay: a full collection would look through them for 40 ms while streams wait
        try:
            self._announce(await self._supervisor.wait_known())
        except StartupError as error:
            self.failure, self.should_exit = error, True
        except Draining:
            log.info("ended before the model was loaded")
        except NotReady as error:  # more are tried; /ready says so, and so does every request
            log.error("%s", error)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal. uvicorn would raise it again at the end; a drained server has ended well."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        seconds = 0.0 if self._supervisor.draining else self._settings.drain_seconds
        log.info("draining for at most %g s%s", seconds, "; a second signal ends at once" if seconds else "")
        self._tasks.append(asyncio.ensure_future(self._end(seconds)))

    async def _end(self, seconds: float) -> None:
        await self._supervisor.stop(self._supervisor.clock() + seconds)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def serve(settings: Settings) -> None:
    """Serves until a signal or until it is clear that it can't. Raises StartupError."""
    began = time.monotonic()
    logs.configure(settings)
    read_keys(settings)  # create_app reads them again; a bad file is said before anything is fetched
    sock = bind(settings.host, settings.port)
    # Fetching a model may take minutes and importing its tokenizer seconds: neither before the port is ours.
    from server.app import create_app, serving

    served = serving(settings)
    address = f"http://{_shown(settings.host)}:{sock.getsockname()[1]}/v1"

    def announce(ready: Ready) -> None:
        seconds = time.monotonic() - began
        print(f"Marathon serves {served.name} at {address} (ready in {seconds:.1f} s)", flush=True)

    server = Server(create_app(served), served.supervisor, settings, announce)
    try:
        server.run(sockets=[sock])
    except OSError as error:  # somebody else began to listen meanwhile
        raise _cannot_listen(error, settings.host, settings.port) from None
    if server.failure is not None:
        raise server.failure


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
