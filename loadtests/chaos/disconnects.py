"""Chaos: clients that leave, and a server that is asked to.

Owns the modes drain and disconnects. Runs on the event loop of `loadtests.chaos`; signals go only to the servers that
were started here.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from statistics import linear_regression
from time import monotonic

from loadtests import process_tree
from loadtests.chaos.scenario import Findings, Scenario, leftovers
from loadtests.chaos.sse_client import Account, ask, completion
from loadtests.harness import REST_SECONDS, Server

DRAIN_SECONDS = 6
AT_ONCE = 24  # clients of the mode disconnects
LEVEL_SHARE = 0.02  # growth of a process's memory over the last half that counts as level
PREFIXES = "16MiB"  # of earlier prompts' KV: full long before the last half, so that keeping more isn't growth
LEVEL_BYTES = 4 << 20  # the same, for noise of small processes


# ---------------------------------------------------------------- the server leaves
async def drain(scenario: Scenario) -> Findings:
    """SIGTERM with a short and an endless stream."""
    findings = Findings("drain")
    with scenario.server(drain_seconds=DRAIN_SECONDS) as server:
        family = process_tree.descendants(server.pid)
        short, endless = Account({}), Account({})
        tasks = [
            asyncio.create_task(ask(server.port, completion([100, 101], 60), short)),
            asyncio.create_task(ask(server.port, completion([102, 103], 32_000), endless)),
        ]
        while not (short.arrivals and endless.arrivals):
            await asyncio.sleep(0.01)
        signalled = monotonic()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        new = await ask(server.port, completion([104, 105], 4))
        is_ready = (await asyncio.to_thread(server.get, "/ready"))[0] == 200
        await asyncio.gather(*tasks)
        status = await asyncio.to_thread(server.process.wait, 30)
        findings.figures = {
            "exit code": status,
            "seconds": monotonic() - signalled,
            "endless s": endless.ended - signalled,
        }
    findings.problems += drain_problems(short, endless, new, is_ready, signalled) + leftovers(server, family)
    return findings


def drain_problems(short: Account, endless: Account, new: Account, is_ready: bool, signalled: float) -> list[str]:
    code = (new.error or {}).get("code")
    facts = {
        f"new work got status {new.status}, {new.trouble()}": new.status == 503 and "retry-after" in new.headers,
        f"new work was refused with the code {code}": code == "draining",
        "/ready still said yes": not is_ready,
        f"the short stream ended badly: {short.trouble()}": short.ok,
        f"the endless stream ended badly: {endless.trouble()}": endless.error is not None and not endless.done,
        f"the endless stream ended after {endless.ended - signalled:.1f} s": abs(
            endless.ended - signalled - DRAIN_SECONDS
        )
        < 2,
    }
    return [problem for problem, holds in facts.items() if not holds]


# ---------------------------------------------------------------- the clients leave
async def disconnects(scenario: Scenario) -> Findings:
    """Requests that are left at random: while they are sent, queued, read, answered. Nothing may be left of them."""
    total, parts = scenario.count(10_000, 600), scenario.count(20, 8)
    with scenario.server(queue_limit=16, max_rows=12, prefix_cache=PREFIXES) as server:
        crowd = Crowd(server, scenario.rng)
        before: dict[str, int] = {}
        for _ in range(parts):
            await crowd.run(total // parts)
            await crowd.rest()
            before = before or files(server)
        after = files(server)
        findings = scenario.findings(server, "requests", total)
        findings.problems += crowd.problems + memory_problems(crowd.memory)
    for name, count in after.items():
        if count > before[name]:
            findings.problems.append(f"the {name} has {count} open files, it had {before[name]}")
    findings.figures |= {f"{name} at the end": count for name, count in crowd.outcomes.items()}
    findings.figures |= {f"{name} MB": sizes[-1] / 1e6 for name, sizes in crowd.memory.items()}
    return findings


def files(server: Server) -> dict[str, int]:
    """Open file descriptors of both processes."""
    pids = {"server": server.pid, "engine": server.engine_pid() or 0}
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}


class Crowd:
    """Clients without patience. `outcomes` counts how they left."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.problems: list[str] = []
        self.outcomes = {"answered": 0, "left": 0, "refused": 0}
        self.memory: dict[str, list[float]] = {"server": [], "engine": []}
        self._server, self._rng = server, rng
        self._to_come = 0

    async def run(self, total: int) -> None:
        self._to_come = total
        await asyncio.gather(*(self._come_and_go() for _ in range(AT_ONCE)))

    async def _come_and_go(self) -> None:
        while self._to_come > 0:
            self._to_come -= 1
            await self._one()

    async def _one(self) -> None:
        rng = self._rng
        length = rng.choice((3, 30, 300))
        body = completion([rng.randrange(100, 1000) for _ in range(length)], rng.randrange(1, 200))
        body |= {} if rng.random() < 0.7 else {"stream": False, "stream_options": None}
        body["logprobs"] = None
        account = Account(body)
        try:
            await asyncio.wait_for(
                ask(self._server.port, body, account), rng.choice((0.003, 0.03, 0.3, 1.0, 6.0)) * rng.random()
            )
        except TimeoutError:
            self.outcomes["left"] += 1
            return
        self.outcomes["refused" if account.status == 429 else "answered"] += 1
        if account.status not in (200, 429) or (account.status == 200 and not account.ok):
            self.problems.append(f"an answer ended badly: {account.trouble()}")

    async def rest(self) -> None:
        """Until nothing is left to do; weighs both processes then, since under load they hold what comes and goes."""
        await self.settle()
        await asyncio.sleep(REST_SECONDS)
        await asyncio.to_thread(self._weigh)

    def _weigh(self) -> None:
        known = process_tree.descendants(self._server.pid)
        for name, process in zip(self.memory, known, strict=False):
            self.memory[name].append(process.memory_bytes)

    async def settle(self, seconds: float = 30.0) -> None:
        """Until neither process knows of any request."""
        deadline = monotonic() + seconds
        while held := await asyncio.to_thread(self._held):
            if monotonic() > deadline:
                self.problems.append(f"{seconds:.0f} s after the last client had gone: {held}")
                return
            await asyncio.sleep(0.5)

    def _held(self) -> dict[str, float]:
        gauges = ("marathon_requests_running", "marathon_requests_waiting")
        held = {name: sum(self._server.metric(name).values()) for name in gauges}
        batches = json.loads(self._server.get("/debug/batches")[1])
        held["prefilling"] = batches["prefilling"]
        held["rows"] = sum(group["rows"] for group in batches["groups"])
        return {name: count for name, count in held.items() if count}


def memory_problems(memory: dict[str, list[float]]) -> list[str]:
    """Processes that went on growing over the last half."""
    problems = []
    for name, sizes in memory.items():
        half = sizes[len(sizes) // 2 :]
        if len(half) < 4:
            continue
        grown = linear_regression(range(len(half)), half).slope * len(half)
        if grown > max(LEVEL_SHARE * half[0], LEVEL_BYTES):
            problems.append(f"the {name} grew by {grown / 1e6:.1f} MB over the last half, from {half[0] / 1e6:.0f} MB")
    return problems
