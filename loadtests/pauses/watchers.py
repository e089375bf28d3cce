"""Threads that look at a server all the time and note the longest wait: a reader of a stream, a caller of /live.

Each owns its connection. They wait in system calls nearly always, so that they hardly hold each other up.
"""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import suppress
from time import perf_counter, sleep

LIVE_SECONDS = 0.01  # between two questions
SECONDS = 180.0  # for one answer
ENDLESS = {"model": "default", "prompt": [5, 6, 7], "max_tokens": 30_000, "ignore_eos": True, "stream": True}


class Watcher:
    """A thread that looks until it is left. Use as a context manager.

    Attributes:
        longest: seconds of the longest wait since it was set to 0.
        seen: signs of life.
    """

    def __init__(self, port: int) -> None:
        self.longest = 0.0
        self.seen = 0
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self) -> None:
        """Until there is nothing more to see, or `left`."""
        raise NotImplementedError

    @property
    def left(self) -> bool:
        return self._left.is_set()

    def note(self, since: float) -> float:
        """A sign of life that has been waited for since then; the time now."""
        now = perf_counter()
        self.longest = max(self.longest, now - since)
        self.seen += 1
        return now

    def _run(self) -> None:
        while not self.left:
            with suppress(OSError, http.client.HTTPException):
                self.look()
            self._connection.close()

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join(SECONDS)


class StreamWatcher(Watcher):
    """Reads one long answer after the other. The wait for the first event of each isn't noted."""

    def look(self) -> None:
        self._connection.request("POST", "/v1/completions", json.dumps(ENDLESS))
        answer = self._connection.getresponse()
        last = None
        while not self.left and (line := answer.readline()):
            if line.startswith(b"data: {"):
                last = self.note(last or perf_counter())


class LiveWatcher(Watcher):
    """Asks `GET /live` again and again."""

    def look(self) -> None:
        while not self.left:
            began = perf_counter()
            self._connection.request("GET", "/live")
            self._connection.getresponse().read()
            self.note(began)
            sleep(LIVE_SECONDS)
