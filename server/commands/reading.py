"""How far a question's prompt is read, shown in a terminal until its answer begins.

Owns one line on stderr and the thread that renews it, which asks /status now and then. Shows nothing in a pipe, nothing
in the first second, and nothing where /status can't be had.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, TextIO

import httpx

from server.commands.remote import Remote
from server.status.verdict import duration
from server.telemetry.progress_bar import ProgressBar, cells, is_terminal

FIRST_SECONDS = 1.0
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 5.0
NEAR_SECONDS = 2.0  # by which the age of the question's row may differ from the time that has passed here
STATES = {
    "waiting": "waiting for room beside other answers",
    "resuming": "the engine ended; the answer goes on in the next one",
}


class ReadingBar:
    """The line of one question. Use as a context manager; `stop` may be called early and often, from one thread."""

    def __init__(self, remote: Remote, aside: TextIO) -> None:
        self._remote = remote
        self._is_shown_to_people = is_terminal(aside)
        self._line = ProgressBar(aside)
        self._over = threading.Event()
        self._shown = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ReadingBar:
        if self._is_shown_to_people:
            self._thread = threading.Thread(target=self._watch, name="reading", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the line; whatever is printed next begins where it stood."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        if self._shown:
            self._write("")

    def _watch(self) -> None:
        began = time.monotonic()
        pause = FIRST_SECONDS
        with self._remote.client(ANSWER_SECONDS) as client:
            while not self._over.wait(pause):
                pause = LOOK_SECONDS
                row = _row(client, time.monotonic() - began)
                if row is not None and not self._over.is_set():
                    self._write(words(row))

    def _write(self, text: str) -> None:
        self._shown = bool(text)
        self._line.draw(text)


def words(row: dict[str, Any]) -> str:
    """What a row is at, on one line; empty for one that is being answered."""
    if row["state"] == "reading" and row["to_read"]:
        done = row["read"] or 0
        total = row["to_read"]
        return f"reading [{cells(done / total)}] {done:,} of {total:,} tokens{_pace(row)}"
    return STATES.get(row["state"], "")


def _pace(row: dict[str, Any]) -> str:
    """How fast, and how long that will take; empty while it isn't known, or an older server doesn't say."""
    pace = row.get("read_per_second")
    left = row.get("read_seconds_left")
    if not pace or left is None:
        return ""
    return f", {pace:,.0f}/s, {duration(left)} left"


def _row(client: httpx.Client, seconds: float) -> dict[str, Any] | None:
    """The row of the question that was asked so many seconds ago: the chat that is as old."""
    try:
        rows = client.get("/status").raise_for_status().json()["status"]["rows"]
        chats = [row for row in rows if row["endpoint"] == "chat"]
        found: dict[str, Any] = min(chats, key=lambda row: abs(row["age_seconds"] - seconds))
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    if abs(found["age_seconds"] - seconds) > NEAR_SECONDS:
        return None
    return found
