"""The thread that writes a journal.

Owns the connection that writes, the order of changes, and the transactions that they are put into: whatever waits is
one transaction. A transaction is followed by a pause of ten times as long, at most 50 ms, so that writing takes a small
part of one core however quickly tokens come; a job that a caller waits for ends the pause. Jobs come from the event
loop and their results are called back there.

When nothing can be written, jobs that were marked as kept wait and are tried again each second, in their order; others
fail. Where none waits, a write that changes nothing is tried: who stores by default doesn't ask meanwhile. A token that
can't be written is handed on all the same: an answer under way isn't harmed by a full disk.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from server.errors import one_line
from server.faults import CommitFaults
from server.journal import place, reading, tables
from server.journal.expiry import Expiry
from server.journal.record import Status
from server.journal.writing import OpenRecords

PAUSE_FACTOR = 10.0  # pause after a transaction, by how long that took
PAUSE_SECONDS = 0.05  # longest
RETRY_SECONDS = 1.0  # between two tries of what couldn't be written
HOUSEKEEPING_SECONDS = 60.0  # between two looks for what has expired
COUNT_SECONDS = 1.0  # between two counts of what is stored, while that changes
_OF_THE_FILE = ("FULL", "READONLY", "IOERR", "CORRUPT", "NOTADB", "CANTOPEN", "BUSY", "LOCKED", "PERM", "AUTH")
_WORDS = {
    "SQLITE_FULL": "the disk is full",
    "SQLITE_READONLY": "the file can't be written",
    "SQLITE_CANTOPEN": "the file can't be opened",
    "SQLITE_BUSY": "another process holds it",
    "SQLITE_CORRUPT": "the file is damaged; it is set aside when the server starts again",
    "SQLITE_NOTADB": "the file is damaged; it is set aside when the server starts again",
}

log = logging.getLogger("marathon.journal")


class JournalCounts(Protocol):
    """What the metrics count, on the event loop."""

    def ended(self, status: Status) -> None: ...
    def committed(self, seconds: float) -> None: ...
    def failed(self) -> None: ...
    def unsaved(self, tokens: int) -> None: ...


@dataclass(slots=True)
class Job:
    """One change.

    Attributes:
        work: makes it, in a transaction; may be called again after one that was rolled back.
        done: gets the result, or the error, on the event loop.
        kept: is tried until it succeeds; `done` gets the error of the first try at once.
        tokens: how many it would save.
    """

    work: Callable[[sqlite3.Connection, OpenRecords], Any]
    done: Callable[[Any, Exception | None], None]
    kept: bool = False
    tokens: int = 0
    settled: bool = False


class Writer:
    """One thread over one connection. `start`, `submit` and `close` are called on the event loop."""

    def __init__(
        self, connection: sqlite3.Connection, counts: JournalCounts, faults: CommitFaults, expiry: Expiry
    ) -> None:
        self.fault: str | None = None  # why the last try to write failed
        self.bytes = tables.used_bytes(connection)
        self.stored = reading.counts(connection)
        self._connection = connection
        self._whereabouts = place.Whereabouts(connection)
        self._counts = counts
        self._faults = faults
        self._expiry = expiry
        self._records = OpenRecords()
        self._jobs: deque[Job] = deque()
        self._backlog: list[Job] = []
        self._urgent = self._closing = self._idle = False
        self._changed = threading.Condition()
        self._ready_at = self._retry_at = 0.0
        self._housekeeping_at = self._count_at = time.monotonic()
        self._changes = False  # since the last count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    # ---------------------------------------------------------------- on the event loop
    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def submit(self, *jobs: Job, urgent: bool = True) -> None:
        """Hand over changes, in order. Those that aren't urgent may wait for the end of a pause."""
        with self._changed:
            self._jobs.extend(jobs)
            self._urgent = self._urgent or urgent
            if urgent or self._idle:
                self._changed.notify()

    def close(self) -> None:
        """Write what waits and end the thread. Blocks; call it from a worker thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        while (jobs := self._take()) is not None:
            if jobs:
                self._write(jobs)
            elif self.fault is not None and time.monotonic() >= self._retry_at:
                self._retry()
            self._keep_house()
        if self._backlog:
            self._retry()
        self._connection.close()

    def _take(self) -> list[Job] | None:
        """The jobs that wait, when there are some and the pause is over; [] when something else is due; None: end."""
        with self._changed:
            while not self._jobs and not self._closing:
                self._idle = True
                arrived = self._changed.wait(self._seconds_to_next())
                self._idle = False
                if not arrived and not self._jobs:
                    return []
            while not self._urgent and not self._closing and (left := self._ready_at - time.monotonic()) > 0:
                self._changed.wait(left)
            jobs = list(self._jobs)
            self._jobs.clear()
            self._urgent = False
            if not jobs and self._closing:
                return None
            return jobs

    def _seconds_to_next(self) -> float:
        due = self._housekeeping_at
        if self._changes:
            due = min(due, self._count_at)
        if self.fault is not None:
            due = min(due, self._retry_at)
        return max(0.0, due - time.monotonic())

    def _write(self, jobs: list[Job]) -> None:
        if self._backlog:  # order counts among kept ones; the others go by themselves and show whether it works again
            self._backlog += [job for job in jobs if job.kept]
            self._hand_back([(job, None, sqlite3.OperationalError(self.fault)) for job in jobs if job.kept])
            jobs = [job for job in jobs if not job.kept]
            if not jobs:
                if time.monotonic() >= self._retry_at:
                    self._retry()
                return
        self._try(jobs)
        if self._backlog and self.fault is None:
            self._retry()

    def _retry(self) -> None:
        jobs = self._backlog or [Job(lambda connection, _: tables.write_nothing(connection), lambda *_: None)]
        self._backlog = []
        self._try(jobs)

    def _try(self, jobs: list[Job]) -> None:
        began = time.perf_counter()
        try:
            results = self._commit(jobs)
        except Exception as error:  # whatever it is: the thread has to go on for the others
            self._records.forget()
            if len(jobs) > 1 and not _is_of_the_file(error):
                for job in jobs:
                    self._try([job])
            else:
                self._failed(jobs, error)
            return
        seconds = time.perf_counter() - began
        self._ready_at = time.monotonic() + min(seconds * PAUSE_FACTOR, PAUSE_SECONDS)
        self._changes = True
        self._works_again()
        self._hand_back([(job, result, None) for job, result in zip(jobs, results, strict=True)], seconds)

    def _commit(self, jobs: list[Job]) -> list[Any]:
        self._whereabouts.check()
        results: list[Any] = []
        tables.transaction(self._connection, lambda: self._apply(jobs, results))
        self._faults.after()
        return results

    def _apply(self, jobs: list[Job], results: list[Any]) -> None:
        for job in jobs:
            results.append(job.work(self._connection, self._records))
        self._faults.before()

    def _works_again(self) -> None:
        if self.fault is not None:
            log.info("the journal can be written again")
            self.fault = None

    def _failed(self, jobs: list[Job], error: Exception) -> None:
        words = _words(error)
        if isinstance(error, sqlite3.Error) and _is_of_the_file(error):
            if self.fault is None:
                log.error("the journal can't be written: %s; answers under way go on unsaved", words)
            self.fault = words
            self._backlog += [job for job in jobs if job.kept]
            self._retry_at = time.monotonic() + RETRY_SECONDS
        else:
            log.error("a change of the journal is left out: %s", words)
        self._call(self._counts.failed)
        self._hand_back([(job, None, error) for job in jobs])

    # ---------------------------------------------------------------- back to the event loop
    def _hand_back(self, ends: list[tuple[Job, Any, Exception | None]], seconds: float | None = None) -> None:
        """Settle each job once: with its first failure, or its success."""
        news = [end for end in ends if not end[0].settled]
        for job, _, _ in news:
            job.settled = True
        if news or seconds is not None:
            self._call(self._settle, news, seconds)

    def _settle(self, news: list[tuple[Job, Any, Exception | None]], seconds: float | None) -> None:
        if seconds is not None:
            self._counts.committed(seconds)
        for job, result, error in news:
            if error is not None and job.tokens:
                self._counts.unsaved(job.tokens)
            job.done(result, error)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended, and with it all who waited
            log.debug("the event loop has ended before the journal")

    # ---------------------------------------------------------------- what is due now and then
    def _keep_house(self) -> None:
        now = time.monotonic()
        try:
            if now >= self._housekeeping_at and not self._closing:
                self._housekeeping_at = now + HOUSEKEEPING_SECONDS
                self._whereabouts.check()
                self._expire(now)
            if self._changes and now >= self._count_at:
                self._count_at = now + COUNT_SECONDS
                self._count()
        except place.FileGone as error:
            self._failed([], error)
        except sqlite3.Error as error:
            log.warning("the journal can't be tidied: %s", _words(error))

    def _expire(self, now: float) -> None:
        if self._expiry.step(self._connection, time.time()):
            self._housekeeping_at = now
            self._changes = True

    def _count(self) -> None:
        self._changes = False
        self.bytes = tables.used_bytes(self._connection)
        self.stored = reading.counts(self._connection)


def _is_of_the_file(error: Exception) -> bool:
    if isinstance(error, place.FileGone):
        return True
    return isinstance(error, sqlite3.Error) and any(part in place.error_name(error) for part in _OF_THE_FILE)


def _words(error: Exception) -> str:
    """Why it failed, as a clause."""
    name = ""
    if isinstance(error, sqlite3.Error):
        name = place.error_name(error)
    known = [words for prefix, words in _WORDS.items() if name.startswith(prefix)]
    return (known or [one_line(error)])[0]
