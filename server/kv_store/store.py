"""The files of one folder: found, read, written and given up.

Owns the index and all access to the folder. The engine's main thread looks up, the reader's threads read, the writer's
thread writes; one lock keeps the index whole, and no file is opened while it is held. Whatever doesn't fit is dropped
with one line in the log: it is then read by prefill. A folder that is deleted or moved away meanwhile is made again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from server.kv_store.counts import Counts
from server.kv_store.files import folder, record
from server.kv_store.files.folder import FILE_MODE, FolderLock, Name
from server.kv_store.files.index import Entry, Index, Route
from server.kv_store.files.keys import KeyChain
from server.kv_store.files.record import Buffer, DamagedFile, Head

ROOM = 0.9  # share of the limit that is left in use once files had to go
SPARE_SHARE = 0.02  # of the disk that is left to others, and at most so many bytes
SPARE_BYTES = 1 << 30
SLICE = 1 << 18  # bytes written at a time to a disk that is slow on purpose
LOOK_SECONDS = 0.1  # between two looks at how full the disk is

log = logging.getLogger("marathon.engine")


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk as a fault makes it: so many bytes a second, or full."""

    bytes_per_second: float | None = None
    is_full: bool = False


class Store:
    """The kept caches of one model, in a folder that is shared with those of others."""

    def __init__(
        self,
        home: Path,
        lock: FolderLock,
        model: str,
        root: bytes,
        everything: int,
        limit: int,
        disk: Disk | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`lock`: of the folder `home`, which is held; `model`: its name for people; `limit`: bytes that all files in
        `home` may take; `everything`: a bit for each of the model's caches. Raises OSError if the folder can't be
        used."""
        self.counts = Counts()
        self.root = root
        self._home = home
        self._folder_lock = lock
        self._model = model
        self._folder = home / root.hex()
        self._limit = limit
        self._disk = disk or Disk()
        self._now = now
        self._lock = Lock()
        self._turn = Lock()  # of a disk that is slow on purpose
        self._appended: _OpenFile | None = None
        self._is_nearly_full = False
        self._looks_again = 0.0
        self._making = Lock()  # of the folder, anew
        self._times_made = 0
        self._index = Index(root, everything)
        folder.note_model(self._folder, model)
        self._device = home.stat().st_dev
        folder.sweep(home)
        for found in folder.files(home):
            entry = Entry(found.path, found.name, found.size, found.used)
            self._index.add(entry, is_own=found.path.parent == self._folder)

    # ------------------------------------------------------------ look up
    def find(self, chain: KeyChain, most: int) -> Route | None:
        """The longest prefix of at most `most` ids that can be read; None if there is none."""
        with self._lock:
            return self._index.find(chain, most)

    def reach(self, chain: KeyChain, limit: int, parts: int) -> int:
        """How far pieces with these caches reach, those about to be written included."""
        with self._lock:
            return self._index.reach(chain, limit, parts)

    def has_end(self, key: bytes, parts: int) -> bool:
        """Whether a piece with these caches ends there, written or about to be."""
        with self._lock:
            return self._index.has_end(key, parts)

    def has_state(self, key: bytes) -> bool:
        with self._lock:
            return self._index.has_state(key)

    @property
    def size(self) -> int:
        """Bytes that all files of the folder take."""
        return self._index.size

    @property
    def files(self) -> int:
        return len(self._index.entries)

    # ------------------------------------------------------------ read
    def touch(self, route: Route) -> None:
        """Note that these files were used, also for the next process that looks."""
        now = self._now()
        with self._lock:
            self._index.touch(route.entries, now)
        for entry in route.entries:
            with contextlib.suppress(OSError):
                os.utime(entry.path, (now, now))

    def read(self, entry: Entry, tokens: list[int], memory: memoryview) -> tuple[Head, list[memoryview]]:
        """Read a file that is to stand for a prefix of `tokens`; returns its head and each array's bytes, in `memory`,
        which has the file's size. Raises DamagedFile if it can't be used."""
        began = time.perf_counter()
        try:
            raw = _contents(entry.path, memory)
        except FileNotFoundError:
            raise DamagedFile("missing") from None
        except OSError as error:
            raise DamagedFile("unreadable", error.strerror or str(error)) from None
        head, data = record.unpack(raw)
        self._compare(head, entry.name, tokens)
        self._wait(len(raw))
        self.counts.read_bytes += len(raw)
        self.counts.read_seconds += time.perf_counter() - began
        return head, data

    def _compare(self, head: Head, name: Name, tokens: list[int]) -> None:
        """A file that was renamed or copied is whole, and yet not what is looked for."""
        found = (head.root, head.kind, head.start, head.end, head.key, sum(1 << part.part for part in head.parts))
        if found != (self.root, name.kind, name.start, name.end, name.key, name.parts):
            raise DamagedFile("other_tokens", "its head says something else than its name")
        if list(head.ids) != tokens[head.end - len(head.ids) : head.end]:
            raise DamagedFile("other_tokens", "its ids are others")

    def discard(self, entry: Entry, damage: DamagedFile) -> None:
        """Give up a file that can't be used."""
        self.counts.drop(damage.reason)
        log.warning("kept KV is read by prefill instead, %s is dropped: %s", entry.path.name, damage)
        self._remove([entry])

    # ------------------------------------------------------------ write
    def expect(self, name: Name, size: int) -> Entry | None:
        """Enter a file that is about to be written; None if there is one already."""
        path = self._folder / str(name)
        with self._lock:
            if path in self._index.entries:
                return None
            entry = Entry(path, name, size, self._now(), is_written=False)
            self._index.add(entry)
            return entry

    def forget(self, entry: Entry) -> None:
        """A file that was about to be written won't be."""
        with self._lock:
            self._index.drop(entry.path)

    def write(self, entry: Entry, head: Head, data: Sequence[Buffer]) -> None:
        """Write a file that was entered, beside its place and then into it, and make room for it. Raises OSError.

        It isn't forced out to the disk: it outlives this process, and after a power failure the checksum decides.
        """
        began = time.perf_counter()
        buffers = record.pack(head, data)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._make_room(size - entry.size)
        beside = entry.path.with_suffix(".part")
        try:
            self._write_out(beside, buffers)
            os.replace(beside, entry.path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        with self._lock:
            self._index.resize(entry, size)
        self.counts.written_bytes += size
        self.counts.write_seconds += time.perf_counter() - began

    def look(self) -> None:
        """Where the folder was deleted or moved away, forget its files and make it again. Raises OSError where it can't
        be made on the disk that it was on, or is another server's by now."""
        if self._is_there():
            return
        with self._making:
            if self._is_there():  # made by another thread meanwhile
                return
            self._forget_lost()
            folder.prepare(self._home)
            if self._home.stat().st_dev != self._device:
                raise OSError(errno.ENODEV, f"the disk of {self._home} is gone")
            if not self._folder_lock.is_there and not self._folder_lock.take_again():
                raise OSError(errno.EBUSY, f"{self._home} is in use by another server")
            folder.note_model(self._folder, self._model)
            self._times_made += 1
            log.warning("the folder %s was deleted or moved away; it is made again", self._folder)

    def _is_there(self) -> bool:
        return self._folder_lock.is_there and self._folder.is_dir()

    def _forget_lost(self) -> None:
        with self._lock:
            written = [path for path, entry in self._index.entries.items() if entry.is_written]
        lost = [path for path in written if not path.exists()]
        with self._lock:
            for path in lost:
                self._index.drop(path)

    def append(self, path: Path, buffers: Sequence[Buffer]) -> None:
        """Write behind what is in a file of the folder that isn't found by what it stands for. Raises OSError, and then
        leaves the file as it was: what follows a record that was cut would never be read."""
        began = time.perf_counter()
        self._need_room()
        file = self._appended_to(path)
        before = file.size
        try:
            self._put(file.stream, buffers)
        except OSError:
            with contextlib.suppress(OSError):
                file.stream.truncate(before)
            raise
        self.counts.written_bytes += sum(memoryview(buffer).nbytes for buffer in buffers)
        self.counts.write_seconds += time.perf_counter() - began

    def _appended_to(self, path: Path) -> _OpenFile:
        if self._appended is None or not self._appended.leads_to(path, self._times_made):
            self.end_appending()
            self._appended = _OpenFile(path, self._times_made, self._opened(path, os.O_APPEND))
        return self._appended

    def end_appending(self) -> None:
        """Close the file that was appended to; the next record opens it again."""
        if self._appended is not None:
            self._appended.stream.close()
            self._appended = None

    def _write_out(self, path: Path, buffers: Sequence[Buffer]) -> None:
        self._need_room()
        with self._opened(path, os.O_TRUNC) as stream:
            self._put(stream, buffers)

    def _opened(self, path: Path, mode: int) -> io.FileIO:
        try:
            return _open(path, mode)
        except FileNotFoundError:  # the folder has gone since it was looked at
            self.look()
            return _open(path, mode)

    def _put(self, stream: io.FileIO, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                written = stream.write(view[:SLICE]) if self._disk.bytes_per_second else stream.write(view)
                self._wait(written)
                view = view[written:]

    def _need_room(self) -> None:
        """Raises OSError where the disk is nearly full, or was when it was looked at."""
        now = time.monotonic()
        if now >= self._looks_again:
            self.look()
            usage = shutil.disk_usage(self._home)
            self._is_nearly_full = usage.free < min(SPARE_BYTES, SPARE_SHARE * usage.total)
            self._looks_again = now + LOOK_SECONDS
        if self._disk.is_full or self._is_nearly_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _wait(self, size: int) -> None:
        """Take the time that the disk needs for so many bytes, whatever else waits for it."""
        if self._disk.bytes_per_second:
            with self._turn:
                time.sleep(size / self._disk.bytes_per_second)

    # ------------------------------------------------------------ give up
    def _make_room(self, more: int) -> None:
        """Give up files until `more` bytes than all have now fit the limit, and some more, so that it isn't done for
        each."""
        excess = self._index.size + more - self._limit
        if excess <= 0:
            return
        with self._lock:
            victims = self._index.victims(excess + int((1 - ROOM) * self._limit))
        self.counts.evicted += len(victims)
        self._remove(victims)

    def remove(self, name: Name) -> None:
        """Give up a file that another one makes needless."""
        entry = self._index.entries.get(self._folder / str(name))
        if entry is not None and entry.is_written:
            self._remove([entry])

    def _remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            with self._lock:
                self._index.drop(entry.path)
            with contextlib.suppress(OSError):
                entry.path.unlink(missing_ok=True)


def _contents(path: Path, memory: memoryview) -> memoryview:
    """Read a regular file of the size of `memory` into it. Raises OSError, and DamagedFile for one that has changed."""
    stream, size = folder.open_file(path)
    with stream:
        if size != len(memory):
            raise DamagedFile("format", f"{size} bytes in the place of {len(memory)}")
        done = 0
        while done < len(memory) and (read := stream.readinto(memory[done:])):
            done += read
        return memory[:done]


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file that is kept open, as one record after the other is appended."""

    path: Path
    made: int  # how often the folder had been made again
    stream: io.FileIO

    def leads_to(self, path: Path, made: int) -> bool:
        """Whether it is the file with that path, and still there: the folder may have been cleared."""
        return (self.path, self.made) == (path, made) and os.fstat(self.stream.fileno()).st_nlink > 0

    @property
    def size(self) -> int:
        return os.fstat(self.stream.fileno()).st_size


def _open(path: Path, mode: int) -> io.FileIO:
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | mode | os.O_CLOEXEC, FILE_MODE), "wb")
