"""One record a request: its id, its line in the access log, its counters, and how it is refused.

Owns the outermost ASGI middleware. Runs on the event loop. Never looks into a body: what the log should say about a
generation is put into `CallRecord.facts` by the route that knows it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.middleware import anthropic_errors
from server.errors import Draining, InternalError, RequestError
from server.telemetry.logs import plain

access_log = logging.getLogger("marathon.access")
log = logging.getLogger("marathon.api")

KEY = "marathon.record"
# In a request's scope, between its connection and who answers it:
ABORT = "marathon.abort"  # cuts the connection
UNSENT = "marathon.unsent"  # says how many bytes of answers the client's machine hasn't taken
FAULT = "marathon.fault"  # the error that says why the request can't become whole, once it is known
FILLER = "marathon.filler"  # what may stand between two parts of the answer and means nothing; put there by the answer
QUIET = frozenset({"/live", "/ready", "/health", "/metrics"})
MOST_OF_PATH = 200  # characters of it that the log shows
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class AccessCounts(Protocol):
    """What the middleware counts."""

    def rejected(self, endpoint: str, reason: str) -> None: ...
    def http_request(self, route: str | None, method: str, status: int) -> None: ...


@dataclass(slots=True)
class CallRecord:
    """What is known about one request. Owned by the middleware; routes add facts."""

    request_id: str
    started: float
    status: int = 0
    endpoint: str = "other"
    error: RequestError | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def record_of(scope: Scope) -> CallRecord:
    return cast(CallRecord, scope[KEY])


def refusal(scope: Scope, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer with the error's status and body; the error is noted in the record."""
    record = record_of(scope)
    record.error = error
    merged = {**(headers or {}), **error.headers()}
    if anthropic_errors.speaks(scope["path"]):
        return JSONResponse(anthropic_errors.body(error, record.request_id), anthropic_errors.status(error), merged)
    return JSONResponse(error.body(), error.status, merged)


async def cut(scope: Scope, receive: Receive) -> None:
    """Ends a connection whose buffer isn't emptied."""
    if ABORT in scope:
        scope[ABORT]()
        while (await receive())["type"] != "http.disconnect":
            pass


def request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    if _ID.fullmatch(given):
        return given
    return "req_" + secrets.token_hex(12)


def _path(scope: Scope) -> str:
    """As a line of the log has it. A client may have put anything into it, of the length of a whole head."""
    path: str = scope["path"]
    if len(path) > MOST_OF_PATH:
        path = path[:MOST_OF_PATH] + "…"
    return plain(path)


class Heads:
    """HEAD is GET without its body: uvicorn holds it back. Probes ask so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)
        inner = {**scope, "method": "GET"}  # a copy: uvicorn looks at its own
        try:
            await self._app(inner, receive, send)
        finally:
            scope["route"] = inner.get("route")


class Access:
    """Outermost middleware: nothing leaves without a request id, a count and, if wanted, a line in the log."""

    def __init__(
        self, app: ASGIApp, counts: AccessCounts, lines: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._counts = counts
        self._lines = lines
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = scope[KEY] = CallRecord(request_id(Headers(scope=scope)), self._clock())

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                named = MutableHeaders(scope=message)
                named["x-request-id"] = record.request_id
                if anthropic_errors.speaks(scope["path"]):
                    named["request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, stamped)
        except ClientDisconnect:
            if FAULT in scope and not record.status:
                await refusal(scope, scope[FAULT])(scope, receive, stamped)
            else:
                record.facts["finish"] = "client left"
        except asyncio.CancelledError:  # the server has ended, and this one was neither sent nor read to its end
            if record.status:
                return await cut(scope, receive)
            await refusal(scope, Draining("The server is shutting down."))(scope, receive, stamped)
        except Exception:
            if record.status:
                raise  # the answer has begun: uvicorn logs the fault and cuts the connection
            log.exception("request %s failed", record.request_id)
            error = InternalError("The server made a mistake; its log knows more.")
            await refusal(scope, error)(scope, receive, stamped)
        finally:
            self._finish(scope, record)

    def _finish(self, scope: Scope, record: CallRecord) -> None:
        method = scope["method"]
        self._counts.http_request(getattr(scope.get("route"), "path", None), method, record.status)
        if record.error is not None and record.status >= 400:
            self._counts.rejected(record.endpoint, record.error.reason)
        if self._lines:
            if scope["path"] in QUIET:
                level = logging.DEBUG
            else:
                level = logging.INFO
            access_log.log(level, "%s %s %s", method, _path(scope), record.status, extra={"facts": self._facts(record)})

    def _facts(self, record: CallRecord) -> dict[str, Any]:
        facts: dict[str, Any] = {"seconds": round(self._clock() - record.started, 4), "id": record.request_id}
        if record.error is not None:
            facts |= {"error": record.error.code, "param": record.error.param}
        return facts | record.facts
