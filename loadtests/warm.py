"""KV on disk: `python -m loadtests.warm [--quick] [--only kills turns cost] [--family llama …]`.

Each part starts real servers with `--kv-disk`. The bounds:

    kills    two streams, five kills of the engine: the text as undisturbed, recomputed ≤ 2 % of the tokens delivered
    turns    a conversation of 4,000 tokens, the server restarted: first token ≤ 1.3 × a hit in memory, ≤ 0.2 × cold
    cost     output tokens a second with and without, interleaved, one stream and many; also on a slow and a full disk

Damaged files are `loadtests.damage`'s. Prints a line a figure; its exit code is 0 when all bounds hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from loadtests import harness
from loadtests.chaos.comparison import Verdicts
from loadtests.chaos.scenario import RECOMPUTED_SHARE
from loadtests.chaos.sse_client import Account, ask, completion
from loadtests.harness import Server
from loadtests.zoo import models

FAMILIES = ("llama", "qwen3_5", "gemma3_text")
PARTS = ("kills", "turns", "cost")
AMPLE = "8GiB"
MEMORY_RATIO, COLD_RATIO = 1.3, 0.2
COST = 0.96
NOISE = 0.9  # that a quick run of a noisy machine may show


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each is run."""

    tokens: int
    kills: int
    prompt: int
    rounds: int
    streams: int
    length: int


FULL = Sizes(tokens=20_000, kills=5, prompt=4000, rounds=5, streams=16, length=1000)
QUICK = Sizes(tokens=4000, kills=1, prompt=4000, rounds=2, streams=4, length=400)


class WarmReport:
    """Figures as they come, and whether each was within its bound."""

    def __init__(self) -> None:
        self.missed = 0

    def bound(self, words: str, holds: bool) -> None:
        self.missed += not holds
        print(f"{'ok    ' if holds else 'MISSED'} {words}", flush=True)


def ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 1900) for _ in range(length)]


@contextlib.contextmanager
def serving(model: Path, folder: Path, **values: object) -> Iterator[Server]:
    """A server that keeps KV in `folder`; with `kv_disk=0` it keeps none."""
    asked = {"kv_disk": AMPLE, "kv_disk_folder": folder / "kv", "journal": "off", "access_log": "off"} | values
    with harness.marathon(model, folder / "server.log", **asked) as server:
        yield server


def seconds_of_first(server: Server, prompt: list[int]) -> tuple[float, Account]:
    """The time until the first token of a short answer."""
    account = asyncio.run(ask(server.port, completion(prompt, 4)))
    return account.arrivals[0][0] - account.started, account


# ---------------------------------------------------------------- kills
def kills(model: Path, family: str, folder: Path, sizes: Sizes, report: WarmReport) -> None:
    bodies = [completion(ids(20 + seed, seed), sizes.tokens) for seed in (1, 2)]
    with serving(model, folder / "undisturbed", kv_disk=0) as server:
        expected = asyncio.run(_streams(server, bodies, 0, sizes.tokens))
    with serving(model, folder / "killed") as server:
        seen = asyncio.run(_streams(server, bodies, sizes.kills, sizes.tokens))
        recomputed = sum(server.metric("marathon_recomputed_tokens_total").values())
        restarts = sum(server.metric("marathon_engine_restarts_total").values())
    verdicts = Verdicts()
    for number, (a, b) in enumerate(zip(expected, seen, strict=True)):
        verdicts.judge(f"{family} stream {number}", a, b)
    report.bound(f"{family}: {restarts:.0f} deaths, text {verdicts.problems() or 'as undisturbed'}", not verdicts.wrong)
    delivered = sum(len(account.tokens) for account in seen)
    share = recomputed / delivered
    words = f"{family}: {recomputed:.0f} tokens recomputed of {delivered} delivered, {100 * share:.2f} %"
    report.bound(words, share <= RECOMPUTED_SHARE and restarts >= sizes.kills)


