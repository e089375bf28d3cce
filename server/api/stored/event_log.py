"""The numbered events of one answer while it forms, and the readers who follow them.

Owns the list of events and the waiting for more. Event-loop thread only. The number of an event is its place in the
list, so a reader is a number, however slow it is; a log never waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

SEPARATOR = b"\n\n"
MOST_AT_ONCE = 256  # events a reader is given in one piece

SignOfLife = Callable[[int], bytes]  # by the number of the last event that the reader has, -1 before the first


def split(data: bytes) -> list[bytes]:
    """Single events of a stream's bytes. No event has an empty line in it: JSON writes line breaks as escapes."""
    return [part + SEPARATOR for part in data.split(SEPARATOR) if part]


class EventLog:
    """All events so far. Written by the answer's run, read by `follow`.

    Attributes:
        events: as bytes, by their numbers.
        ended: nothing will be added any more.
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.ended = False
        self._waiting: set[LogReader] = set()

    def add(self, data: bytes) -> None:
        """Appends the events of these bytes."""
        if data:
            self.events += split(data)
            self._wake()

    def end(self) -> None:
        """Lets every reader go once it has read the rest. Idempotent."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        for reader in self._waiting:
            reader.wake()

    async def follow(self, after: int, patience: float, alive: SignOfLife) -> AsyncGenerator[bytes, None]:
        """Events with larger numbers than `after`, to the end, several in a piece where they are there; a sign of life
        after each `patience` seconds without one."""
        number = after + 1
        reader = LogReader(patience)
        self._waiting.add(reader)
        try:
            while True:
                batch = self.events[number : number + MOST_AT_ONCE]
                if batch:
                    number += len(batch)
                    yield b"".join(batch)
                elif self.ended:
                    return
                elif not await reader.wait():
                    yield alive(number - 1)
        finally:
            self._waiting.discard(reader)
            reader.close()


class LogReader:
    """Waits for one reader. Its alarm isn't moved each time, since a timer an event would cost more than the event."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._alarm: asyncio.TimerHandle | None = None
        self._until = 0.0
        self._waiter: asyncio.Future[bool] | None = None

    async def wait(self) -> bool:
        """True once it is woken, False when its patience is over."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._until = loop.time() + self._patience
        if self._alarm is None:
            self._alarm = loop.call_at(self._until, self._ring, loop)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = None
        if self._waiter is None:
            return
        if loop.time() < self._until:
            self._alarm = loop.call_at(self._until, self._ring, loop)
        else:
            self._settle(False)

    def wake(self) -> None:
        self._settle(True)

    def _settle(self, woken: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(woken)

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
