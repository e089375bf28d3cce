"""The tables of a journal, and connections to them.

Owns the schema, its version and the migrations, and the pragmas that every connection needs. Runs in any thread: each
connection belongs to the thread that uses it. Never decides what becomes of a file that it can't read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

APPLICATION = 0x4D724A6C  # "MrJl", in the file's header
BUSY_SECONDS = 5.0  # another process, such as `marathon journal delete`, may write for a moment
WAL_BYTES = 16 * 2**20  # the log of changes is cut back to this after a checkpoint

_TABLES = """
CREATE TABLE record (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    created REAL NOT NULL,
    background INTEGER NOT NULL,
    stream INTEGER NOT NULL,
    endpoint TEXT NOT NULL,
    metadata TEXT NOT NULL,
    status TEXT NOT NULL,
    ended REAL
);
CREATE INDEX record_by_owner ON record (kind, owner, number);
CREATE INDEX record_by_status ON record (status, ended);
CREATE TABLE content (
    number INTEGER PRIMARY KEY,
    sequences BLOB NOT NULL,
    body BLOB NOT NULL,
    own_input BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE result (
    number INTEGER PRIMARY KEY,
    answer BLOB,
    error BLOB,
    checksum INTEGER NOT NULL
);
CREATE TABLE choice (
    number INTEGER NOT NULL,
    choice INTEGER NOT NULL,
    cached INTEGER,
    finish TEXT,
    PRIMARY KEY (number, choice)
) WITHOUT ROWID;
CREATE TABLE tokens (
    number INTEGER NOT NULL,
    choice INTEGER NOT NULL,
    first INTEGER NOT NULL,
    ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (number, choice, first)
) WITHOUT ROWID;
"""

# Each entry leads from the version of its place to the next. A released one never changes.
MIGRATIONS: tuple[str, ...] = (_TABLES,)
VERSION = len(MIGRATIONS)


def connect(path: Path, *, writable: bool = True) -> sqlite3.Connection:
    """A connection in autocommit mode; its user begins and ends transactions explicitly.

    Raises sqlite3.Error.
    """
    mode = "rw" if writable else "ro"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    if writable:
        # Deleted answers are overwritten: a journal holds what people wrote.
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA checkpoint_fullfsync = ON")  # of effect on macOS alone
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    return connection


def prepare(connection: sqlite3.Connection, migrations: tuple[str, ...] = MIGRATIONS) -> None:
    """Make the tables of a new file, or bring an older one up to date. Raises sqlite3.Error."""
    if version(connection) == 0:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute("PRAGMA journal_mode = WAL")
    for number in range(version(connection), len(migrations)):
        transaction(connection, partial(_migrate, connection, migrations[number], number + 1))


def _migrate(connection: sqlite3.Connection, statements: str, number: int) -> None:
    for statement in filter(str.strip, statements.split(";")):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {number}")


def transaction(connection: sqlite3.Connection, work: Callable[[], object]) -> None:
    """All of `work` or nothing. Raises what it raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        work()
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def roll_back(connection: sqlite3.Connection) -> None:
    """SQLite has rolled back by itself after some errors."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def write_nothing(connection: sqlite3.Connection) -> None:
    """Write the version that is there: a page of the file, with nothing in it that is new. Raises sqlite3.Error."""
    connection.execute(f"PRAGMA user_version = {version(connection)}")


def application(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA application_id").fetchone()[0])


def used_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the file that hold something."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
