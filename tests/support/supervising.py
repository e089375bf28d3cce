"""A supervisor over a scripted engine, and readers of its streams. On any event loop: the clock is the loop's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fake_engine import FakeEngine

from server.ipc.sequence import Sampling, TokenSequence
from server.settings import load
from server.supervision.supervisor import GenerationHandle, Supervisor
from server.supervision.timeouts import Backoff


class Recorded:
    """Counts that remember the calls that they got."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *reported: self.calls.append((verb, reported))

    def of(self, verb: str) -> list[tuple[object, ...]]:
        return [reported for name, reported in self.calls if name == verb]

    def sum(self, verb: str) -> int:
        return sum(reported[-1] for reported in self.of(verb))  # type: ignore[misc]


@asynccontextmanager
async def supervise(
    fake: FakeEngine | None,
    counts: Recorded,
    *,
    ready: bool = True,
    spawn=None,
    **settings: object,
) -> AsyncIterator[Supervisor]:
    clock = asyncio.get_running_loop().time
    quick = {"stall_seconds": 5.0, "start_seconds": 5.0, "rotate_min_seconds": 0.0, "spare_engine": False}
    supervisor = Supervisor(
        load(quick | settings), "model", counts, spawn=spawn or fake.spawn, clock=clock, backoff=Backoff(first=0.01)
    )
    await supervisor.start()
    try:
        if ready:
            await supervisor.wait_known()
        yield supervisor
    finally:
        await supervisor.stop(0)
        assert supervisor.running == supervisor.waiting == 0
        assert fake is None or fake.alive == 0
        assert fake is None or all(spare.poll() is not None for spare in fake.spares)


def sequence(*prompt: int, max_tokens: int = 40, seed: int = 7, **fields: object) -> TokenSequence:
    return TokenSequence(list(prompt) or [1, 2, 3], Sampling(seed=seed), max_tokens, **fields)  # type: ignore[arg-type]


async def collect(live: GenerationHandle, timeout: float = 5.0) -> list[list[int]]:
    """All tokens of each choice; each must end exactly once."""
    tokens: list[list[int]] = [[] for _ in live.sequences]
    finishes: Counter[int] = Counter()
    async with live:
        while not live.done:
            for index, delta in await live.read(timeout):
                assert not finishes[index]
                tokens[index] += delta.tokens
                finishes[index] += delta.finish is not None
    assert all(finishes[i] == 1 for i in range(len(tokens)))
    return tokens


async def first_tokens(live: GenerationHandle, count: int = 1) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        for _, delta in await live.read(5):
            tokens += delta.tokens
    return tokens


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while not condition():
        assert clock() < end, "never came true"
        await asyncio.sleep(0.002)


def endless(*prompt: int, **fields: object) -> TokenSequence:
    return sequence(*prompt, max_tokens=10**6, **fields)  # type: ignore[arg-type]
