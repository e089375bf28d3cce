"""Answers that outlive the server: `python -m loadtests.outlive [--kills 50] [--both 50] [--starts 10] [--quick]`.

Four clients have background responses of 400 tokens made, one after the other, and read them as streams. Meanwhile the
server gets SIGKILL at random moments: alone, together with its engine, and while it starts; it is started again each
time on the same port and journal. A client that loses its connection asks for the events behind the last one it has.
No event number may be missing or come twice, each text must be the one of an undisturbed run, and each response must
end `completed`. Prints how far it is, appends a row to `outlive.csv`, and exits with 1 on any loss. Never imports MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from loadtests import harness
from loadtests.harness import HarnessError, Server
from loadtests.zoo import scripted

TOKENS = 400
LANES = {"qa": "apple", "qb": "pear", "qc": "plum", "qd": "quince"}
PATIENCE = 300.0  # seconds without an event, whatever happens to the server
RETRY_SECONDS = 0.05
MOMENTS = 1.2  # a kill comes so many seconds after every stream has moved, at most
COLUMNS = (
    "time", "device", "seed", "kills", "both", "starts", "responses", "events", "connections", "longest_gap",
    "seconds", "problems",
)  # fmt: skip


def script(lane: str) -> list[str]:
    """The pieces of a lane's answer, a token each."""
    return [f" {LANES[lane]}{number}" for number in range(TOKENS)]


@dataclass(slots=True)
class ReaderTally:
    """What the clients have seen."""

    responses: int = 0
    events: int = 0
    connections: int = 0
    longest_gap: float = 0.0
    problems: list[str] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)  # by lane, when its last event came


