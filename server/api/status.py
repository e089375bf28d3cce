"""/, /page/*, /status and /status/events: a server's state for people to look at.

Owns the routes of the live page. Runs on the event loop. The page's files hold nothing about the server, so they are
served without a key; what they ask for isn't.
"""

from __future__ import annotations

import mimetypes
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from server.api.context import AppContext
from server.api.openapi import errors, event_stream
from server.api.output.sse import EventStream, encode
from server.errors import UnknownUrl

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@cache
def files() -> dict[str, Path]:
    """The page's files by the path that the browser asks for."""
    return {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}


def routes(served: AppContext) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/", response_class=Response, responses=errors())
    async def page() -> Response:
        """The live page."""
        return _file("index.html")

    @router.get("/page/{name:path}", response_class=Response, include_in_schema=False)
    async def part(name: str) -> Response:
        return _file(name)

    @router.get("/status", responses=errors())
    async def status() -> Response:
        """The server's state: a verdict in words, figures, running generations, what happened lately."""
        return Response(encode(served.feed.report()), media_type="application/json")

    @router.get(
        "/status/events", response_class=Response, responses={200: event_stream("a report each second"), **errors()}
    )
    async def status_events() -> Response:
        """The same each second, as server-sent events; the first event is the history of the charts."""
        return EventStream(served.feed.frames(), None, served.settings.send_timeout_seconds)

    return router


def _file(name: str) -> Response:
    """Raises UnknownUrl for a file that the page doesn't have."""
    if (path := files().get(name)) is None:
        raise UnknownUrl(f"There is no /page/{name[:100]} here")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return Response(path.read_bytes(), media_type=kind, headers=HEADERS)
