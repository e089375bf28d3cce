"""Chaos: too little of something. Live buffers that run out, memory for few rows.

Owns the modes leak, fast-leak, guard-off and preempt. Runs on the event loop of `loadtests.chaos`.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtests import harness
from loadtests.chaos.clients import Clients, prompt, undisturbed
from loadtests.chaos.comparison import Verdicts
from loadtests.chaos.scenario import Findings, Scenario
from loadtests.chaos.sse_client import Account, ask, completion
from loadtests.harness import Server

TOKENS = 20_000
ROWS, ROOM, ROW_TOKENS = 64, 4, 600
TOKENS_A_PREEMPTION = 64
RECOMPUTED_SHARE = 0.25
REFUSED_SECONDS = 2.0  # a refusal that comes later isn't "at once"
GAVE_BACK = re.compile(r"sequence (\d+) gave its memory back after (\d+) tokens")


# ---------------------------------------------------------------- live buffers
async def leak(scenario: Scenario) -> Findings:
    """One live buffer a step that nothing frees: the engine is replaced before MLX would throw."""
    bodies = [completion(prompt(20, scenario.rng), scenario.count(TOKENS, 4000))]
    return await _leaking(scenario, bodies, 1, faults="leak:1")


async def guard_off(scenario: Scenario) -> Findings:
    """A model that leaks by itself once the guard is off, with two rows. What it leaks can be won back by evaluating
    it, and that comes before any rotation."""
    tokens = scenario.count(TOKENS, 8000) // 2
    bodies = [completion(prompt(length, scenario.rng), tokens) for length in (20, 50)]
    return await _leaking(scenario, bodies, 2, guard="off")


async def _leaking(scenario: Scenario, bodies: list[dict[str, Any]], a_step: int, **options: object) -> Findings:
    """`a_step`: buffers that leak in a step. The limit leaves the engine a few hundred steps between the reading that
    is too high and the end: even tiny models take a second for them."""
    limit = a_step * scenario.count(7500, 3000)
    wanted = int(bodies[0]["max_tokens"] * a_step / limit)
    with scenario.server() as server:
        expected = await undisturbed(server.port, bodies)
    numbers = {"live_buffers": "native", "buffer_limit": limit, "rotate_min_seconds": 0}
    with scenario.server(**numbers, **options) as server:
        clients = Clients(server.port, expected)
        clients.finished = list(enumerate(await asyncio.gather(*(ask(server.port, body) for body in bodies))))
        findings = scenario.findings(server, "buffer limit", limit)
    verdicts: Verdicts = clients.judge()
    findings.problems += verdicts.problems()
    findings.notes += verdicts.explained
    findings.figures |= {
        "rotations": findings.restarts("rotation"),
        "flushes": len(findings.thresholds("flush")),
        "longest gap s": longest_gap(clients.accounts()),
    }
    met = findings.restarts("rotation") + len(findings.thresholds("flush"))
    if met < wanted or (findings.restarts("rotation") < wanted and "faults" in options):
        findings.problems.append(f"only {findings.restarts('rotation'):.0f} rotations")
    if findings.restarts("crash"):
        findings.problems.append(
            f"{findings.restarts('crash'):.0f} engines reached the limit before they were replaced"
        )
    return findings


def longest_gap(accounts: Sequence[Account]) -> float:
    times = [[at for at, _ in account.arrivals] for account in accounts]
    return max((b - a for one in times for a, b in pairwise(one)), default=float("nan"))


async def fast_leak(scenario: Scenario) -> Findings:
    """A leak that replacing can't keep up with ends with an error that names it, whether the engine could still ask
    to be replaced or had no time to."""
    findings = Findings("fast-leak")
    for buffers, limit in ((1, 2000), (400, 4000)):
        options = {"live_buffers": "native", "buffer_limit": limit, "rotate_min_seconds": 600}
        options["faults"] = f"leak:{buffers}"
        with scenario.server(**options) as server:
            account = await ask(server.port, completion(prompt(20, scenario.rng), TOKENS))
            after = await ask(server.port, completion(prompt(20, scenario.rng), 3))
            findings.add(scenario.findings(server, "runs", 1))
        said = (account.error or {}).get("message", "")
        findings.notes.append(f"{buffers} a step: {len(account.tokens)} tokens, then: {account.trouble()}")
        if "leak" not in said.lower():
            findings.problems.append(f"{buffers} a step: the error doesn't name the leak: {account.trouble()}")
        if not after.ok:
            findings.problems.append(f"{buffers} a step: a short request afterwards ended badly: {after.trouble()}")
    return findings


# ---------------------------------------------------------------- bytes
async def preempt(scenario: Scenario) -> Findings:
    """Many rows where four have room: all end, or are refused at once."""
    findings = await _crowded(scenario, scenario.count(ROWS, 16), ROW_TOKENS)
    if findings.figures["recomputed tokens"] > RECOMPUTED_SHARE * findings.figures["generated tokens"]:
        findings.problems.append("too much was computed twice")
    return findings


async def preempt_long(scenario: Scenario) -> Findings:
    """The same with answers much longer than anybody plans with, so that rows must be preempted."""
    findings = await _crowded(scenario, scenario.count(12, 7), 3 * ROW_TOKENS)
    if not findings.figures["preemptions"]:
        findings.problems.append("nothing was preempted: this proves nothing")
    return findings


async def _crowded(scenario: Scenario, rows: int, tokens: int) -> Findings:
    bodies = [completion(prompt(scenario.rng.choice((10, 20, 40)), scenario.rng), tokens) for _ in range(rows)]
    limit = await asyncio.to_thread(room_for, scenario.model, ROOM, 40 + tokens)
    readings: list[float] = []
    with scenario.server(memory_limit=limit, max_rows=32, queue_limit=rows - rows // 8) as server:
        scale = asyncio.create_task(_weigh(server, readings))
        accounts = await asyncio.gather(*(ask(server.port, body) for body in bodies))
        scale.cancel()
        findings = scenario.findings(server, "requests", rows)
        times = preemptions(server.log.read_text(encoding="utf-8"))
    findings.figures |= {
        "refused": sum(account.status == 429 for account in accounts),
        "preemptions": sum(map(len, times)),
        "memory limit": limit,
        "most active bytes": max(readings),
    }
    findings.problems += [*ended_badly(accounts, tokens), *too_often(times), *too_much(findings)]
    return findings


def room_for(model: Path, rows: int, length: int) -> int:
    command = [sys.executable, "-m", "loadtests.chaos.row_room", str(model), str(rows), str(length)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=harness.environment())
    return int(run.stdout)


async def _weigh(server: Server, readings: list[float]) -> None:
    while True:
        active = await asyncio.to_thread(server.metric, "marathon_mlx_active_memory_bytes")
        readings += active.values()
        await asyncio.sleep(0.25)


def preemptions(log: str) -> list[list[int]]:
    """For each row that was preempted: the tokens that it had delivered, each time."""
    rows: dict[str, list[int]] = {}
    for row, tokens in GAVE_BACK.findall(log):
        rows.setdefault(row, []).append(int(tokens))
    return list(rows.values())


def ended_badly(accounts: Sequence[Account], tokens: int) -> list[str]:
    problems = []
    for account in accounts:
        if account.status == 429:
            if account.ended - account.started > REFUSED_SECONDS or "retry-after" not in account.headers:
                problems.append(f"refused after {account.ended - account.started:.1f} s, headers {account.headers}")
        elif not account.ok or len(account.tokens) != tokens:
            problems.append(f"ended badly after {len(account.tokens)} tokens: {account.trouble()}")
    return problems


def too_often(rows: Sequence[Sequence[int]]) -> list[str]:
    """A row preempted k times must have delivered at least 64 k tokens."""
    pairs = [(k, tokens) for row in rows for k, tokens in enumerate(row, 1)]
    return [
        f"a row with {tokens} tokens was preempted {k} times" for k, tokens in pairs if tokens < TOKENS_A_PREEMPTION * k
    ]


def too_much(findings: Findings) -> list[str]:
    is_over = findings.figures["most active bytes"] > findings.figures["memory limit"]
    return ["more bytes were active than the limit allows"] if is_over else []
