"""The cost of the journal: `python -m loadtests.journal [--rounds 5] [--streams 16] [--records 10000]`.

Speed: serves a tiny model twice, with a journal and without, and measures output tok/s of chat streams in interleaved
rounds: without, with, and stored. Size: fills a journal with so many answers and one of 100,000 tokens, and measures
how long it takes to open, to read one answer, to list a page, and to read the long one. Damage: starts real servers
over files that are cut, overwritten, newer or in use, and on a full disk; each must answer, and say one line about it.
Writes one CSV row a measurement and a table; its exit code is 0 when every bar is met. It never imports MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

from loadtests import harness
from loadtests.bench.ledger import Bar, Figures, Ledger, Verdict, judge, number, of, ratio
from loadtests.bench.rounds import WARM_UP, Plan, Work
from loadtests.bench.targets import HttpTarget, measured
from loadtests.bench.workload import LoadRequest
from loadtests.harness import HarnessError, Server
from loadtests.speed import conclude, end_on_sigterm
from loadtests.zoo.models import RECIPES, obtain
from server.ipc.sequence import Sampling, TokenSequence
from server.journal import tables
from server.journal.journal import Journal
from server.journal.measures import JournalMetrics
from server.journal.record import NewTokens, Record
from server.settings import load

WITHOUT, WITH, STORED = "without", "with", "stored"
SPEED, SIZE, DAMAGE = "speed", "size", "damage"
TOKENS, PROMPT = 256, 64
LONG = 100_000  # tokens of one answer
AT_ONCE = 200  # records that are added together
READS = 300
OPEN_SECONDS, GET_SECONDS = 2.0, 0.02
WORDS = ("damaged", "foreign", "newer", "another server", "disk is full")  # by which a line is known


# ---------------------------------------------------------------- speed
def speed_bars() -> list[Bar]:
    return [
        Bar("plain chat with a journal × without", ratio("tok_s", WITHOUT, WITH), "≥", 0.97),
        Bar("stored chat × plain chat without a journal", ratio("tok_s", WITHOUT, STORED), "≥", 0.95),
        Bar("without: output tok/s", of("tok_s", WITHOUT)),
        Bar("stored: output tok/s", of("tok_s", STORED)),
        Bar("stored: CPU seconds per 1,000 tokens × without", ratio("cpu_s_per_1k", WITHOUT, STORED)),
        Bar("stored: time to first token × without", ratio("ttft_p50", WITHOUT, STORED)),
    ]


def one_round(turn: int, targets: dict[str, HttpTarget], arguments: argparse.Namespace) -> dict[str, Figures]:
    """All three, in random order, with prompts of their own."""
    draw = random.Random(turn)
    work = Work(draw, arguments.quick, turn == WARM_UP)
    found: dict[str, Figures] = {}
    for name in draw.sample(list(targets), len(targets)):
        requests = [
            LoadRequest(work.tokens(TOKENS), messages=[{"role": "user", "content": work.prompt(PROMPT)}])
            for _ in range(work.streams(arguments.streams))
        ]
        found[name] = measured(targets[name], requests)
    return found


def speed(plan: Plan, ledger: Ledger, arguments: argparse.Namespace, folder: Path) -> list[Verdict]:
    model = obtain(arguments.model, plan.folder)
    options = {"max_rows": arguments.streams, "access_log": "off"}
    fields = {"model": "default", "ignore_eos": True}
    taken: list[dict[str, Figures]] = []
    with (
        harness.Worker("loadtests.bench.client", log=plan.logs / "client.log") as client,
        harness.marathon(model, plan.logs / "without.log", journal="off", **options) as without,
        harness.marathon(model, plan.logs / "with.log", journal=folder / "speed.db", **options) as kept,
    ):
        targets = {
            WITHOUT: HttpTarget(without, client, fields, exact=True),
            WITH: HttpTarget(kept, client, fields, exact=True),
            STORED: HttpTarget(kept, client, fields | {"store": True}, exact=True),
        }
        for turn in range(plan.rounds + 1):
            found = one_round(turn, targets, arguments)
            for place, (name, figures) in enumerate(found.items()):
                ledger.note(SPEED, arguments.model, (turn, place), name, figures)
                print(f"round {turn}/{plan.rounds}  {name:<8}  {number(figures['tok_s'])} tok/s", flush=True)
            if turn != WARM_UP:
                taken.append(found)
    return judge(SPEED, speed_bars(), taken, list(targets))


# ---------------------------------------------------------------- size
def size_bars() -> list[Bar]:
    return [
        Bar("seconds to open the journal", of("open", WITH), "≤", OPEN_SECONDS),
        Bar("seconds to read an answer, of 100 the slowest", of("get_p99", WITH), "≤", GET_SECONDS),
        Bar("seconds to list a page of 100", of("page", WITH), "≤", 0.1),
        Bar(f"seconds to read {LONG:,} tokens", of("long", WITH), "≤", 0.5),
        Bar("MB on disk", of("megabytes", WITH)),
        Bar("answers stored a second", of("added_a_second", WITH)),
    ]


def a_record(number: int) -> Record:
    """An answer of some hundred tokens, as large as they usually are."""
    return Record(
        id=f"resp_{number:032x}",
        kind="response",
        owner="",
        model="tiny",
        fingerprint="f",
        created=1.7e9 + number,
        background=True,
        stream=True,
        endpoint="responses",
        body=json.dumps({"input": "word " * 300, "number": number}).encode(),
        own_input=json.dumps([{"type": "message", "content": "word " * 300}]).encode(),
        sequences=[TokenSequence(list(range(400)), Sampling(seed=number), 1000)],
    )


async def store(journal: Journal, number: int, tokens: int) -> None:
    record = a_record(number)
    await journal.add(record)
    log = journal.tokens(record.id)
    done = asyncio.Event()
    for first in range(0, tokens, 100):
        log.append(NewTokens(0, list(range(first, min(first + 100, tokens)))), lambda: None)
    log.append(NewTokens(0, [], finish="stop", cached=0), done.set)
    await done.wait()
    await journal.finish(record.id, "completed", answer=b'{"output": "%b"}' % (b"word " * 300), finishes=["stop"])


async def fill_and_read(path: Path, records: int) -> Figures:
    """Figures of one journal: seconds, and bytes on disk."""
    settings = load({"journal": str(path)})
    journal = Journal(settings, JournalMetrics())
    await journal.open()
    began = perf_counter()
    for first in range(0, records, AT_ONCE):
        await asyncio.gather(*(store(journal, n, 300) for n in range(first, min(first + AT_ONCE, records))))
    filled = perf_counter() - began
    await store(journal, records, LONG)
    await journal.close()
    journal = Journal(settings, JournalMetrics())
    opening = await timed(journal.open)
    gets = [await timed(lambda: journal.get(a_record(random.randrange(records)).id, "")) for _ in range(READS)]
    figures = {
        "open": opening + await timed(journal.unfinished),
        "get_p99": sorted(gets)[int(0.99 * READS)],
        "get_p50": median(gets),
        "page": median([await timed(lambda: journal.page("response", "", limit=100)) for _ in range(9)]),
        "long": await timed(lambda: journal.ids(a_record(records).id)),
        "megabytes": path.stat().st_size / 1e6,
        "added_a_second": records / filled,
    }
    await journal.close()
    return figures


async def timed(work: Callable[[], Any]) -> float:
    began = perf_counter()
    await work()
    return perf_counter() - began


def size(ledger: Ledger, arguments: argparse.Namespace, folder: Path) -> list[Verdict]:
    figures = asyncio.run(fill_and_read(folder / "size.db", arguments.records))
    ledger.note(SIZE, "none", (1, 0), WITH, figures)
    print(f"{arguments.records} answers: " + ", ".join(f"{k} {number(v)}" for k, v in figures.items()), flush=True)
    return judge(SIZE, size_bars(), [{WITH: figures}], [WITH])


# ---------------------------------------------------------------- damage
def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        for page in range(4096, path.stat().st_size, 4096):
            file.seek(page)
            file.write(b"\xff" * 200)


def make_newer(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {tables.VERSION + 1}")


def make_foreign(path: Path) -> None:
    path.write_bytes(b"Dear diary,\n" * 1000)


SPOILED = {"cut": cut, "overwritten": overwrite, "newer": make_newer, "foreign": make_foreign}


def chat(server: Server, **fields: Any) -> int:
    """The status of one short chat."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}], **fields}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def look(server: Server, name: str, stored: int) -> Figures:
    """One server over a spoiled journal: what it answers, and what its log says.

    Raises HarnessError for a plain chat that isn't answered.
    """
    if (status := chat(server)) != 200:
        raise HarnessError(f"{name}: a plain chat is answered with {status}")
    as_expected = chat(server, store=True) == stored
    lines = server.log.read_text(encoding="utf-8", errors="replace").splitlines()
    matching = [line for line in lines if any(word in line for word in WORDS)]
    traces = sum(line.startswith("Traceback") for line in lines)
    return {"lines": len(matching), "tracebacks": traces, "as_expected": float(as_expected)}