class ResponseReader:
    """One response of one lane, over as many connections as it takes."""

    def __init__(self, client: httpx.AsyncClient, lane: str, tally: ReaderTally) -> None:
        self.id = ""
        self._client = client
        self._lane = lane
        self._tally = tally
        self._next = 0
        self._text = ""
        self._last = ""

    async def read(self) -> None:
        """To its end. Raises TimeoutError when there is no event for too long."""
        last = monotonic()
        while not self._last.startswith(("response.completed", "response.failed", "response.incomplete")):
            try:
                self._tally.connections += 1
                async with self._connected() as response:
                    async for event in events(response):
                        self._take(event)
                        last = self._note(last)
            except httpx.TransportError:
                pass
            if monotonic() - last > PATIENCE:
                raise TimeoutError(f"{self._lane}: no event for {PATIENCE:.0f} s")
            await asyncio.sleep(RETRY_SECONDS)

    def _connected(self) -> Any:
        if self.id:
            query = {"stream": "true"}
            if self._next:
                query["starting_after"] = str(self._next - 1)
            return self._client.stream("GET", f"/v1/responses/{self.id}", params=query)
        body = {"input": f"SCRIPT:{self._lane}", "background": True, "stream": True}
        return self._client.stream("POST", "/v1/responses", json=body)

    def _note(self, last: float) -> float:
        now = monotonic()
        self._tally.longest_gap = max(self._tally.longest_gap, now - last)
        self._tally.moved[self._lane] = now
        return now

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "keepalive":
            return
        self._tally.events += 1
        if event["sequence_number"] != self._next:
            self._problem(f"event {event['sequence_number']} came where {self._next} should")
        self._next = event["sequence_number"] + 1
        self._last = event["type"]
        if event["type"] == "response.created":
            self.id = event["response"]["id"]
        if event["type"] == "response.output_text.delta":
            self._text += event["delta"]

    async def judge(self) -> None:
        """Whether it is the undisturbed answer, as streamed and as stored."""
        self._tally.responses += 1
        expected = "".join(script(self._lane))
        if self._last != "response.completed":
            self._problem(f"ended with {self._last}")
        if self._text != expected:
            self._problem(f"its text has {len(self._text)} characters, {difference(self._text, expected)}")
        while True:
            with contextlib.suppress(httpx.TransportError):
                made = (await self._client.get(f"/v1/responses/{self.id}")).json()
                break
            await asyncio.sleep(RETRY_SECONDS)
        if made.get("status") != "completed" or made["output"][0]["content"][0]["text"] != expected:
            self._problem(f"is stored as {made.get('status')} with another text")

    def _problem(self, what: str) -> None:
        self._tally.problems.append(f"{self.id or 'a response'} of {self._lane}: {what}")
        print(f"      problem: {self._tally.problems[-1]}", flush=True)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream. Raises HarnessError for an answer that is none, but for a server that starts or ends."""
    if response.status_code == 503:
        return
    if response.status_code != 200:
        raise HarnessError(f"{response.request.method} {response.url}: {(await response.aread()).decode()[:300]}")
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def difference(seen: str, expected: str) -> str:
    place = next(
        (n for n, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b), min(len(seen), len(expected))
    )
    return f"{len(expected)} were expected; the first difference is at {place}"


# ---------------------------------------------------------------- the server
class Mortal:
    """A server that is killed and started again; owned by the run."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.port = harness.free_port()
        self.server: Server | None = None
        self._folder = folder
        self._logs = logs
        self._starts = 0

    def start(self) -> Server:
        values = {
            "model": self._folder / "model", "port": self.port, "journal": self._folder / "journal.db",
            "access_log": "off", "keepalive_seconds": 1,
        }  # fmt: skip
        command = [sys.executable, "-m", "server.cli", "serve", *harness.options(values)]
        self._starts += 1
        self.server = Server("marathon", command, self.port, "/ready", self._logs / f"outlive-{self._starts}.log")
        return self.server

    async def ready(self) -> None:
        assert self.server is not None
        await asyncio.to_thread(self.server.wait_ready)

    def kill(self, *, engine: bool = False) -> None:
        """SIGKILL to the server, and to its engine in the same moment."""
        assert self.server is not None
        pids = [self.server.pid]
        if engine:
            with contextlib.suppress(OSError, ValueError, KeyError):
                pids.insert(0, self.server.engine_pid() or self.server.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.process.wait()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()


@contextlib.contextmanager
def mortal(logs: Path) -> Iterator[Mortal]:
    with tempfile.TemporaryDirectory(prefix="marathon-outlive-") as name:
        folder = Path(name)
        scripts = {"dd": [["Hello"]], **{lane: [script(lane)] for lane in LANES}}
        scripted.write(folder / "model", scripts)
        one = Mortal(folder, logs)
        try:
            yield one
        finally:
            one.stop()


# ---------------------------------------------------------------- the run
class Ordeal:
    """All of it: the clients, and who kills their server."""

    def __init__(self, mortal: Mortal, asked: argparse.Namespace, rng: random.Random) -> None:
        self.tally = ReaderTally()
        self._mortal = mortal
        self._asked = asked
        self._rng = rng
        self._leaving = False

    async def all(self) -> None:
        self._mortal.start()
        await self._mortal.ready()
        base = f"http://127.0.0.1:{self._mortal.port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=PATIENCE) as client:
            lanes = [asyncio.create_task(self._lane(client, lane)) for lane in LANES]
            killing = asyncio.create_task(self._kill_all())
            await asyncio.wait([killing, *lanes], return_when=asyncio.FIRST_EXCEPTION)
            self._leaving = True
            await asyncio.gather(killing, *lanes)

    async def _lane(self, client: httpx.AsyncClient, lane: str) -> None:
        while not self._leaving:
            reader = ResponseReader(client, lane, self.tally)
            await reader.read()
            await reader.judge()

    async def _kill_all(self) -> None:
        kinds = ["server"] * self._asked.kills + ["both"] * self._asked.both + ["start"] * self._asked.starts
        self._rng.shuffle(kinds)
        for number, kind in enumerate(kinds, 1):
            await self._killed(kind)
            tally = self.tally
            print(
                f"{number} of {len(kinds)} ({kind}): {tally.responses} responses whole, {tally.events} events over "
                f"{tally.connections} connections, longest silence {tally.longest_gap:.1f} s",
                flush=True,
            )
        await self._all_moved()
        self._leaving = True

    async def _killed(self, kind: str) -> None:
        began = monotonic()
        if kind == "start":
            self._mortal.kill()
            self._mortal.start()
            await asyncio.sleep(self._rng.uniform(0, self._asked.start_seconds))
        else:
            await self._all_moved()
            await asyncio.sleep(self._rng.uniform(0, MOMENTS))
        await asyncio.to_thread(self._mortal.kill, engine=kind == "both")
        self._mortal.start()
        await self._mortal.ready()
        if kind != "start":
            self._asked.start_seconds = monotonic() - began

    async def _all_moved(self) -> None:
        """Every stream has shown something from now on. Raises TimeoutError."""
        began = monotonic()
        async with asyncio.timeout(PATIENCE):
            while any(self.tally.moved.get(lane, 0.0) < began for lane in LANES):
                await asyncio.sleep(0.01)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of the server alone")
    parser.add_argument("--both", type=int, default=50, help="of server and engine in the same moment")
    parser.add_argument("--starts", type=int, default=10, help="of a server that starts")
    parser.add_argument("--quick", action="store_true", help="two, two and one: shows that it works, proves little")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "results", help="folder of outlive.csv and the logs")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: another one each time")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.kills, asked.both, asked.starts = 2, 2, 1
    asked.start_seconds = 5.0  # as long as a start takes, once one was seen
    return asked


def write(asked: argparse.Namespace, tally: ReaderTally, seed: int, seconds: float) -> None:
    """Appends the row to the table."""
    path = asked.out / "outlive.csv"
    is_new = not path.exists()
    figures = (tally.responses, tally.events, tally.connections, round(tally.longest_gap, 2), round(seconds))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    row = (when, harness.device(), seed, asked.kills, asked.both, asked.starts, *figures, len(tally.problems))
    with path.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        if is_new:
            table.writerow(COLUMNS)
        table.writerow(row)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended in order
    seed = asked.seed
    if seed is None:
        seed = random.randrange(2**32)
    asked.out.mkdir(parents=True, exist_ok=True)
    print(f"{harness.device()}; seed {seed}", flush=True)
    began = monotonic()
    with mortal(asked.out / "logs") as server:
        run = Ordeal(server, asked, random.Random(seed))
        try:
            asyncio.run(run.all())
        except (HarnessError, TimeoutError) as error:
            run.tally.problems.append(f"{type(error).__name__}: {error}")
    tally = run.tally
    write(asked, tally, seed, monotonic() - began)
    word = "FAIL" if tally.problems or not tally.responses else "pass"
    print(
        f"{word}  {tally.responses} responses of {TOKENS} tokens, {tally.events} events, {len(tally.problems)} problems"
    )
    for problem in tally.problems[:20]:
        print(f"      problem: {problem}")
    return int(word == "FAIL")


if __name__ == "__main__":
    sys.exit(main())
