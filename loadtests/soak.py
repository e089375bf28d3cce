"""A long answer through HTTP while others come and go: `python -m loadtests.soak [--tokens 20000] [--families …]`.

Serves a tiny model with the native counter, streams one answer of so many tokens, lets two short ones join it every 40
tokens, and reads /metrics each second. The settled live-buffer count must stay flat, and the growth of active memory
must be that of the KV caches. Writes one CSV row a reading and a table; its exit code is 0 when all families pass.
Never imports MLX: models are written by a child, and the server is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtests import harness
from loadtests.bench.ledger import Ledger
from loadtests.chaos.scenario import obtain
from server.memory.pressure import Fit, Slope

FAMILIES = ["qwen3_5", "smollm3", "nemotron_h"]
EVERY = 40  # tokens of the long answer between two arrivals
STAY = (44, 46)  # tokens of the short answers of an arrival
FIRST = 20
PROMPTS = 16  # short ones recur, so that the prefixes that the server keeps come to an end
FLAT = 0.01  # buffers a token; the whole 95 % interval must lie within
WITHIN = 0.05  # of KV's growth
PERIOD = 1.0
SECONDS = 3600.0  # longest that one family may take
WANTED = {
    "live": 'marathon_live_buffers{reading="settled"}',
    "active": "marathon_mlx_active_memory_bytes",
    "kv": "marathon_kv_bytes",
    "pending": "marathon_pending_cache_arrays",
    "unexplained": "marathon_unexplained_bytes_per_token",
}


@dataclass(slots=True)
class Soak:
    """One family under way."""

    tokens: int = 0  # of the long answer, those with text
    finished: int = 0  # short answers
    samples: list[dict[str, float]] = field(default_factory=list)
    usage: int = 0

    def kept(self) -> list[dict[str, float]]:
        return self.samples[len(self.samples) // 3 :]

    def buffers(self) -> Fit | None:
        """A token. Tokens without text of their own weren't counted on the way, but are in the usage."""
        unseen = self.usage / max(1, self.tokens)
        return fit([(s["tokens"] * unseen, s["live"]) for s in self.kept()])

    def memory(self) -> Fit | None:
        """Bytes of active memory for each byte of KV."""
        return fit([(s["kv"], s["active"]) for s in self.kept()])


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    points = sorted(points)
    slope = Slope(points=len(points) + 1, spacing=-math.inf)
    for x, y in points:
        slope.add(x, y, 0.0)
    return slope.fit


# ---------------------------------------------------------------- the load
async def drive(server: harness.Server, family: str, wanted: int) -> Soak:
    soak = Soak()
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=None, limits=limits) as client:
        shorts = asyncio.create_task(_arrivals(client, family, soak))
        watch = asyncio.create_task(_watch(client, soak))
        try:
            async with asyncio.timeout(SECONDS):
                async for chunk in _stream(client, _body(family, [5, 6, 7, 8], wanted)):
                    soak.tokens += any(choice.get("text") for choice in chunk["choices"])
                    soak.usage = (chunk.get("usage") or {}).get("completion_tokens", soak.usage)
        finally:
            for task in (shorts, watch):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
    return soak


def _body(model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise harness.HarnessError(f"status {response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data is not line and data != "[DONE]":
                chunk = json.loads(data)
                if "error" in chunk:
                    raise harness.HarnessError(str(chunk["error"]))
                yield chunk


async def _arrivals(client: httpx.AsyncClient, family: str, soak: Soak) -> None:
    """Two short answers whenever the long one has come 40 tokens further."""
    running: set[asyncio.Task[None]] = set()
    due = FIRST
    try:
        while True:
            if soak.tokens >= due:
                number = due // EVERY
                for i, tokens in enumerate(STAY):
                    prompt = [20 + (2 * number + i) % PROMPTS * 7 + 3 * j for j in range(8)]
                    task = asyncio.create_task(_short(client, soak, _body(family, prompt, tokens)))
                    running.add(task)
                    task.add_done_callback(running.discard)
                due += EVERY
            await asyncio.sleep(0.01)
    finally:
        for task in running:
            task.cancel()


async def _short(client: httpx.AsyncClient, soak: Soak, body: dict[str, Any]) -> None:
    response = await client.post("/v1/completions", json=body)
    soak.finished += response.status_code == 200


async def _watch(client: httpx.AsyncClient, soak: Soak) -> None:
    while True:
        await asyncio.sleep(PERIOD)
        text = (await client.get("/metrics")).text
        if (sample := read(text)) is not None:
            soak.samples.append(sample | {"tokens": float(soak.tokens)})
            if len(soak.samples) % 60 == 0:
                print(f"{soak.tokens:,} tokens with text, {sample['live']:.0f} buffers", file=sys.stderr, flush=True)


def read(text: str) -> dict[str, float] | None:
    """The series in WANTED, labels that aren't named summed up; None before the first reading."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        for name, wanted in WANTED.items():
            if series == wanted or series.startswith(wanted + "{"):
                found[name] = found.get(name, 0.0) + float(value)
    return found if "live" in found else None


# ---------------------------------------------------------------- the verdict
HEAD = ["model", "tokens", "short answers", "readings", "buffers a token", "active ÷ KV growth", "MiB of KV", ""]


def judge(family: str, soak: Soak, wanted: int) -> tuple[list[str], bool]:
    buffers, memory = soak.buffers(), soak.memory()
    if buffers is None or memory is None:
        return [family, str(soak.usage), str(soak.finished), str(len(soak.samples)), "–", "–", "–", "FAIL"], False
    flat = abs(buffers.slope) + buffers.half_width <= FLAT
    passed = flat and abs(memory.slope - 1) <= WITHIN and soak.usage == wanted
    grown = max(s["kv"] for s in soak.kept()) - min(s["kv"] for s in soak.kept())
    cells = [
        *(family, f"{soak.usage:,}", f"{soak.finished:,}", str(len(soak.samples))),
        f"{buffers.slope:.4f} ±{buffers.half_width:.4f}",
        f"{memory.slope:.3f} ±{memory.half_width:.3f}",
        f"{grown / 2**20:.1f}",
        "pass" if passed else "FAIL",
    ]
    return cells, passed


def soak_one(family: str, arguments: argparse.Namespace, folder: Path, ledger: Ledger) -> tuple[list[str], bool]:
    model = obtain(family, folder)
    log = arguments.out / "logs" / f"soak-{family}.log"
    with harness.marathon(model, log, live_buffers="native", guard=arguments.guard, access_log="off") as server:
        soak = asyncio.run(drive(server, family, arguments.tokens))
    for number, sample in enumerate(soak.samples):
        ledger.note("soak", family, (number, 0), "marathon", sample)
    return judge(family, soak, arguments.tokens)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES, metavar="NAME", help="families of the zoo")
    parser.add_argument("--tokens", type=int, default=20_000, help="length of the long answer")
    parser.add_argument("--guard", choices=("on", "off"), default="on", help="off shows what would happen")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "results", help="folder of the CSV and the table")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    verdicts = []
    with tempfile.TemporaryDirectory() as folder, Ledger(arguments.out, "soak", harness.device()) as ledger:
        for family in arguments.families:
            print(family, file=sys.stderr, flush=True)
            verdicts.append(soak_one(family, arguments, Path(folder), ledger))
        lines = ["| " + " | ".join(cells) + " |" for cells in [HEAD, ["---"] * len(HEAD), *(c for c, _ in verdicts)]]
        text = "\n".join([f"guard {arguments.guard}; {ledger.machine.line()}", "", *lines]) + "\n"
    (arguments.out / "soak.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(passed for _, passed in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
