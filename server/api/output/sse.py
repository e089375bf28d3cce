"""Server-sent events.

Owns the event stream's response and the bytes of an event. Runs on the event loop. A stream's events are made as
bytes by the protocol that knows their shape: a token costs one encoded string between two constant pieces.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

import anyio
import msgspec
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from server.api.middleware.access import FILLER, UNSENT, cut, record_of
from server.api.output.choices import Choice
from server.errors import RequestError
from server.text.detokenizer import Piece

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
PREFILL = b": prefill %d/%d\n\n"  # the same while a prompt is being read: tokens done, and all of them

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


class EventStream(EventSourceResponse):
    """Streams `frames` of `live`, if they have a source that is left with them, and leaves it however the stream ends.

    sse-starlette brings the race between stream and disconnect. Its ping is off: signs of life come with the news that
    is streamed. Its watch for the server's end is off, too: it would cut streams that a drain still lets run. In its
    place stands a watch for readers that take nothing; a timer for each chunk would cost more than the chunk. A reader
    that takes a little at a time isn't dropped: what its machine acknowledges counts, not what makes room here.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], live: EventSource | None, patience: float) -> None:
        super().__init__(frames, ping=0, headers={"Cache-Control": "no-cache, no-store"})
        del self.headers["connection"]  # HTTP/1.0 clients get another
        self._live = live
        self._patience = patience
        self._progress = math.inf  # when a send that isn't over last came closer to its end
        self._unsent: Callable[[], int] = int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FILLER] = KEEPALIVE
        self._unsent = scope.get(UNSENT, int)
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            record_of(scope).facts["finish"] = "reader too slow"
            await cut(scope, receive)
        finally:
            if self._live is not None:
                self._live.close()  # the frames close it too, but a client may leave before the first of them

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        self._progress = time.monotonic()
        await send(message)
        self._progress = math.inf

    async def _listen_for_exit_signal_with_grace(self) -> None:
        left = 0
        while (now := time.monotonic()) - self._progress < self._patience:
            before = left
            left = self._unsent()
            if left < before and self._progress < now:
                self._progress = now
            await anyio.sleep(self._patience / 4)
        raise SendTimeoutError
