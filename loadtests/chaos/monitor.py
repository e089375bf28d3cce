"""Does the server say the truth about its engine? Sampled every 50 ms.

Owns one thread that asks /health, /ready and /metrics and waits for the ends of the engines that /health names, and
the judgement over what it saw. Runs in a load test on Linux (pidfd). It never touches a process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from time import monotonic, sleep

PERIOD = 0.05
DEAD_SECONDS = 0.2  # after which no route may say any more that a dead engine is up
STALL_SECONDS = 0.5  # the same beyond the stall limit
_UP = re.compile(rb"^marathon_engine_up(?:\{[^}]*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of questions, sent one after the other between two times."""

    sent: float
    answered: float
    pid: int | None
    health: bool
    ready: bool
    metric: bool

    @property
    def words(self) -> str:
        said = (("/health", self.health), ("/ready", self.ready), ("marathon_engine_up", self.metric))
        return ", ".join(f"{name} {'up' if up else 'down'}" for name, up in said)


class Monitor:
    """Use as a context manager, while the engine is up; read it once left."""

    def __init__(self, port: int) -> None:
        self.samples: list[Sample] = []
        self.deaths: dict[int, float] = {}  # when the engine of that pid ended
        self.failures: list[str] = []
        self._port = port
        self._asked = ""
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._watch, daemon=True)]
        self._known: set[int] = set()

    def __enter__(self) -> Monitor:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(5)

    def _watch(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        while not self._over.is_set():
            began = monotonic()
            try:
                self._sample(connection, began)
            except (OSError, http.client.HTTPException, ValueError) as error:
                died = max(self.deaths.values(), default=began)
                self.failures.append(f"{self._asked} gave {error!r}, {began - died:.1f} s after the last engine's end")
                connection.close()
            sleep(max(0.0, PERIOD - (monotonic() - began)))

    def _sample(self, connection: http.client.HTTPConnection, began: float) -> None:
        engine = json.loads(self._get(connection, "/health")[1])["engine"]
        ready = self._get(connection, "/ready")[0] == 200
        up = _UP.search(self._get(connection, "/metrics")[1])
        metric = up is not None and float(up[1]) == 1
        self.samples.append(Sample(began, monotonic(), engine["pid"], bool(engine["up"]), ready, metric))
        if (pid := engine["pid"]) is not None and pid not in self._known:
            self._known.add(pid)
            self._threads.append(threading.Thread(target=self._await_end, args=(pid,), daemon=True))
            self._threads[-1].start()

    def _get(self, connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
        self._asked = path
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()

    def _await_end(self, pid: int) -> None:
        """A pidfd turns readable the moment its process ends, reaped or not."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                while not self._over.is_set():
                    if select.select([fd], [], [], 0.5)[0]:
                        self.deaths[pid] = monotonic()
                        return
            finally:
                os.close(fd)

    # ------------------------------------------------------------ afterwards
    def slowest(self) -> float:
        """Seconds of the longest round."""
        return max((sample.answered - sample.sent for sample in self.samples), default=float("nan"))

    def problems(self) -> list[str]:
        """Every answer that was untrue, and how often there was none."""
        failures = (
            [f"{len(self.failures)} rounds without an answer, first: {self.failures[0]}"] if self.failures else []
        )
        return failures + judge(self.samples, self.deaths)


def is_down(pid: int, sample: Sample) -> bool:
    """Whether health admits that the engine of this pid is gone, or still speaks of it."""
    return not sample.health or sample.pid == pid


def judge(samples: Sequence[Sample], deaths: dict[int, float]) -> list[str]:
    """Between an engine's end and the first sign of the next, all must say down; while one lives and was said to be
    up, all must say up."""
    problems = []
    for pid, died in deaths.items():
        later = [s for s in samples if s.sent > died + DEAD_SECONDS]
        down = list(takewhile(partial(is_down, pid), later))
        if len(down) < len(later):
            down = down[:-1]  # the next engine may have come while it was asked
        for s in down:
            if s.health or s.ready or s.metric:
                problems.append(f"{s.sent - died:.2f} s after engine {pid} had ended: {s.words}")
    for before, s, after in zip(samples, samples[1:], samples[2:], strict=False):
        is_steady = before.health and after.health and before.pid == s.pid == after.pid
        if is_steady and deaths.get(s.pid or 0, float("inf")) > after.answered and not (s.ready and s.metric):
            problems.append(f"engine {s.pid} lived: {s.words}")
    return problems
