"""The file of a journal: whose it is, whether it can be read, and what becomes of one that can't.

Owns the lock, which two servers never share, the checks before a file is used, and the setting aside of files that are
damaged or something else. Runs in a worker thread at start. Never writes to a file of another kind or of a newer
version.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
import time
from pathlib import Path

from server.config.file_lock import try_lock
from server.journal import tables

LOCK_SECONDS = 3.0  # for a server that ends to let go
CHECK_SECONDS = 1.0  # of a start that a look through the whole file may take
FAULTS = {"damaged": "is a damaged journal", "foreign": "is no journal"}
_PART_NAMES = ("", "-wal", "-shm")
_RETRY_SECONDS = 0.05
_SQLITE = b"SQLite format 3\x00"
_HEADER = struct.Struct(">16s44xI4xI")  # of a database: mark, user_version, application_id

log = logging.getLogger("marathon.journal")


class Unusable(Exception):
    """There is no writing to this journal; the message is a clause that says why."""


class Lock:
    """Held by the one server that writes; the system lets go of it when that ends, in whatever way."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".lock")
        self._file: int | None = None

    def take(self, seconds: float) -> None:
        """Wait for it for at most `seconds`. Raises Unusable, OSError."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + seconds
        while not try_lock(file):
            if time.monotonic() >= end:
                holder = os.read(file, 20).decode(errors="replace").strip()
                os.close(file)
                raise Unusable(f"another server (process {holder or 'unknown'}) uses it")
            time.sleep(_RETRY_SECONDS)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self._file = file

    def let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Whereabouts:
    """Whether the file that a connection writes to is still the one at its path."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._path = str(connection.execute("PRAGMA database_list").fetchone()[2])
        self._file = self._there()

    def check(self) -> None:
        """Raises FileGone once the file was deleted or moved: SQLite writes on, where no server looks later."""
        if self._there() != self._file:
            raise FileGone("the file was deleted or moved while the server ran; start the server again")

    def _there(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


class FileGone(sqlite3.OperationalError):
    """What is written to the open file can't be found again."""


def is_locked(path: Path) -> bool:
    """Whether a server uses the journal now."""
    lock = Lock(path)
    if not lock.path.exists():
        return False
    try:
        lock.take(0)
    except Unusable:
        return True
    lock.let_go()
    return False


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The journal at `path`, made where there is none; what is no journal, or a damaged one, is set aside first.

    Raises Unusable, OSError, sqlite3.Error. The caller holds the lock.
    """
    path.touch(mode=0o600)
    if (fault := _fault(path)) is not None:
        aside = set_aside(path, fault)
        log.error("%s %s; it is kept as %s and a new journal begins", path, FAULTS[fault], aside.name)
        path.touch(mode=0o600)
    connection = tables.connect(path)
    try:
        tables.prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def set_aside(path: Path, fault: str) -> Path:
    """Rename the file, with what belongs to it. Raises OSError."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.{fault}-{stamp}")
    for part in _PART_NAMES:
        there = path.with_name(path.name + part)
        if there.exists():
            there.rename(aside.with_name(aside.name + part))
    return aside


def _fault(path: Path) -> str | None:
    """Why the file is to be set aside, a key of `FAULTS`. Raises Unusable for a newer one, OSError, sqlite3.Error."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head:
        return None
    if len(head) < _HEADER.size:
        return "foreign"
    mark, version, application = _HEADER.unpack(head)
    if mark != _SQLITE:
        return "foreign"
    if application == tables.APPLICATION:
        _refuse_newer(version)  # before SQLite opens it, which may change it
    try:
        return _fault_inside(path)
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return "damaged"
        raise


def is_damage(error: sqlite3.Error) -> bool:
    """Whether SQLite says that the file isn't what it wrote."""
    return error_name(error).startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def error_name(error: sqlite3.Error) -> str:
    """SQLite's name of the error; errors of Python's module itself have none."""
    return getattr(error, "sqlite_errorname", "")


def _refuse_newer(version: int) -> None:
    if version > tables.VERSION:
        raise Unusable(f"a newer Marathon wrote it (version {version}; this one knows {tables.VERSION})")


def _fault_inside(path: Path) -> str | None:
    connection = tables.connect(path)
    try:
        if tables.application(connection) != tables.APPLICATION and not _is_empty(connection):
            return "foreign"
        _refuse_newer(tables.version(connection))
        return look_through(connection, CHECK_SECONDS)
    finally:
        connection.close()


def _is_empty(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0)


def look_through(connection: sqlite3.Connection, seconds: float) -> str | None:
    """ "damaged", or None where nothing was found within `seconds`. Raises sqlite3.DatabaseError."""
    end = time.monotonic() + seconds
    connection.set_progress_handler(lambda: int(time.monotonic() > end), 10_000)
    try:
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            return "damaged"
    except sqlite3.OperationalError as error:
        if error_name(error) != "SQLITE_INTERRUPT":
            raise
    finally:
        connection.set_progress_handler(None, 0)
    return None