async def _streams(server: Server, bodies: Sequence[dict[str, Any]], deaths: int, tokens: int) -> list[Account]:
    accounts = [Account(body) for body in bodies]
    async with asyncio.TaskGroup() as group:
        for body, account in zip(bodies, accounts, strict=True):
            group.create_task(ask(server.port, body, account))
        for number in range(deaths):
            await _reach(accounts, (number + 1) * tokens // (deaths + 1))
            pid = await asyncio.to_thread(server.engine_pid)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
    return accounts


async def _reach(accounts: Sequence[Account], tokens: int) -> None:
    while min(len(account.tokens) for account in accounts) < tokens and not all(one.ended for one in accounts):
        await asyncio.sleep(0.05)


# ---------------------------------------------------------------- turns
def turns(model: Path, family: str, folder: Path, sizes: Sizes, report: WarmReport) -> None:
    """Ten turns, then the eleventh: after a restart, from memory, and cold."""
    said = ids(sizes.prompt // 2, 7)
    with serving(model, folder) as server:
        for turn in range(10):
            said = said + ids(sizes.prompt // 20, turn)
            said = said + _answered(server, said)
    disk: list[float] = []
    memory: list[float] = []
    cold: list[float] = []
    for turn in range(3):
        with serving(model, folder) as server:
            seconds_of_first(server, ids(300, 1000))  # the first request of an engine pays for more than its prompt
            took, account = seconds_of_first(server, said + ids(10, 100 + turn))
            disk.append(took)
            cached = account.usage["prompt_tokens_details"]["cached_tokens"]
            memory += [seconds_of_first(server, said + ids(10, 200 + turn + i))[0] for i in range(3)]
            cold += [seconds_of_first(server, ids(len(said), 300 + turn + i))[0] for i in range(2)]
    from_disk, from_memory, from_nothing = map(statistics.median, (disk, memory, cold))
    words = f"{family}: {len(said)} tokens, {cached} of them from disk in {1e3 * from_disk:.1f} ms"
    report.bound(f"{words}, from memory in {1e3 * from_memory:.1f}", from_disk <= MEMORY_RATIO * from_memory)
    report.bound(f"{words}, cold in {1e3 * from_nothing:.1f}", from_disk <= COLD_RATIO * from_nothing)


def _answered(server: Server, prompt: list[int]) -> list[int]:
    """The ids of a short answer."""
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", body)
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked, timeout=300) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


# ---------------------------------------------------------------- cost
def cost(model: Path, family: str, folder: Path, sizes: Sizes, report: WarmReport) -> None:
    """Both servers run; their rounds alternate, so that the machine's moods hit both alike."""
    cases = {"with": {}, "slow disk": {"faults": "slow-disk"}, "full disk": {"faults": "full-disk"}}
    for name, values in cases.items():
        with serving(model, folder / "none", kv_disk=0) as without, serving(model, folder / name, **values) as kept:
            for streams in (1, sizes.streams):
                _compare(f"{family}, {name}, {streams} streams", without, kept, streams, sizes, report)


def _compare(name: str, without: Server, kept: Server, streams: int, sizes: Sizes, report: WarmReport) -> None:
    ratios = []
    for number in range(sizes.rounds):
        pair = [without, kept]
        if number % 2:
            pair.reverse()
        speeds = {server.port: asyncio.run(_speed(server, streams, sizes.length, number)) for server in pair}
        ratios.append(speeds[kept.port] / speeds[without.port])
    least = COST if sizes is FULL else NOISE
    shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
    report.bound(f"{name}: median {statistics.median(ratios):.3f} ({shown})", statistics.median(ratios) >= least)


async def _speed(server: Server, streams: int, length: int, seed: int) -> float:
    """Output tokens a second of all streams."""
    bodies = [completion(ids(300, 1000 * seed + i), length, logprobs=None) for i in range(streams)]
    began = monotonic()
    accounts = await asyncio.gather(*(ask(server.port, body) for body in bodies))
    tokens = sum(int(account.usage["completion_tokens"]) for account in accounts)
    return tokens / (monotonic() - began)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small form of each part")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--family", nargs="+", default=FAMILIES, help="tiny models, or folders")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    sizes = QUICK if asked.quick else FULL
    report = WarmReport()
    run = {"kills": kills, "turns": turns, "cost": cost}
    with tempfile.TemporaryDirectory(prefix="marathon-warm-") as name:
        for family in asked.family:
            model = models.obtain(family, Path(name) / "models")
            for part in asked.only:
                run[part](model, family, Path(name) / f"{family}-{part}", sizes, report)
    return min(report.missed, 1)


if __name__ == "__main__":
    sys.exit(main())
