"""Mixed traffic through a server for some minutes. Measured in a child; see `loadtests.endurance`."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import mlx.core as mx

from loadtests import harness
from loadtests.chaos.clients import percentile
from loadtests.lab.count import folder_of
from loadtests.lab.line import fit
from loadtests.lab.traffic import AGENT, KINDS, AnswerEnd, ask, body_of, is_truthful
from loadtests.soak import read

CLIENTS = 6
DEADLINE = 20.0  # seconds that the server gives a request
HOUR = 3600.0
MIB = 1 << 20
TOKENS = "marathon_generation_tokens_total"


@dataclass(slots=True)
class Reading:
    """The state after one period."""

    time: float
    live: float
    active: float
    tok_s: float
    p99_ms: float


@dataclass(slots=True)
class Traffic:
    """All that happens to one server. Its tasks share it on one event loop."""

    server: harness.Server
    ends: float
    period: float
    rng: random.Random
    began: float = field(default_factory=monotonic)
    gaps: list[float] = field(default_factory=list)  # milliseconds, of this period
    endings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    async def run(self) -> None:
        watch = asyncio.create_task(self._watch())
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.server.port}", timeout=None, trust_env=False
        ) as client:
            await asyncio.gather(self._agent(client), *(self._client(client) for _ in range(CLIENTS)))
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch

    async def _client(self, client: httpx.AsyncClient) -> None:
        while monotonic() < self.ends:
            kind = self.rng.choice(KINDS)
            self._note(kind, await ask(client, kind, body_of(kind, self.rng), self.gaps))

    async def _agent(self, client: httpx.AsyncClient) -> None:
        """One conversation that grows turn by turn; a new one when it has become long."""
        history: list[dict[str, str]] = []
        while monotonic() < self.ends:
            body = body_of(AGENT, self.rng, history)
            ending = await ask(client, AGENT, body, self.gaps)
            self._note(AGENT, ending)
            history = [*body["messages"], {"role": "assistant", "content": ending.text or "-"}]
            if len(history) > 60:
                history = []

    def _note(self, kind: str, ending: AnswerEnd) -> None:
        self.endings[f"{kind}: {ending.name}"] += 1
        if fault := is_truthful(kind, ending):
            self.faults.append(f"{kind}: {fault}")

    async def _watch(self) -> None:
        last = (monotonic(), 0.0)
        while True:
            await asyncio.sleep(self.period)
            now, tokens, sample = monotonic(), *await asyncio.to_thread(self._sample)
            if sample is not None and self.gaps:
                speed = (tokens - last[1]) / (now - last[0])
                p99 = percentile(self.gaps, 99)
                self.readings.append(Reading(now, sample["live"], sample["active"] / MIB, speed, p99))
                self.gaps.clear()
                self._print_progress(now)
            last = (now, tokens)

    def _sample(self) -> tuple[float, dict[str, float] | None]:
        text = self.server.get("/metrics", timeout=60)[1].decode()
        return sum(self.server.metric(TOKENS).values()), read(text)

    def _print_progress(self, now: float) -> None:
        reading = self.readings[-1]
        left = max(0.0, self.ends - now) / 60
        line = f"  {self.endings.total()} requests, {reading.live:.0f} buffers, {reading.tok_s:.0f} tok/s"
        print(f"{line}; {left:.1f} min left", file=sys.stderr, flush=True)


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """One row of the whole run. `values`: shape, minutes, period, seed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(values["shape"], Path(scratch))
        options: dict[str, Any] = {"access_log": "off", "request_timeout_seconds": DEADLINE}
        options["live_buffers"] = "metal" if mx.metal.is_available() else "native"
        with harness.marathon(folder, Path(scratch) / "marathon.log", **options) as server:
            ends = monotonic() + 60 * values["minutes"]
            traffic = Traffic(server, ends, values["period"], random.Random(values["seed"]))
            asyncio.run(traffic.run())
            left = sum(server.metric("marathon_requests_running").values())
            return [summary(traffic, left)]


def summary(traffic: Traffic, left: float) -> dict[str, Any]:
    """Slopes an hour over the last two thirds of the readings, and what became of the requests."""
    kept = traffic.readings[len(traffic.readings) // 3 :]
    kinds = "; ".join(f"{name} {count}" for name, count in sorted(traffic.endings.items()))
    found = {
        "ran_minutes": (monotonic() - traffic.began) / 60,
        "requests": traffic.endings.total(),
        "untruthful": len(traffic.faults),
        "left_running": left,
        "endings": kinds,
        "faults": " | ".join(traffic.faults[:5]),
        "readings": len(kept),
    }
    return found | slopes(kept)


def slopes(kept: Sequence[Reading]) -> dict[str, float]:
    if len(kept) < 3:
        return {}
    times = [reading.time for reading in kept]
    found: dict[str, float] = {}
    for name, of in (("live", "live"), ("bytes", "active"), ("tok_s", "tok_s"), ("p99", "p99_ms")):
        values = [getattr(reading, of) for reading in kept]
        found[f"{name}_slope"] = HOUR * fit(times, values).slope
        found[f"{name}_mean"] = sum(values) / len(values)
    half = len(kept) // 2
    for name in ("live", "active"):
        early, late = (max(getattr(r, name) for r in part) for part in (kept[:half], kept[half:]))
        found[f"{name}_growth"] = late / early
    return found
