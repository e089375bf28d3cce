"""Appends the newest positions of rows to a log on disk, in a thread of its own.

Owns the segments of the log: which one is appended to, which rows still need which, and the queue, which is bounded in
bytes. `append` never waits: where the disk can't keep up it is refused, and rows have that much more to read after a
death. The engine's main thread appends and says what pieces hold by now; a segment that no row needs is removed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import cast

from server.kv_store.allowance import Allowance
from server.kv_store.files import tail_log
from server.kv_store.files.record import Buffer, PartHead
from server.kv_store.files.tail_log import RowSpan
from server.kv_store.store import Store
from server.kv_store.writer import PAUSE_SECONDS

QUEUE_BYTES = 16 << 20
SEGMENT_BYTES = 16 << 20  # after which another one is begun
SPARE_RECORDS = 2  # whose memory is kept: one is copied while another is written
SHARE = 0.5  # of the bytes that may be written at once: the rest is left to pieces

log = logging.getLogger("marathon.engine")


@dataclass(frozen=True, slots=True)
class TailRecord:
    """The newest positions of some rows of a batch and the states behind them, as copied."""

    rows: tuple[RowSpan, ...]
    parts: tuple[PartHead, ...]
    data: tuple[Buffer, ...]  # views are of `TailWriter.memory`

    @property
    def size(self) -> int:
        return sum(map(len, self.data))


@dataclass(slots=True)
class _Segment:
    path: Path
    size: int = 0
    rows: set[int] = field(default_factory=set)  # that have positions in it which no piece holds


class TailWriter:
    """Owned by the engine's main thread."""

    def __init__(self, store: Store, folder: Path, allowance: Allowance) -> None:
        """`allowance`: shared with the pieces' writer."""
        self._store = store
        self._folder = folder
        self._allowance = allowance
        self._older: list[_Segment] = []
        self._number = time.time_ns()  # of the segment; counted from here on, since a clock may be set back
        self._segment = _Segment(tail_log.segment(folder, self._number))
        self._offered = self._written = 0  # bytes; each is changed by one thread alone
        self._worked = self._charged = 0.0  # the same of CPU seconds that the thread took, and of those asked for
        self._resumes_at = 0.0
        self._jobs: SimpleQueue[tuple[Path, TailRecord | None] | None] = SimpleQueue()
        self._spare: SimpleQueue[bytearray] = SimpleQueue()
        self._thread = Thread(target=self._run, name="kv tail", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ main thread
    @property
    def takes(self) -> bool:
        """Whether the disk keeps up, and may take more."""
        keeps_up = self._offered - self._written < QUEUE_BYTES and time.monotonic() >= self._resumes_at
        return keeps_up and self._allowance.is_ample(SHARE)

    def charge(self) -> float:
        """CPU seconds of its thread since the last call. It shares the interpreter with the steps, and where the model
        runs on the CPU its core too, so that they count as the steps' own."""
        worked = self._worked
        seconds = worked - self._charged
        self._charged = worked
        return seconds

    def memory(self, size: int) -> bytearray:
        """Memory for at least so many bytes of the next record: that of one which is written already, if there is any.
        The kernel takes longer to give a process new pages than it takes to fill them."""
        with contextlib.suppress(Empty):
            spare = self._spare.get_nowait()
            if len(spare) >= size:
                return spare
        return bytearray(size)

    def append(self, record: TailRecord) -> None:
        """Append a record behind all others."""
        if self._segment.size > SEGMENT_BYTES:
            self._begin_segment()
        self._segment.size += record.size
        self._segment.rows.update(row.seq for row in record.rows)
        self._offered += record.size
        self._allowance.spend(record.size)
        self._jobs.put((self._segment.path, record))

    def _begin_segment(self) -> None:
        self._older.append(self._segment)
        self._number += 1
        self._segment = _Segment(tail_log.segment(self._folder, self._number))

    def release(self, seq: int) -> None:
        """A row has gone, or pieces hold all that was appended of it."""
        self._segment.rows.discard(seq)
        if self._segment.size and not self._segment.rows:
            self._begin_segment()
        for segment in self._older:
            segment.rows.discard(seq)
        for segment in [segment for segment in self._older if not segment.rows]:
            self._older.remove(segment)
            self._jobs.put((segment.path, None))

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, but no longer than that; whether it is."""
        until = time.monotonic() + seconds
        while self._written < self._offered and time.monotonic() < until:
            time.sleep(0.001)
        return self._written >= self._offered

    def close(self, seconds: float) -> None:
        """Write what is queued, within `seconds`, and end the thread. The log stays for the next engine."""
        self.flush(seconds)
        self._jobs.put(None)
        self._thread.join(seconds)

    # ------------------------------------------------------------ its own thread
    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            path, record = job
            if record is None:
                with contextlib.suppress(OSError):  # of a disk that takes nothing any more: the next start sees to it
                    path.unlink()
                continue
            self._write(path, record)
            self._worked = time.thread_time()
            self._keep_memory(record)
            self._written += record.size
        self._store.end_appending()

    def _keep_memory(self, record: TailRecord) -> None:
        for data in record.data:
            if isinstance(data, memoryview) and self._spare.qsize() < SPARE_RECORDS:
                self._spare.put(cast(bytearray, data.obj))

    def _write(self, path: Path, record: TailRecord) -> None:
        described = tail_log.head(self._store.root, record.rows, record.parts)
        try:
            self._store.append(path, tail_log.packed(described, record.data))
        except OSError as error:
            self._store.counts.skip("disk")
            log.debug("the newest positions aren't logged for %.0f s: %s", PAUSE_SECONDS, error)
            self._resumes_at = time.monotonic() + PAUSE_SECONDS
