"""How long a stream is silent after its engine was killed.

Owns one such death: it comes once an answer has some tokens, and the silence ends with the next one. Runs on the event
loop of a load test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from time import monotonic, sleep
from typing import Any

from loadtests.chaos.sse_client import Account, ask
from loadtests.harness import HarnessError, Server

PREPARED_SECONDS = 300.0


async def silence_after_kill(server: Server, body: Mapping[str, Any], tokens: int) -> float:
    """Kill the engine once the answer has so many tokens; seconds until it goes on. Raises HarnessError."""
    account = Account(dict(body))
    task = asyncio.create_task(ask(server.port, body, account))
    while len(account.tokens) < tokens and not account.ended:
        await asyncio.sleep(0.002)
    engine = await asyncio.to_thread(server.engine_pid)
    if engine is None or account.ended:
        raise HarnessError(f"nothing to kill: {account.trouble()}")
    os.kill(engine, signal.SIGKILL)
    killed = monotonic()
    while await asyncio.to_thread(server.engine_pid) in (None, engine) and not account.ended:
        await asyncio.sleep(0.005)
    replaced = monotonic()
    while not account.moved_since(replaced):
        await asyncio.sleep(0.005)
    over = bool(account.ended)
    task.cancel()
    await asyncio.wait([task])
    if over:
        raise HarnessError(f"the answer didn't go on: {account.trouble()}")
    return longest_gap(account, killed)


def wait_for_spare(server: Server, *, has_spare: bool = True) -> None:
    """Wait until the engine is up, and the spare one where there is to be one. Raises HarnessError."""
    deadline = monotonic() + PREPARED_SECONDS
    while monotonic() < deadline:
        engine = json.loads(server.get("/status")[1])["status"]["engine"]
        if engine["up"] and engine["spare"] == has_spare:
            return
        sleep(0.1)
    raise HarnessError(f"no spare engine after {PREPARED_SECONDS:.0f} s")


def longest_gap(account: Account, since: float) -> float:
    """The longest time between two pieces of text, from the last one before `since` on. What came before the death
    may be read after it, and a death may be over sooner than any fixed time."""
    times = [at for at, _ in account.arrivals]
    first = max(0, bisect_right(times, since) - 1)
    return max((later - earlier for earlier, later in pairwise(times[first:])), default=0.0)
