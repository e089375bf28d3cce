"""The journal of one server: what is stored, changed and read.

Owns the way from the event loop to the two threads behind it, one that writes and one that reads, and the state that
people are shown. Runs on the event loop. A journal that can't be used never keeps the server from its other work: its
`state` says why, and what would have to be stored is refused with JournalUnavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from server import faults
from server.config.data_folder import JOURNAL, data_folder
from server.errors import JournalUnavailable, one_line
from server.journal import place, reading, tables, writing
from server.journal.expiry import Expiry, Retention
from server.journal.place import Lock, Unusable
from server.journal.reading import Query
from server.journal.record import Damage, Kind, NewTokens, Outcome, Record, Status, StoredTokens
from server.journal.state import Condition, JournalState
from server.journal.writer import Job, JournalCounts, Writer
from server.journal.writing import OpenRecords
from server.settings import Settings

DAY_SECONDS = 86400.0

Result = TypeVar("Result")

log = logging.getLogger("marathon.journal")


def journal_path(settings: Settings) -> Path | None:
    """The file that the settings mean; None where they switch it off."""
    if settings.journal == "off":
        return None
    if settings.journal is not None:
        return Path(settings.journal)
    return data_folder() / JOURNAL


class Journal:
    """Stored answers. `open` it before, and `close` it after anything else."""

    def __init__(self, settings: Settings, counts: JournalCounts) -> None:
        self.path = journal_path(settings)
        self._counts = counts
        self._spec = faults.parse(settings.faults)
        self._retention = Retention(settings.journal_days * DAY_SECONDS, settings.journal_bytes)
        self._held: Counter[str] = Counter()
        self._reason = "it isn't open"
        self._lock: Lock | None = None
        self._writer: Writer | None = None
        self._reads: sqlite3.Connection | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="journal-reads")
        self._appended: list[Job] = []  # of this turn of the event loop
        self._unsaved: dict[str, Outcome] = {}  # ends that couldn't be written yet

    # ---------------------------------------------------------------- open and close
    async def open(self) -> None:
        """Take the file, or say in one line why there is no storing."""
        if self.path is None:
            return
        try:
            await asyncio.to_thread(self._open, self.path)
        except Unusable as error:
            self._give_up(str(error))
        except (OSError, sqlite3.Error) as error:
            self._give_up(_words(error))
            self._reads = await asyncio.to_thread(_readable, self.path)
        if self._writer is not None:
            self._writer.start(asyncio.get_running_loop())

    def _open(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Lock(path)
        lock.take(place.LOCK_SECONDS)
        try:
            connection = place.open_for_writing(path)
            try:
                writing.try_out(connection)
                self._reads = tables.connect(path, writable=False)
                expiry = Expiry(self._retention, self._held)
                self._writer = Writer(connection, self._counts, faults.CommitFaults(self._spec), expiry)
            except BaseException:
                connection.close()
                raise
        except BaseException:
            lock.let_go()
            raise
        self._lock = lock

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        log.error("the journal %s can't be used: %s; answers aren't stored", self.path, reason)

    async def close(self) -> None:
        """Write what waits, and let go of the file. A second call does nothing."""
        self._flush()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
            self._reason = "the server is shutting down"
            self._writer = None
        if self._reads is not None:
            await self._in_reader(self._reads.close)
            self._reads = None
        self._reader.shutdown()
        if self._lock is not None:
            self._lock.let_go()

    # ---------------------------------------------------------------- state
    @property
    def fault(self) -> str | None:
        """Why nothing can be stored now, as far as is known; None where it can, or isn't wanted."""
        if self.path is None:
            return None
        if self._writer is None:
            return self._reason
        return self._writer.fault

    @property
    def is_on(self) -> bool:
        """New answers can be stored, as far as is known."""
        return self.path is not None and self.fault is None

    @property
    def state(self) -> JournalState:
        condition: Condition = "on"
        if self.path is None:
            condition = "off"
        elif self.fault is not None:
            condition = "unavailable"
        bytes, stored = 0, {}
        if self._writer is not None:
            bytes, stored = self._writer.bytes, self._writer.stored
        path = str(self.path) if self.path else None
        readers = sum(self._held.values())
        return JournalState(condition, self.fault, path, bytes, self._retention.bytes, stored, readers)

    # ---------------------------------------------------------------- a record's life
    async def add(self, record: Record) -> None:
        """Store a new record; it is committed on return. Raises JournalUnavailable."""
        await self._write(lambda connection, _: writing.add(connection, record))

    async def begin(self, id: str) -> None:
        """From queued to in_progress. An answer isn't harmed when that can't be written."""
        with contextlib.suppress(JournalUnavailable):
            await self._write(lambda connection, _: writing.begin(connection, id), kept=True)

    def tokens(self, id: str, generated: Sequence[Sequence[int]] | None = None) -> RecordTokens:
        """Where the ids of this record go; `generated` are those of each choice that are stored already."""
        return RecordTokens(self, id, [len(ids) for ids in generated or ()])

    def append(self, id: str, start: int, news: NewTokens, then: Callable[[], None]) -> None:
        """Store a choice's ids from the `start`-th on and call `then` once they are committed, or once it is known
        that they can't be for now."""
        if not self._appended:
            asyncio.get_running_loop().call_soon(self._flush)
        self._appended.append(
            Job(
                lambda connection, records: writing.append(connection, records, id, start, news),
                lambda result, error: then(),
                kept=True,
                tokens=len(news.tokens),
            )
        )

    def _flush(self) -> None:
        """What one message of the engine brought goes to the writer as one."""
        jobs = self._appended
        self._appended = []
        if self._writer is not None:
            self._writer.submit(*jobs, urgent=False)
        else:
            for job in jobs:
                job.done(None, None)

    async def finish(
        self,
        id: str,
        status: Status,
        *,
        answer: bytes | None = None,
        error: bytes | None = None,
        finishes: Sequence[str | None] = (),
        cached: Sequence[int | None] = (),
        ended: float | None = None,
    ) -> bool:
        """Decide how an answer ended. Returns False where that was decided before: nothing has changed then."""
        outcome = Outcome(
            status=status,
            ended=ended or time.time(),
            answer=answer,
            error=error,
            finishes=list(finishes),
            cached=list(cached),
        )
        try:
            counts = bool(await self._write(lambda c, records: writing.finish(c, records, id, outcome), kept=True))
        except JournalUnavailable:
            counts = await self._finish_unsaved(id, outcome)
        if counts:
            self._counts.ended(status)
        return counts

    async def _finish_unsaved(self, id: str, outcome: Outcome) -> bool:
        """It is written as soon as that is possible, and read from here until then."""
        if id in self._unsaved:
            return False
        self._unsaved[id] = outcome
        with contextlib.suppress(JournalUnavailable):
            record = await self._read(lambda connection: reading.find(connection, id, None))
            if record is None or record.is_final:
                del self._unsaved[id]
                return False
        return True

    async def delete(self, id: str, owner: str) -> bool:
        """Remove a record and all that belongs to it. False where this owner has none. Raises JournalUnavailable."""
        self._unsaved.pop(id, None)
        return bool(await self._write(lambda connection, records: writing.delete(connection, records, id, owner)))

    async def set_metadata(self, id: str, owner: str, metadata: dict[str, str]) -> bool:
        """False where this owner has no such record. Raises JournalUnavailable."""
        return bool(await self._write(lambda connection, _: writing.set_metadata(connection, id, owner, metadata)))

    async def fail_foreground(self, message: str) -> int:
        """At start: those that only their clients waited for have failed. Returns how many. Raises
        JournalUnavailable."""
        if all(record.background for record in await self.unfinished()):
            return 0  # so that a full disk is no error where nothing has to be written
        number = int(await self._write(lambda connection, _: writing.fail_foreground(connection, message)))
        for _ in range(number):
            self._counts.ended("failed")
        return number

    async def _write(self, work: Callable[[sqlite3.Connection, OpenRecords], Any], *, kept: bool = False) -> Any:
        if self._writer is None:
            raise self._unavailable()
        self._flush()  # what was appended before comes before
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if done.done():  # the one who asked has left
                return
            if error is not None:
                done.set_exception(self._unavailable())
            else:
                done.set_result(result)

        self._writer.submit(Job(work, settle, kept=kept))
        return await done

    def _unavailable(self) -> JournalUnavailable:
        if self.path is None:
            return JournalUnavailable("This server stores no answers: it runs with --journal off.", param="store")
        reason = self.fault or "the last change failed"
        return JournalUnavailable(f"The answer can't be stored: {reason}.", param="store")

    # ---------------------------------------------------------------- reads
    async def get(self, id: str, owner: str) -> Record | None:
        """The record, if it is this owner's and hasn't expired. Raises JournalUnavailable."""
        record = await self._read(lambda connection: reading.find(connection, id, owner, self._since()))
        return record and self._with_unsaved(record)

    async def ids(self, id: str) -> list[StoredTokens]:
        """What is committed of each choice. Raises JournalUnavailable."""
        return await self._read(lambda connection: reading.tokens(connection, id))

    async def page(
        self,
        kind: Kind,
        owner: str,
        *,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
        after: str | None = None,
        limit: int = 20,
        descending: bool = True,
        finished: bool = False,
    ) -> tuple[list[Record], bool]:
        """Records without body, own_input and sequences, and whether more follow.

        Raises InvalidValue for an `after` that this owner doesn't have, JournalUnavailable.
        """
        query = Query(kind, owner, model, metadata or {}, after, limit, descending, finished, self._since())
        records, more = await self._read(lambda connection: reading.page(connection, query))
        return [self._with_unsaved(record) for record in records], more

    async def unfinished(self) -> list[Record]:
        """Records that have to be continued, the oldest first. Raises JournalUnavailable."""
        if self._writer is None:
            return []
        return await self._read(reading.unfinished)

    @contextlib.contextmanager
    def hold(self, id: str) -> Iterator[None]:
        """Keep a record from expiry while it is read in parts: it has one reader more."""
        self._held[id] += 1
        try:
            yield
        finally:
            self._held[id] -= 1
            if not self._held[id]:
                del self._held[id]

    def _since(self) -> float:
        return self._retention.since(time.time())

    def _with_unsaved(self, record: Record) -> Record:
        if (outcome := self._unsaved.get(record.id)) is None:
            return record
        if record.is_final:
            del self._unsaved[record.id]
            return record
        return msgspec.structs.replace(record, **msgspec.structs.asdict(outcome))

    async def _read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        connection = self._reads
        if connection is None:
            raise self._unavailable()
        try:
            return await self._in_reader(lambda: work(connection))
        except (sqlite3.Error, Damage) as error:
            log.error("the journal can't be read: %s", one_line(error))
            raise JournalUnavailable(f"The stored answer can't be read: {one_line(error)}.") from None

    async def _in_reader(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)


class RecordTokens:
    """The way of one record's ids into the journal; counts them. `supervision.generation.TokenLog` by its shape."""

    def __init__(self, journal: Journal, id: str, counts: Sequence[int]) -> None:
        self._journal = journal
        self._id = id
        self._counts = dict(enumerate(counts))

    def append(self, news: NewTokens, then: Callable[[], None]) -> None:
        """Store news of a choice; `then` is called on the event loop once they may be shown."""
        start = self._counts.get(news.choice, 0)
        self._counts[news.choice] = start + len(news.tokens)
        self._journal.append(self._id, start, news, then)


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return (error.strerror or "the file can't be opened").lower()
    return one_line(error)


def _readable(path: Path) -> sqlite3.Connection | None:
    """A connection to a journal that can't be written, if it can be read."""
    try:
        connection = tables.connect(path, writable=False)
    except sqlite3.Error:
        return None
    try:
        if tables.application(connection) == tables.APPLICATION and tables.version(connection) == tables.VERSION:
            return connection
    except sqlite3.Error:
        log.debug("%s can't be read either", path)
    connection.close()
    return None
