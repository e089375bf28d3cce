"""Server-sent events.

Owns the event stream's response and the bytes of an event. Runs on the event loop. A stream's events are made as
bytes by the protocol that knows their shape: a token costs one encoded string between two constant pieces.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from time import monotonic
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.middleware.access import FILLER, UNSENT, cut, record_of
from server.api.output.choices import Choice
from server.errors import RequestError
from server.text.detokenizer import Piece

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
PREFILL = b": prefill %d/%d\n\n"  # the same while a prompt is being read: tokens done, and all of them

HEADERS = [
    (b"cache-control", b"no-cache, no-store"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]

encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


class DataEvents:
    """What a stream of data lines alone is beside its chunks, as OpenAI's completions send it, and the pieces of the
    plain answer put together. A form of an answer inherits it."""

    def keep(self, choice: Choice, pieces: list[Piece]) -> None:
        choice.answer.add(pieces)

    def first(self, choices: object) -> bytes:
        return b""

    def alive(self, comment: bytes) -> bytes:
        return comment

    def failed(self, error: RequestError, choices: object, usage: object) -> bytes:
        return event(error.body())


class EventSource(Protocol):
    """What makes the events of a stream, such as a `GenerationHandle`."""

    def close(self) -> None:
        """Its reader has left, before the end or after it."""


class EventStream(Response):
    """Streams `frames` of `live`, if they have a source that is left with them, and leaves it however the stream ends.

    Two things end it early: its client leaves, or takes nothing for `patience` seconds. Signs of life come with the
    news that is streamed, and the server's end lets streams run on, so nothing else is watched.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], live: EventSource | None, patience: float) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [*HEADERS]
        self._frames = frames
        self._live = live
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FILLER] = KEEPALIVE
        try:
            async with asyncio.timeout(None) as limit:
                reader = EventReader(limit, self._patience, scope.get(UNSENT, int))
                leaving = asyncio.create_task(reader.notice_its_leaving(receive))
                try:
                    await self._stream(send, reader)
                finally:
                    leaving.cancel()
                    reader.forget()
        except TimeoutError:
            if not limit.expired():
                raise
            if reader.is_slow:
                record_of(scope).facts["finish"] = "reader too slow"
                await cut(scope, receive)
        finally:
            await self._frames.aclose()
            if self._live is not None:
                self._live.close()  # the frames close it too, but a client may leave before the first of them

    async def _stream(self, send: Send, reader: EventReader) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._frames:
            reader.progress = monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            reader.progress = math.inf
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventReader:
    """The client of one stream: ends `limit` once it has left, or has taken nothing for `patience` seconds.

    A reader that takes a little at a time isn't dropped: what its machine acknowledges counts, not what makes room
    here. A timer for each chunk would cost more than the chunk, so one timer looks at them all.

    Attributes:
        progress: when a send that isn't over last came closer to its end; inf while nothing is being sent.
        is_slow: it has taken nothing for too long.
    """

    def __init__(self, limit: asyncio.Timeout, patience: float, unsent: Callable[[], int]) -> None:
        """`unsent` returns how many bytes its machine hasn't acknowledged."""
        self.progress = math.inf
        self.is_slow = False
        self._limit = limit
        self._patience = patience
        self._unsent = unsent
        self._left = 0
        self._set_timer()

    async def notice_its_leaving(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end()

    def _end(self) -> None:
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._patience / 4, self._look)

    def _look(self) -> None:
        before = self._left
        now = monotonic()
        if self.progress < now:
            self._left = self._unsent()
            if self._left < before:
                self.progress = now
        if now - self.progress < self._patience:
            self._set_timer()
        else:
            self.is_slow = True
            self._end()

    def forget(self) -> None:
        """Ends the watch."""
        self._timer.cancel()
