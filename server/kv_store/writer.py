"""Writes what the engine copied out, in a thread of its own.

Owns the queue, which is bounded in bytes, and how much may be written an hour. `offer` never waits: where the disk
can't keep up, is full or has had its share, a checkpoint is refused, and the caller makes checkpoints rarer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.kv_store.allowance import Allowance
from server.kv_store.copies import FileContent
from server.kv_store.files.folder import Name
from server.kv_store.files.index import Entry
from server.kv_store.files.keys import KeyChain
from server.kv_store.files.record import VERSION, Buffer, Head, Kind
from server.kv_store.store import Store

QUEUE_BYTES = 64 << 20  # at a slow disk's 50 MB/s a little over a second: what a death may cost on top
PAUSE_SECONDS = 10.0  # after a failed write
LOOK_SECONDS = 5.0  # between two looks at the folder while nothing is written

log = logging.getLogger("marathon.engine")


@dataclass(frozen=True, slots=True)
class QueuedFile:
    """One file to be written: its head, its arrays' bytes, and the file that it makes needless."""

    head: Head
    origin: bytes  # the key at its start
    data: tuple[Buffer, ...]
    replaces: Name | None = None

    @classmethod
    def of(
        cls,
        root: bytes,
        chain: KeyChain,
        place: tuple[Kind, int, int],
        content: FileContent,
        replaces: Name | None = None,
    ) -> QueuedFile:
        """A file of the row with this chain; `place`: its kind, start and end."""
        kind, start, end = place
        head = Head(
            version=VERSION,
            root=root,
            kind=kind,
            start=start,
            end=end,
            key=chain.key(end),
            ids=chain.repeated(start, end),
            parts=content.parts,
        )
        return cls(head, chain.key(start), content.data, replaces)

    @property
    def name(self) -> Name:
        head = self.head
        parts = sum(1 << part.part for part in head.parts)
        return Name(head.kind, head.start, head.end, self.origin, head.key, parts)

    @property
    def size(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in self.data)


class KVWriter:
    """Owned by the engine's main thread, which offers and closes."""

    def __init__(
        self,
        store: Store,
        allowance: Allowance,
        clock: Callable[[], float] = time.monotonic,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """`after` is called in the writer's thread behind each file."""
        self._store = store
        self._after = after
        self._clock = clock
        self._allowance = allowance
        self._waiting: deque[tuple[Entry, QueuedFile]] = deque()
        self._queued = 0  # bytes
        self._resumes_at = -1.0
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="kv writer", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ main thread
    @property
    def room(self) -> int:
        """Bytes that the queue would take. While it is empty it takes one checkpoint whatever its size."""
        return max(0, QUEUE_BYTES - self._queued)

    def refusal(self, size: int) -> str:
        """Say why so many bytes wouldn't be taken now; "" if they would."""
        if self._clock() < self._resumes_at:
            return "disk"
        if self._queued and self._queued + size > QUEUE_BYTES:
            return "queue"
        if self._allowance.left < size:
            return "hour"
        return ""

    def offer(self, records: Sequence[QueuedFile]) -> None:
        """Take records to be written in this order; those that are there already are left out."""
        for record in records:
            entry = self._store.expect(record.name, record.size)
            if entry is None:
                continue
            self._allowance.spend(record.size)
            with self._changed:
                self._waiting.append((entry, record))
                self._queued += record.size
                self._changed.notify()

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, but no longer than that; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued, seconds)

    def close(self, seconds: float) -> None:
        """Write what is queued, within `seconds`, and end the thread; what is left is given up."""
        self.flush(seconds)
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(seconds)

    # ------------------------------------------------------------ its own thread
    def _run(self) -> None:
        while True:
            with self._changed:
                news = self._changed.wait_for(lambda: self._waiting or self._ending, LOOK_SECONDS)
                if self._ending:
                    return
                entry, record = self._waiting.popleft() if news else (None, None)
            if entry is None or record is None:
                self._look()
                continue
            self._write(entry, record)
            self._after()
            with self._changed:
                self._queued -= record.size
                self._changed.notify_all()

    def _look(self) -> None:
        """So that what is shown of the folder is true while nothing is written; a write says why there can be none."""
        with contextlib.suppress(OSError):
            self._store.look()

    def _write(self, entry: Entry, record: QueuedFile) -> None:
        try:
            if self._clock() < self._resumes_at:
                raise OSError("the disk has just refused another file")
            self._store.write(entry, record.head, record.data)
        except OSError as error:
            self._store.forget(entry)
            self._pause(error)
            return
        if record.replaces is not None:
            self._store.remove(record.replaces)

    def _pause(self, error: OSError) -> None:
        """What follows in the queue builds upon what failed, so it fails as well, without another line."""
        self._store.counts.skip("disk")
        if self._clock() >= self._resumes_at:
            log.warning("KV isn't written to disk for %.0f s: %s", PAUSE_SECONDS, error.strerror or error)
            self._resumes_at = self._clock() + PAUSE_SECONDS
