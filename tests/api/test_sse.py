"""The response of an event stream by itself: whatever ends it, its frames and their source are closed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from server.api.middleware.access import KEY, UNSENT, CallRecord
from server.api.output.sse import EventStream


class Source:
    """Frames without end, until `fault` is to be raised."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.closed = self.frames_closed = False
        self._fault = fault

    async def frames(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b": news\n\n"
                if self._fault is not None:
                    raise self._fault
                await asyncio.sleep(0.001)
        finally:
            self.frames_closed = True

    def close(self) -> None:
        self.closed = True


class Client:
    """The other end of a response."""

    def __init__(self, *, takes: float = math.inf) -> None:
        """`takes`: so many messages and no more."""
        self.left = asyncio.Event()
        self.messages: list[Any] = []
        self._takes = takes

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if len(self.messages) > self._takes:
            await asyncio.sleep(3600)

    async def follow(self, source: Source, patience: float = 10.0) -> CallRecord:
        record = CallRecord("req_1", 0.0)
        scope = {"type": "http", KEY: record, UNSENT: lambda: 100}
        try:
            await EventStream(source.frames(), source, patience)(scope, self.receive, self.send)
        finally:
            assert source.closed
        return record

    async def begun(self, source: Source) -> asyncio.Task[CallRecord]:
        """Follow until some of it has come."""
        following = asyncio.create_task(self.follow(source))
        while len(self.messages) < 3:
            await asyncio.sleep(0.001)
        return following


@pytest.mark.parametrize("fault", [RuntimeError("broken"), TimeoutError("of something else")], ids=["fault", "timeout"])
async def test_an_error_of_the_frames_is_that_of_the_response(fault: Exception) -> None:
    with pytest.raises(type(fault), match=str(fault)):
        await Client().follow(Source(fault))


async def test_a_client_that_leaves_ends_the_stream_without_an_error() -> None:
    client = Client()
    source = Source()
    following = await client.begun(source)
    client.left.set()
    record = await asyncio.wait_for(following, 5)
    assert source.frames_closed
    assert "finish" not in record.facts


async def test_a_client_that_takes_nothing_ends_the_stream_and_the_log_says_so() -> None:
    record = await asyncio.wait_for(Client(takes=1).follow(Source(), patience=0.1), 5)
    assert record.facts["finish"] == "reader too slow"


async def test_a_cancelled_response_stays_cancelled() -> None:
    client = Client()
    source = Source()
    following = await client.begun(source)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert source.frames_closed