def spoiled_servers(model: Path, folder: Path, logs: Path) -> Generator[tuple[str, Server, int], None, None]:
    """Yield servers one after the other, with the status that each gives to what is to be stored."""
    for name, spoil in SPOILED.items():
        path = folder / f"{name}.db"
        asyncio.run(fill_and_read(path, 50))
        spoil(path)
        with harness.marathon(model, logs / f"{name}.log", journal=path) as server:
            yield name, server, 503 if name == "newer" else 200
    shared = folder / "shared.db"
    with harness.marathon(model, logs / "first.log", journal=shared) as first:
        with harness.marathon(model, logs / "second.log", journal=shared) as second:
            yield "two servers", second, 503
        if chat(first, store=True) != 200:
            raise HarnessError("the first of two servers can't store")
    with harness.marathon(model, logs / "full.log", journal=folder / "full.db", faults="full@commit:1*1000") as full:
        yield "full disk", full, 503


def damage_bars(name: str) -> list[Bar]:
    return [
        Bar(f"{name}: lines about it", of("lines", name), "≤", 1),
        Bar(f"{name}: at least one", of("lines", name), "≥", 1),
        Bar(f"{name}: tracebacks", of("tracebacks", name), "≤", 0),
        Bar(f"{name}: stored work is answered as it should be", of("as_expected", name), "≥", 1),
    ]


