"""Chaos: every way an engine can end, and the streams that must not notice.

Owns the modes kill, kill-during-resume, abort, raise, stall, garbage, poison and zombies. Runs on the event loop of
`loadtests.chaos`. Signals go only to engines of servers that were started here, by the pid that /health names.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from time import monotonic

from loadtests import harness
from loadtests.chaos.clients import Clients, percentile, prompt, undisturbed
from loadtests.chaos.clients import bodies as client_bodies
from loadtests.chaos.monitor import STALL_SECONDS, Monitor
from loadtests.chaos.scenario import Findings, Scenario
from loadtests.chaos.sse_client import Account, ask, completion
from loadtests.harness import Server
from server.faults import POISON_AFTER

STALL = 1.0  # --stall-seconds of the modes that need it short; twenty times the longest chunk is often more
ANSWER_SECONDS = 2.0  # of an answer whose every resume is killed: one that had lived through eight deaths may be tried
GOOD_SECONDS = 15.0  # of work before an engine stalls
POISON = 77  # first token of a poisonous prompt


# ---------------------------------------------------------------- killed from outside
async def kill(scenario: Scenario) -> Findings:
    """SIGKILL at random moments, each once every live stream has moved since the one before."""
    return await _killed(scenario, scenario.count(50, 6), during_resume=False)


async def kill_during_resume(scenario: Scenario) -> Findings:
    """Every second kill hits the engine that resumes from the one before; that must end no answer."""
    return await _killed(scenario, scenario.count(50, 6), during_resume=True)


async def _killed(scenario: Scenario, kills: int, *, during_resume: bool) -> Findings:
    tokens = scenario.count(900, 300)
    with scenario.server() as server:
        began = monotonic()
        expected = await undisturbed(server.port, client_bodies(tokens))
        if during_resume:
            tokens = min(tokens, max(60, round(ANSWER_SECONDS * tokens / (monotonic() - began))))
            expected = await undisturbed(server.port, client_bodies(tokens))
        with Monitor(server.port) as monitor:
            async with Clients(server.port, expected) as clients:
                times = await _kill_again(server, clients, kills, scenario.rng, during_resume)
                await clients.leave()
        findings = scenario.findings(server, "kills", len(times))
    _note_answers(findings, clients, times)
    findings.figures["tokens of an answer"] = tokens
    findings.watch(monitor)
    return findings


async def _kill_again(
    server: Server, clients: Clients, kills: int, rng: random.Random, during_resume: bool
) -> list[float]:
    times: list[float] = []
    while len(times) < kills and not _broken(clients):
        up = await engine_up(server)
        await clients.moved(up)
        await asyncio.sleep(rng.uniform(0, 1.5))
        await clients.moved(up)  # one may have ended meanwhile, and the next one not begun
        times.append(await end_engine(server, signal.SIGKILL))
        if during_resume and len(times) < kills:
            if rng.random() < 0.7:  # while it reads prompts or draws first tokens; else while it loads
                await engine_up(server)
                await asyncio.sleep(rng.uniform(0, 0.3))
            else:
                await asyncio.sleep(rng.uniform(0.2, 2.0))
            times.append(await end_engine(server, signal.SIGKILL))
    return times


async def end_engine(server: Server, sign: signal.Signals) -> float:
    """When the signal was sent. On return the server knows of the end, unless the engine was only stopped."""
    while (pid := await asyncio.to_thread(server.engine_pid)) is None:
        await asyncio.sleep(0.01)
    now = monotonic()
    os.kill(pid, sign)
    while sign != signal.SIGSTOP and await asyncio.to_thread(server.engine_pid) == pid:
        await asyncio.sleep(0.01)
    return now


async def engine_up(server: Server, seconds: float = 120.0) -> float:
    """When an engine was seen to be ready."""
    began = monotonic()
    while not (await asyncio.to_thread(server.health))["engine"]["up"]:
        if monotonic() - began > seconds:
            raise harness.HarnessError(f"no engine was ready after {seconds:.0f} s")
        await asyncio.sleep(0.01)
    return monotonic()


def _broken(clients: Clients) -> bool:
    return any(not account.ok for account in clients.accounts())


def _note_answers(findings: Findings, clients: Clients, times: Sequence[float]) -> None:
    verdicts, gaps = clients.judge(), clients.gaps(times)
    findings.problems += verdicts.problems()
    findings.figures |= {
        "answers": len(clients.finished),
        "same": verdicts.same,
        "explained": len(verdicts.explained),
        "gap p50 s": percentile(gaps, 50),
        "gap p99 s": percentile(gaps, 99),
    }
    findings.notes += verdicts.explained


# ---------------------------------------------------------------- broken from inside
async def abort(scenario: Scenario) -> Findings:
    """The allocator aborts the process."""
    return await _broken_inside(scenario, "abort")


async def raises(scenario: Scenario) -> Findings:
    """MLX raises its resource-limit error."""
    return await _broken_inside(scenario, "raise")


async def garbage(scenario: Scenario) -> Findings:
    """The bytes on the channel are no message."""
    return await _broken_inside(scenario, "garbage")


async def stall(scenario: Scenario) -> Findings:
    """The engine's main thread stands still. It works for much longer than the limit before each time, or the limit
    would double, as it should."""
    return await _broken_inside(scenario, "stall", stall_seconds=STALL)


async def _broken_inside(scenario: Scenario, act: str, **options: object) -> Findings:
    deaths = scenario.count(10, 2)
    bodies = client_bodies(scenario.count(900, 300))
    with scenario.server(**options) as server:
        began = monotonic()
        expected = await undisturbed(server.port, bodies)
        pace = bodies[0]["max_tokens"] / (monotonic() - began)
    step = max(40, round(pace * GOOD_SECONDS)) if act == "stall" else 40
    with scenario.server(faults=f"{act}@decode:{step}*{deaths}", **options) as server, Monitor(server.port) as monitor:
        async with Clients(server.port, expected) as clients:
            while _restarts(await asyncio.to_thread(server.health)) < deaths and not _broken(clients):
                await asyncio.sleep(0.2)
            await clients.leave()
        findings = scenario.findings(server, "deaths", deaths)
    _note_answers(findings, clients, sorted(monitor.deaths.values()))
    if act == "stall":
        limits = findings.thresholds("kill_stalled")
        findings.figures["longest stall limit s"] = max(limits, default=float("nan"))
        findings.problems += late_kills(list(monitor.deaths.values()), clients, limits)
    findings.watch(monitor)
    return findings


def _restarts(health: dict[str, dict[str, int]]) -> int:
    return health["engine"]["restarts"]


def late_kills(deaths: Sequence[float], clients: Clients, limits: Sequence[float]) -> list[str]:
    """Engines that stood still for longer than their limit and half a second, by their clients' last token."""
    problems = []
    arrivals = sorted(at for _, account in clients.finished for at, _ in account.arrivals)
    for died, limit in zip(sorted(deaths), limits, strict=False):
        last = max((at for at in arrivals if at < died), default=died)
        if died - last > limit + STALL_SECONDS:
            problems.append(
                f"an engine stood still for {died - last:.2f} s before it was ended; its limit was {limit:.2f}"
            )
    return problems


