"""The clients of a chaos run: a fixed number of answers always under way, each of which must come out undisturbed.

Owns what is asked, the tasks that ask it and what became of it. Runs on the event loop of a load test. Who breaks the
engine meanwhile is the scenario's business; the clients only get its times, so that they can say what they saw.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from statistics import quantiles
from time import monotonic
from typing import Any

from loadtests.chaos.comparison import Verdicts
from loadtests.chaos.sse_client import Account, ask, completion

PLAIN = 4  # index of the request that isn't streamed
FIRST_IDS = range(100, 1000)  # of prompts; smaller ones are left for poison


def prompt(length: int, rng: random.Random) -> list[int]:
    return [rng.choice(FIRST_IDS) for _ in range(length)]


def bodies(tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """Four streams and one plain request: greedy and seeded, with short and long prompts. What seeded ones keep is
    few enough candidates that a difference can be explained."""
    rng = random.Random(seed)
    drawn = {"temperature": 0.8, "top_k": 5}
    return [
        completion(prompt(7, rng), tokens),
        completion(prompt(260, rng), tokens),
        completion(prompt(30, rng), tokens, seed=11, **drawn),
        completion(prompt(120, rng), tokens, seed=12, **drawn),
        completion(prompt(20, rng), tokens, seed=13, stream=False, **drawn),
    ]


async def undisturbed(port: int, wanted: Sequence[dict[str, Any]]) -> list[Account]:
    """What the answers should be. Raises RuntimeError when one doesn't come."""
    accounts = await asyncio.gather(*(ask(port, body) for body in wanted))
    for account in accounts:
        if not account.ok or account.usage["completion_tokens"] != account.body["max_tokens"]:
            raise RuntimeError(f"an undisturbed answer ended badly: {account.trouble()}")
    return list(accounts)


class Clients:
    """Keeps one answer to each body under way until it is asked to leave. Use as a context manager."""

    def __init__(self, port: int, expected: Sequence[Account]) -> None:
        self.port = port
        self.expected = list(expected)
        self.live: dict[int, Account] = {}
        self.finished: list[tuple[int, Account]] = []
        self._leaving = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Clients:
        self._tasks = [asyncio.create_task(self._serve(i)) for i in range(len(self.expected))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leaving = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, i: int) -> None:
        while not self._leaving:
            self.live[i] = account = Account(self.expected[i].body)
            await ask(self.port, account.body, account)
            self.finished.append((i, account))
            if not account.ok:
                return  # one trouble of a kind is enough

    async def leave(self, seconds: float = 600.0) -> None:
        """No new answers; waits for those under way."""
        self._leaving = True
        await asyncio.wait(self._tasks, timeout=seconds)

    # ------------------------------------------------------------ what its clients see
    def have_moved(self, since: float) -> bool:
        """Every live stream has shown something after `since`."""
        return all(account.moved_since(since) for i, account in self.live.items() if i != PLAIN)

    async def moved(self, since: float, seconds: float = 120.0) -> None:
        """Raises TimeoutError when a stream stands still for so long."""
        deadline = monotonic() + seconds
        while not self.have_moved(since):
            if monotonic() > deadline:
                raise TimeoutError(f"streams stand still for {seconds:.0f} s")
            await asyncio.sleep(0.01)

    def accounts(self) -> list[Account]:
        return [account for _, account in self.finished]

    def gaps(self, times: Sequence[float]) -> list[float]:
        """The silences that streams had around these times."""
        found = (account.gap_at(time) for i, account in self.finished if i != PLAIN for time in times)
        return [gap for gap in found if gap is not None]

    def judge(self) -> Verdicts:
        verdicts = Verdicts()
        for number, (i, account) in enumerate(self.finished):
            verdicts.judge(f"answer {number} to request {i}", self.expected[i], account)
        return verdicts


def percentile(values: Sequence[float], share: int) -> float:
    """The `share`-th percentile; nan without values."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[share - 1]