def damage(plan: Plan, ledger: Ledger, arguments: argparse.Namespace, folder: Path) -> list[Verdict]:
    model = obtain(arguments.model, plan.folder)
    verdicts: list[Verdict] = []
    with contextlib.closing(spoiled_servers(model, folder, plan.logs)) as servers:
        for name, server, stored in servers:
            sleep(0.2)  # for the log
            figures = look(server, name, stored)
            ledger.note(DAMAGE, arguments.model, (1, 0), name, figures)
            print(f"{name}: {figures}", flush=True)
            verdicts += judge(DAMAGE, damage_bars(name), [{name: figures}], [name])
    return verdicts


# ---------------------------------------------------------------- the command
def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(SPEED, SIZE, DAMAGE), default=[SPEED, SIZE, DAMAGE])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that warms up")
    parser.add_argument("--streams", type=int, default=16, help="answers at once")
    parser.add_argument("--records", type=int, default=10_000, help="stored answers")
    parser.add_argument("--model", choices=RECIPES, default="cheap", help="made at first use")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "results", help="folder of the CSV and the table")
    parser.add_argument("--models", type=Path, help="folder of the models; default: the folder `models` in --out")
    parser.add_argument("--quick", action="store_true", help="tiny loads: shows that it works, measures nothing")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    end_on_sigterm()
    plan = Plan(arguments.rounds, arguments.models or arguments.out / "models", arguments.out / "logs")
    plan.logs.mkdir(parents=True, exist_ok=True)
    began = monotonic()
    with Ledger(arguments.out, "journal", harness.device()) as ledger, tempfile.TemporaryDirectory() as folder:
        verdicts: list[Verdict] = []
        if SPEED in arguments.parts:
            verdicts += speed(plan, ledger, arguments, Path(folder))
        if SIZE in arguments.parts:
            verdicts += size(ledger, arguments, Path(folder))
        if DAMAGE in arguments.parts:
            verdicts += damage(plan, ledger, arguments, Path(folder))
        plan.notes.append(f"{monotonic() - began:.0f} s in all")
        return conclude(verdicts, plan, ledger)


if __name__ == "__main__":
    sys.exit(main())
