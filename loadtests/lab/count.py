"""One long answer through a server, thousand by thousand. Measured in a child; see `loadtests.count`."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import mlx.core as mx

from loadtests import harness
from loadtests.lab import shapes
from loadtests.lab.counting import THOUSAND, numbers_in_order, of_arrivals
from loadtests.soak import read
from loadtests.zoo import models

PERIOD = 0.25
RANDOM = 1.0  # temperature of a model with random weights, which would end in a loop of tokens without text
MIB = 1 << 20
ASK = "Write the numbers from 1 to {} in order, separated by commas, and nothing else."


@dataclass(slots=True)
class Watch:
    """What /metrics says while the answer comes. Its thread writes `samples`; `tokens` is written by the reader."""

    server: harness.Server
    tokens: int = 0
    samples: list[dict[str, float]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.over.wait(PERIOD):
            sample = read(self.server.get("/metrics")[1].decode())
            if sample is not None:
                self.samples.append(sample | {"tokens": float(self.tokens)})

    def newest(self, tokens: int) -> dict[str, float]:
        """The last sample before so many tokens had come."""
        known = [sample for sample in self.samples if sample["tokens"] <= tokens]
        return known[-1] if known else {}


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a thousand tokens. `values`: shape, tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(values["shape"], Path(scratch))
        count = "metal" if mx.metal.is_available() else "native"
        options = {"live_buffers": count, "access_log": "off"}
        with harness.marathon(folder, Path(scratch) / "marathon.log", **options) as server:
            counts = values["shape"] not in models.RECIPES
            return stream(server, values["tokens"], 0.0 if counts else RANDOM)


def folder_of(shape: str, scratch: Path) -> Path:
    """The model's folder, written now for one with random weights."""
    return models.obtain(shape, scratch) if shape in models.RECIPES else shapes.folder_of(shape)


def stream(server: harness.Server, tokens: int, temperature: float) -> list[dict[str, Any]]:
    """The answer, forced to its length, while a thread reads the metrics."""
    watch = Watch(server)
    thread = threading.Thread(target=watch.run)
    thread.start()
    arrivals = [(perf_counter(), 0)]
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    try:
        for event in events(server.port, tokens, temperature):
            usage = event.get("usage") or usage
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if text:
                print_progress(watch.tokens, usage["completion_tokens"], tokens)
                watch.tokens = usage["completion_tokens"]
                arrivals.append((perf_counter(), watch.tokens))
                pieces.append(text)
    finally:
        watch.over.set()
        thread.join()
    if usage.get("completion_tokens") != tokens:
        raise harness.HarnessError(f"{usage.get('completion_tokens')} tokens came, not {tokens}")
    return rows_of(arrivals, watch, server, "".join(pieces), tokens)


def events(port: int, tokens: int, temperature: float) -> Iterator[dict[str, Any]]:
    """The events of one streamed chat answer. Raises HarnessError for an error."""
    body = {
        "messages": [{"role": "user", "content": ASK.format(tokens)}],
        "max_tokens": tokens,
        "temperature": temperature,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=None, trust_env=False) as response:
        for line in response.iter_lines():
            if response.status_code != 200 or '"error"' in line[:20]:
                raise harness.HarnessError(line)
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def print_progress(before: int, done: int, tokens: int) -> None:
    if before // (5 * THOUSAND) != done // (5 * THOUSAND):
        print(f"  {done:,} of {tokens:,} tokens", file=sys.stderr, flush=True)


def rows_of(
    arrivals: list[tuple[float, int]], watch: Watch, server: harness.Server, text: str, tokens: int
) -> list[dict[str, Any]]:
    """A row a thousand; what came with the last piece before it begins it."""
    limit = server.health()["live_buffers"]["limit"]
    common = {"pieces_per_token": (len(arrivals) - 1) / tokens, "numbers_right": numbers_in_order(text)}
    found = []
    for number in range(1, tokens // THOUSAND + 1):
        ends = (number - 1) * THOUSAND, number * THOUSAND
        within = [arrival for arrival in arrivals if ends[0] <= arrival[1] <= ends[1]]
        if len(within) > 1:
            found.append(of_arrivals(number, within) | common | _held(watch.newest(ends[1]), limit))
    return found


def _held(sample: dict[str, float], limit: int) -> dict[str, float]:
    if not sample:
        return {}
    memory = {"active_mib": sample["active"] / MIB, "kv_mib": sample["kv"] / MIB}
    return memory | {"live_buffers": sample["live"], "headroom": limit - sample["live"]}
