"""Chaos: engines that die while they start, one after the other, and starts that fail before there is a process.

Owns the modes as-ready, starts, burst and no-spawn. Runs on the event loop of `loadtests.chaos`. Signals go only to
engines of servers that were started here, by the pid that /health names; limits are set on those servers only.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loadtests.chaos.deaths import end_engine, engine_up
from loadtests.chaos.enemy import crowd_bodies, lone_body, newest, strike, under_way, undisturbed_here
from loadtests.chaos.scenario import Findings, Scenario
from loadtests.chaos.sse_client import Account, ask
from loadtests.harness import Server

NO_FILES = 3  # descriptors that a server may have which can open nothing
NO_SPAWN_SECONDS = 8.0  # some starts fail in that time, with the pauses between them


async def as_ready(scenario: Scenario) -> Findings:
    """Each engine is killed as soon as it says that it is ready: at once, and a little later each time."""

    async def at_the_door(server: Server, accounts: Sequence[Account]) -> int:
        await under_way(accounts)
        deaths = scenario.count(20, 7)
        for death in range(deaths):
            await engine_up(server)
            await asyncio.sleep(0.02 * (death % 4))
            await end_engine(server, signal.SIGKILL)
        return deaths

    lone, crowd = await undisturbed_here(scenario, [lone_body(2000)], crowd_bodies(1000))
    findings = await strike(scenario, lone, at_the_door, "deaths of a lone stream's engines")
    if not scenario.quick:
        findings.add(await strike(scenario, crowd, at_the_door, "deaths of a crowd's engines"))
    return findings


async def starts(scenario: Scenario) -> Findings:
    """Each engine is killed while it starts, each a little further on than the one before, faster than the pause
    between two starts grows; new work is refused meanwhile, and not one answer under way is lost."""
    refused = Account({})

    async def further_each_time(server: Server, accounts: Sequence[Account]) -> int:
        await under_way(accounts)
        began = await engine_up(server)
        await end_engine(server, signal.SIGKILL)
        took = max(1.0, await engine_up(server) - began)
        deaths = scenario.count(20, 10)
        for death in range(deaths):
            pid = await newest(server)
            await asyncio.sleep(took * 0.9 * death / deaths)
            os.kill(pid, signal.SIGKILL)
            await _gone(server, pid)
            if death == 5:
                await ask(server.port, lone_body(4), refused)
        return deaths + 1

    [expected] = await undisturbed_here(scenario, crowd_bodies(scenario.count(3000, 1000)))
    findings = await strike(scenario, expected, further_each_time, "deaths")
    if refused.status != 503 or refused.ended - refused.started > 1:
        findings.problems.append(f"new work wasn't refused at once, but got {refused.trouble()}")
    return findings


async def _gone(server: Server, pid: int) -> None:
    while await asyncio.to_thread(server.engine_pid) == pid:
        await asyncio.sleep(0.005)


# ---------------------------------------------------------------- faster than the backoff
async def burst(scenario: Scenario) -> Findings:
    """Each engine is killed as soon as there is a process, before it has imported anything: many in a row, in less time
    than one start takes."""

    async def at_once(server: Server, accounts: Sequence[Account]) -> int:
        await under_way(accounts)
        await end_engine(server, signal.SIGKILL)
        deaths = scenario.count(20, 10)
        for _ in range(deaths):
            pid = await newest(server)
            os.kill(pid, signal.SIGKILL)
            await _gone(server, pid)
        return deaths + 1

    lone, crowd = await undisturbed_here(scenario, [lone_body(1000)], crowd_bodies(1000))
    findings = await strike(scenario, crowd, at_once, "deaths of a crowd's engines")
    if not scenario.quick:
        findings.add(await strike(scenario, lone, at_once, "deaths of a lone stream's engines"))
    return findings


async def no_spawn(scenario: Scenario) -> Findings:
    """The engine dies while the server may open no further file: each start fails before there is a process. Linux."""
    if sys.platform != "linux":
        return Findings(scenario.mode, notes=["not tried: the limits of another process can't be set on this system"])

    async def without_files(server: Server, accounts: Sequence[Account]) -> int:
        await under_way(accounts)
        pid = await newest(server)
        with _few_files(server.pid):
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(NO_SPAWN_SECONDS)
        await engine_up(server)
        failed = server.log.read_text(encoding="utf-8").count("no process can be started")
        assert failed, "each start went well: this proves nothing"
        return failed

    [expected] = await undisturbed_here(scenario, crowd_bodies(1000))
    return await strike(scenario, expected, without_files, "failed starts")


@contextmanager
def _few_files(pid: int) -> Iterator[None]:
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (NO_FILES, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
