"""The cost of open live pages: `python -m loadtests.pages [--pages 50] [--streams 16] [--rounds 8]`.

Serves a tiny model and measures output tok/s through HTTP in interleaved rounds, once with so many open pages and once
without, in random order; a page is a connection that reads /status/events as a browser does. Writes one CSV row a
measurement and a table; its exit code is 0 when the pages cost at most 2 % of the tokens, and of a core where nothing
is asked. It never imports MLX.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import selectors
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep

from loadtests import harness
from loadtests.bench.ledger import Bar, Figures, Ledger, Round, Verdict, judge, number, of, ratio
from loadtests.bench.rounds import WARM_UP, Plan, Work
from loadtests.bench.rows import greedy
from loadtests.bench.targets import HttpTarget, Target
from loadtests.harness import HarnessError
from loadtests.speed import conclude, end_on_sigterm
from loadtests.zoo.models import RECIPES, obtain

WITH, WITHOUT = "with pages", "without"
LEAST = 0.98  # of the output tok/s without pages
MOST = 0.02  # of a core, for pages of a server that has nothing else to do
REST_SECONDS = 3.0
TOKENS = 512
SETTLE_SECONDS = 1.5  # until each page has its history and a first report
ROW = "pages"


class Pages:
    """Connections that read /status/events; one thread of this process reads them all and keeps nothing."""

    def __init__(self, port: int, number: int) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._sockets = [self._opened(port) for _ in range(number)]
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _opened(self, port: int) -> socket.socket:
        page = socket.create_connection(("127.0.0.1", port), timeout=10)
        page.sendall(b"GET /status/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n")
        page.setblocking(False)
        self._selector.register(page, selectors.EVENT_READ)
        return page

    def _read(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(0.2):
                page = key.fileobj
                assert isinstance(page, socket.socket)
                data = page.recv(1 << 16)
                self.bytes += len(data)
                if not data:
                    self._selector.unregister(page)

    def close(self) -> int:
        """End them; return how many were still open."""
        self._over.set()
        self._thread.join()
        left = len(self._selector.get_map())
        for page in self._sockets:
            page.close()
        self._selector.close()
        return left


@contextlib.contextmanager
def opened_pages(port: int, number: int) -> Iterator[None]:
    """Raises HarnessError where a page was closed by the server or got nothing."""
    pages = Pages(port, number)
    try:
        sleep(SETTLE_SECONDS)
        yield
    finally:
        left = pages.close()
    if number and (left < number or not pages.bytes):
        raise HarnessError(f"{number - left} of {number} pages were closed, {pages.bytes} bytes came")


def idle_difference(one: Round) -> float:
    return one[WITH]["idle_cpu"] - one[WITHOUT]["idle_cpu"]


def idle_cpu(target: Target) -> float:
    """CPU seconds a second of the server while nothing is asked: a figure without noise, at no cost to others."""
    before = target.cpu_seconds()
    sleep(REST_SECONDS)
    return (target.cpu_seconds() - before) / REST_SECONDS


def bars() -> list[Bar]:
    return [
        Bar("output tok/s × without pages", ratio("tok_s", WITHOUT, WITH), "≥", LEAST),
        Bar("share of a core that the pages of an idle server take", idle_difference, "≤", MOST),
        Bar("output tok/s", of("tok_s", WITH)),
        Bar("without: output tok/s", of("tok_s", WITHOUT)),
        Bar("CPU seconds per 1,000 tokens × without", ratio("cpu_s_per_1k", WITHOUT, WITH)),
        Bar("longest pause of a stream × without", ratio("stall", WITHOUT, WITH)),
    ]


def one_round(turn: int, target: Target, port: int, arguments: argparse.Namespace) -> dict[str, Figures]:
    """Both measurements of a round, in random order, with prompts of their own."""
    draw = random.Random(turn)
    row = greedy(ROW, arguments.model, arguments.streams, TOKENS, [])
    found: dict[str, Figures] = {}
    for name in draw.sample([WITH, WITHOUT], 2):
        pages = arguments.pages if name == WITH else 0
        with opened_pages(port, pages):
            idle = idle_cpu(target)
            found[name] = {**row.measure(target, Work(draw, arguments.quick, turn == WARM_UP)), "idle_cpu": idle}
    return found


def measured(plan: Plan, ledger: Ledger, arguments: argparse.Namespace) -> list[Verdict]:
    taken: list[dict[str, Figures]] = []
    model = obtain(arguments.model, plan.folder)
    with (
        harness.Worker("loadtests.bench.client", log=plan.logs / "client.log") as client,
        harness.marathon(model, plan.logs / "pages.log", max_rows=arguments.streams, access_log="off") as server,
    ):
        target = HttpTarget(server, client, {"model": "default", "ignore_eos": True}, exact=True)
        for turn in range(plan.rounds + 1):
            found = one_round(turn, target, server.port, arguments)
            for place, (name, figures) in enumerate(found.items()):
                ledger.note(ROW, arguments.model, (turn, place), name, figures)
                print(f"round {turn}/{plan.rounds}  {name:<10}  {number(figures['tok_s'])} tok/s", flush=True)
            if turn != WARM_UP:
                taken.append(found)
    return judge(ROW, bars(), taken, [WITH, WITHOUT])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=50, help="open at once")
    parser.add_argument("--streams", type=int, default=16, help="answers at once")
    parser.add_argument("--rounds", type=int, default=8, help="rounds that count, after one that warms up")
    parser.add_argument("--model", choices=RECIPES, default="cheap", help="made at first use")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "results", help="folder of the CSV and the table")
    parser.add_argument("--quick", action="store_true", help="tiny loads: shows that it works, measures nothing")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    end_on_sigterm()
    plan = Plan(arguments.rounds, arguments.out / "models", arguments.out / "logs", quick=arguments.quick)
    plan.logs.mkdir(parents=True, exist_ok=True)
    with Ledger(arguments.out, ROW, harness.device()) as ledger:
        print(f"{ledger.machine.line()}, load {os.getloadavg()[0]:.1f}", flush=True)
        return conclude(measured(plan, ledger, arguments), plan, ledger)


if __name__ == "__main__":
    sys.exit(main())
