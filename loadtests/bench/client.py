"""The client: many streamed requests at once, at a few microseconds a chunk.

`python -m loadtests.bench.client` reads one `Order` a line and answers each with one line of `Stream`s. It is a process
of its own, so that it doesn't share an interpreter with what it measures. One thread, one event loop, bare sockets: a
chunk is counted where it arrives and never parsed; only the end of an answer is read as JSON. It never touches MLX.

Connections are opened before the load begins, as a client with a pool would have them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

import uvloop

from loadtests.bench.workload import LoadRequest, Order, Stream, to_line, to_order

TAIL = 4096  # bytes of the end of an answer that hold usage, [DONE] or an error
SECONDS = 600.0  # longest that a load may take

_END = b"data: [DONE]"


class Channel(asyncio.Protocol):
    """One connection for one streamed answer. Owned by the `Load` that opened it."""

    def __init__(self, ask: LoadRequest, on_news: Callable[[], None]) -> None:
        self.ask = ask
        self.times: list[float] = []
        self.counts: list[int] = []
        self.total = 0
        self.sent = 0.0
        self.tail = b""
        self.error = ""
        self.watched = False  # whether another ask waits for this stream
        self.finished = asyncio.get_running_loop().create_future()
        self._on_news = on_news
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._rest = b""  # the beginning of a line whose end hasn't come
        self._streaming = False
        # What stands before a piece of text in an event, and the same where the piece is empty.
        key = b'"content":' if ask.messages else b'"text":'
        self._key, self._empty, self._null = key, (key + b'""', key + b' ""'), (key + b"null", key + b" null")

    # ------------------------------------------------------------ asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if not self._streaming:
            data = self._open(data)
        if self._rest or not data.endswith(b"\n"):
            data = self._whole_lines(data)
        if self._key in data:
            count = data.count(self._key) - self._without_text(data)
            if count > 0:
                self.times.append(now)
                self.counts.append(count)
                self.total += count
                if self.watched:
                    self._on_news()
        self.tail = (self.tail + data)[-TAIL:] if len(data) < TAIL else data[-TAIL:]
        if _END in self.tail:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished.done():
            self.error = self.error or f"closed before the end: {(self._head + self.tail)[-300:]!r}"
            self._finish()

    # ------------------------------------------------------------ use
    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self.sent = perf_counter()
        self._transport.write(request)

    def give_up(self, reason: str) -> None:
        if not self.finished.done():
            self.error = reason
            self._finish()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def result(self, start: float) -> Stream:
        """What came; `start` is the load's."""
        usage = last_usage(self.tail) or {}
        error = self.error
        if not error and not self.times:
            error = f"no text: {self.tail[-300:]!r}"
        return Stream(
            started=self.sent - start,
            times=[time - start for time in self.times],
            counts=self.counts,
            tokens=usage.get("completion_tokens", 0),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            error=error,
        )

    # ------------------------------------------------------------ inside
    def _open(self, data: bytes) -> bytes:
        """Takes the head off; gives what follows it."""
        self._head += data
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            return b""
        self._head, self._streaming = head, True
        status = head.split(b" ", 2)[1]
        if status != b"200":
            self.error = f"status {status.decode()}: {rest[:300]!r}"
            self._finish()
        return rest

    def _whole_lines(self, data: bytes) -> bytes:
        lines, end, self._rest = (self._rest + data).rpartition(b"\n")
        return lines + end

    def _without_text(self, data: bytes) -> int:
        return sum(data.count(form) for form in (*self._empty, *self._null))

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)
            self._on_news()


def last_usage(tail: bytes) -> dict[str, Any] | None:
    """The usage in the end of an event stream, if it tells one."""
    for line in reversed(tail.split(b"\n")):
        if line.startswith(b"data: {") and b'"usage"' in line:
            try:
                usage = json.loads(line[6:]).get("usage")
            except ValueError:
                continue
            if usage:
                return dict(usage)
    return None


def request(ask: LoadRequest, port: int, fields: dict[str, Any]) -> bytes:
    """The whole HTTP request."""
    path = "/v1/chat/completions" if ask.messages else "/v1/completions"
    content = {"messages": ask.messages} if ask.messages else {"prompt": ask.prompt}
    stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": ask.max_tokens}
    body = json.dumps({"temperature": 0} | content | stream | ask.sampling | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


class Load:
    """The requests of one order, under way together."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._requests = [request(ask, order.port, order.fields) for ask in order.requests]
        self._channels: list[Channel] = []
        self._waiting: dict[int, tuple[int, int]] = {}

    async def run(self) -> list[Stream]:
        loop = asyncio.get_running_loop()
        for ask in self._order.requests:
            make = lambda ask=ask: Channel(ask, self._release)  # noqa: E731
            _, channel = await loop.create_connection(make, "127.0.0.1", self._order.port)
            self._channels.append(channel)
        self._waiting = {i: ask.after for i, ask in enumerate(self._order.requests) if ask.after}
        for stream, _ in self._waiting.values():
            self._channels[stream].watched = True
        start = perf_counter()
        for i, channel in enumerate(self._channels):
            if i not in self._waiting:
                channel.send(self._requests[i])
        try:
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*(channel.finished for channel in self._channels))
        except TimeoutError:
            for channel in self._channels:
                channel.give_up(f"not finished after {SECONDS:.0f} s")
        for channel in self._channels:
            channel.close()
        return [channel.result(start) for channel in self._channels]

    def _release(self) -> None:
        """Send what waited for as many chunks as have come."""
        for i, (stream, chunks) in list(self._waiting.items()):
            awaited = self._channels[stream]
            if awaited.total >= chunks:
                del self._waiting[i]
                self._channels[i].send(self._requests[i])
            elif awaited.finished.done():
                del self._waiting[i]
                self._channels[i].give_up(f"stream {stream} ended after {awaited.total} chunks instead of {chunks}")


async def obey(order: Order) -> list[Stream]:
    """Do what an order says; `reuse` needs nothing here, since the server keeps its own caches."""
    if not order.reuse:
        return await Load(order).run()
    streams = []
    for ask in order.requests:
        single = Order([ask], order.port, order.fields)
        streams += await Load(single).run()
        if streams[-1].error:
            break
    return streams


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(to_line(runner.run(obey(to_order(line)))))
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