# ---------------------------------------------------------------- a request that kills
async def poison(scenario: Scenario) -> Findings:
    """A request that kills whatever engine runs it: once in prefill, once behind its first five tokens. It is ended
    alone, with an error, and with exactly the tokens that it got."""
    findings = Findings("poison")
    bodies = client_bodies(scenario.count(600, 250))
    bodies = [*bodies[:3], *(body | {"prompt": prompt(15, scenario.rng)} for body in bodies[:3])]
    bad = completion([POISON, *range(100, 120)], scenario.count(100, 40))
    with scenario.server() as server:
        expected = await undisturbed(server.port, [*bodies, bad])
    for place, got in (("prefill", 0), ("decode", POISON_AFTER)):
        with scenario.server(faults=f"poison@{place}:{POISON}") as server:
            accounts = await _poisoned(server, expected)
            findings.add(scenario.findings(server, f"deaths in {place}", 0))
        clients = Clients(server.port, expected)
        clients.finished = list(enumerate(accounts[:-1]))
        findings.problems += clients.judge().problems()
        findings.figures[f"deaths in {place}"] = findings.restarts("crash")
        culprit = accounts[-1]
        if (culprit.error or {}).get("code") != "invalid_prompt":
            findings.problems.append(f"poison in {place} ended with {culprit.trouble()}")
        if culprit.tokens != expected[-1].tokens[:got]:
            findings.problems.append(f"poison in {place} got {len(culprit.tokens)} tokens, not the first {got}")
    return findings


async def _poisoned(server: Server, expected: Sequence[Account]) -> list[Account]:
    """Three streams, then the poison, then three fresh requests; the poison is the last of the accounts."""
    tasks = [asyncio.create_task(ask(server.port, account.body)) for account in expected[:3]]
    await asyncio.sleep(0.5)
    bad = asyncio.create_task(ask(server.port, expected[-1].body))
    await asyncio.sleep(0.5)
    tasks += [asyncio.create_task(ask(server.port, account.body)) for account in expected[3:-1]]
    return [*await asyncio.gather(*tasks), await bad]


# ---------------------------------------------------------------- the truth about it
async def zombies(scenario: Scenario) -> Findings:
    """After each fault /ready, /health and the metric say what is."""
    rounds = scenario.count(3, 1)
    signs = [sign for sign in (signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP) for _ in range(rounds)]
    late: list[str] = []
    with scenario.server(stall_seconds=STALL) as server:
        expected = await undisturbed(server.port, client_bodies(300))
        with Monitor(server.port) as monitor:
            async with Clients(server.port, expected) as clients:
                for sign in signs:
                    await clients.moved(await engine_up(server))
                    await asyncio.sleep(3 * STALL)  # works well for a while, or the next stall's limit would be doubled
                    sent = await end_engine(server, sign)
                    await _await_death(monitor, sent)
                    if sign == signal.SIGSTOP:
                        late += _check_stall(server, monitor, sent)
                await clients.leave()
        findings = scenario.findings(server, "faults", len(signs))
    _note_answers(findings, clients, list(monitor.deaths.values()))
    findings.problems += late
    findings.watch(monitor)
    return findings


async def _await_death(monitor: Monitor, since: float, seconds: float = 120.0) -> None:
    while not any(died >= since for died in list(monitor.deaths.values())):
        if monotonic() - since > seconds:
            raise harness.HarnessError(f"an engine lived on for {seconds:.0f} s after its signal")
        await asyncio.sleep(0.01)


def _check_stall(server: Server, monitor: Monitor, stopped: float) -> list[str]:
    took = max(monitor.deaths.values()) - stopped
    limit = Findings.actions_of(server, "kill_stalled")[-1]
    if took > limit + STALL_SECONDS:
        return [f"a stopped engine was ended after {took:.2f} s; its limit was {limit:.2f}"]
    return []
