"""An event loop whose clock jumps: whatever waits for an hour is there at once.

Usage, in a test:

    @virtual_time.played
    async def test_…(): ...

Within it `asyncio.get_running_loop().time` is the clock to give to whatever takes one. Time stands still while there is
something to do, and jumps to the next timer when there is nothing. Sockets between two ends in this process work, as
what is written to one end can be read from the other at once; threads and other processes don't.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

MOST_ROUNDS = 500_000  # of the loop; some 20 s

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Never waits: where it would, it moves the clock."""

    now = 1000.0
    rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.rounds += 1
        if self.rounds > MOST_ROUNDS:
            raise RuntimeError(f"this goes on for ever: it's {self.now:.0f} s past, and no task is done")
        if events := super().select(0):
            return events
        if timeout is None:
            raise RuntimeError("nothing will ever happen: no timer is set, and nothing can be read")
        self.now += max(0.0, timeout)
        return []


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now

    def sleep_at_once(self, seconds: float) -> None:
        """What a suspended process sees: the clock has gone on, and it did nothing meanwhile."""
        self.clock.now += seconds


def run(story: Coroutine[Any, Any, T]) -> T:
    """Plays it to its end, however long it says that it takes. No task may be left."""
    loop = Loop()
    try:
        result = loop.run_until_complete(story)
        loop.run_until_complete(asyncio.sleep(0))
        left = asyncio.all_tasks(loop)
        assert not left, left
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A decorator: the test is a coroutine that runs on such a loop."""

    @functools.wraps(test)
    def play(*arguments: Any, **named: Any) -> None:
        run(test(*arguments, **named))

    return play
