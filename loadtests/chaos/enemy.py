"""Chaos: deaths where they hurt most, one after the other, instead of at random moments.

Owns the modes lone, boundaries, last-token, drain-death and paused: streams alone and in a crowd, and an engine that
ends at each of their boundaries; deaths while an engine starts are in `starts`. Runs on the event loop of
`loadtests.chaos`. Signals go only to servers that were started here and to the engines that their /health names.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

from loadtests import process_tree
from loadtests.chaos.clients import bodies as client_bodies
from loadtests.chaos.clients import undisturbed
from loadtests.chaos.comparison import Verdicts
from loadtests.chaos.deaths import end_engine, engine_up
from loadtests.chaos.scenario import Findings, Scenario, leftovers
from loadtests.chaos.sse_client import Account, ask, completion
from loadtests.harness import Server

Blows = Callable[[Server, Sequence[Account]], Awaitable[int]]  # hits a server while streams run; how often it did

STEP = 100  # tokens between two deaths of the mode lone
IDLE_LIMIT = 6.0  # seconds after which a stopped idle engine must have been replaced
SHORT_PAUSE = 2.0


async def undisturbed_here(scenario: Scenario, *wanted: Sequence[dict[str, Any]]) -> list[list[Account]]:
    """What each group of streams should be."""
    with scenario.server() as server:
        return [await undisturbed(server.port, bodies) for bodies in wanted]


async def strike(scenario: Scenario, expected: Sequence[Account], blows: Blows, label: str, **options: Any) -> Findings:
    """Streams that must come out as expected while the blows fall."""
    with scenario.server(**options) as server:
        accounts = [Account(dict(right.body)) for right in expected]
        tasks = [asyncio.create_task(ask(server.port, account.body, account)) for account in accounts]
        began = monotonic()
        count = await blows(server, accounts)
        await asyncio.wait(tasks, timeout=900)
        findings = scenario.findings(server, label, count)
    findings.figures["seconds"] = monotonic() - began
    judge(findings, expected, accounts, label)
    return findings


def judge(findings: Findings, expected: Sequence[Account], accounts: Sequence[Account], label: str) -> None:
    verdicts = Verdicts()
    for i, (right, account) in enumerate(zip(expected, accounts, strict=True)):
        verdicts.judge(f"stream {i}, {label}", right, account)
    findings.problems += verdicts.problems()
    findings.notes += verdicts.explained
    findings.figures["same"] = verdicts.same


def lone_body(tokens: int, length: int = 40) -> dict[str, Any]:
    return completion([100 + i % 800 for i in range(length)], tokens)


def crowd_bodies(tokens: int) -> list[dict[str, Any]]:
    return client_bodies(tokens)[:4]


async def under_way(accounts: Sequence[Account], tokens: int = 5) -> None:
    while any(not account.ended and len(account.tokens) < tokens for account in accounts):
        await asyncio.sleep(0.005)


async def newest(server: Server) -> int:
    """The pid of the next engine, as soon as there is one; nothing of it has loaded yet."""
    while (pid := await asyncio.to_thread(server.engine_pid)) is None:
        await asyncio.sleep(0.005)
    return pid


# ---------------------------------------------------------------- a stream alone
async def lone(scenario: Scenario) -> Findings:
    """One stream alone; its engine is killed whenever it has got so many tokens."""

    async def every_few_tokens(server: Server, accounts: Sequence[Account]) -> int:
        [account], deaths, mark = accounts, 0, STEP
        while not account.ended:
            if len(account.tokens) >= mark:
                await end_engine(server, signal.SIGKILL)
                deaths, mark = deaths + 1, len(account.tokens) + STEP
            await asyncio.sleep(0.005)
        return deaths

    [expected] = await undisturbed_here(scenario, [lone_body(scenario.count(6000, 800))])
    return await strike(scenario, expected, every_few_tokens, "deaths")


# ---------------------------------------------------------------- each boundary of a row
async def boundaries(scenario: Scenario) -> Findings:
    """The first engines die at a chunk, a step or a resumed sequence, as often as a lone stream may survive it."""
    faults = ["prefill:1*2", "prefill:2*2", "decode:1*2", "decode:2*9", "resume:1*9"]
    return await _broken_at(scenario, ["decode:2*5", "resume:1*5"] if scenario.quick else faults, 60)


async def last_token(scenario: Scenario) -> Findings:
    """The engine dies just before, at and after the last step of a stream."""
    tokens = 40
    steps = (tokens,) if scenario.quick else range(tokens - 1, tokens + 2)
    return await _broken_at(scenario, [f"decode:{step}*3" for step in steps], tokens)


async def _broken_at(scenario: Scenario, places: Sequence[str], tokens: int) -> Findings:
    """A stream alone, then a crowd, while engines die at each of these places."""
    findings = Findings(scenario.mode)
    groups = await undisturbed_here(scenario, [lone_body(tokens, length=300)], crowd_bodies(tokens))
    for place in places:
        for expected in groups:
            # Without a first death in mid-answer no sequence would ever be resumed.
            faults = f"kill@{place},kill@decode:20"
            findings.add(await strike(scenario, expected, _nothing, f"{len(expected)} at {place}", faults=faults))
    return findings


async def _nothing(server: Server, accounts: Sequence[Account]) -> int:
    return 0


# ---------------------------------------------------------------- in drain
async def drain_death(scenario: Scenario) -> Findings:
    """The engine dies after SIGTERM: what can end within the drain does, also if that takes another engine."""
    [expected] = await undisturbed_here(scenario, crowd_bodies(1000))
    with scenario.server(drain_seconds=60) as server:
        family = process_tree.descendants(server.pid)
        accounts = [Account(dict(right.body)) for right in expected]
        tasks = [asyncio.create_task(ask(server.port, account.body, account)) for account in accounts]
        await under_way(accounts)
        server.process.send_signal(signal.SIGTERM)
        for _ in range(2):
            await end_engine(server, signal.SIGKILL)
            await engine_up(server)
        await asyncio.wait(tasks, timeout=120)
        status = await asyncio.to_thread(server.process.wait, 30)
    findings = Findings(scenario.mode, {"exit code": status})
    judge(findings, expected, accounts, "in drain")
    findings.problems += leftovers(server, family)
    return findings


# ---------------------------------------------------------------- stopped, and going on
async def paused(scenario: Scenario) -> Findings:
    """Server and engine are stopped for a while, each and both; nothing is lost, and no engine that went on is
    replaced. An idle engine that stays stopped is, before anybody pays the stall limit for it."""

    async def one_after_the_other(server: Server, accounts: Sequence[Account]) -> int:
        await under_way(accounts)
        engine = await newest(server)
        for stopped in ([engine], [server.pid], [server.pid, engine]):
            _signal(stopped, signal.SIGSTOP)
            await asyncio.sleep(SHORT_PAUSE)
            _signal(stopped, signal.SIGCONT)
            await asyncio.sleep(0.5)
        return 3

    # Longer than either pause, shorter than all of them: the server must not take its own for the engine's.
    options = {"stall_seconds": 1.5 * SHORT_PAUSE}
    [expected] = await undisturbed_here(scenario, crowd_bodies(scenario.count(6000, 2000)))
    findings = await strike(scenario, expected, one_after_the_other, "pauses", **options)
    if sum(findings.lost.values()):
        findings.problems.append(f"engines were replaced that had only been stopped for {SHORT_PAUSE} s")
    findings.add(await _stopped_idle(scenario))
    return findings


def _signal(pids: Sequence[int], sign: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, sign)


async def _stopped_idle(scenario: Scenario) -> Findings:
    with scenario.server() as server:
        pid = await newest(server)
        os.kill(pid, signal.SIGSTOP)
        stopped = monotonic()
        while (await asyncio.to_thread(server.get, "/ready"))[0] == 200 and monotonic() < stopped + 60:
            await asyncio.sleep(0.02)
        unready = monotonic() - stopped
        answer = await ask(server.port, lone_body(8))
        took = monotonic() - stopped
        findings = scenario.findings(server, "stopped idle engines", 1)
        start = await engine_up(server) - stopped
    findings.figures |= {"not ready after s": unready, "answered after s": took}
    if unready > 3.5 or not answer.ok or took > IDLE_LIMIT + max(10.0, start):
        findings.problems.append(f"not ready after {unready:.1f} s, {answer.trouble()} after {took:.1f} s")
    return findings
