"""Which stored answers are given up, and when.

Owns that choice: by age, and by bytes the oldest first. Runs in the writer's thread, in small transactions between
those of others. Never takes an answer that isn't finished, nor one that is being read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass

from server.journal import tables, writing

AT_ONCE = 50  # records in one transaction
VACUUM_PAGES = 1000  # given back to the system at once
ENOUGH = 0.9  # of the limit that is kept when it is exceeded, so that not every answer costs another one

_OLDEST = "SELECT number, id FROM record WHERE ended IS NOT NULL AND ended < ? ORDER BY ended LIMIT ?"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long answers are kept, and how many bytes of them."""

    seconds: float
    bytes: int

    def since(self, now: float) -> float:
        """Answers that ended before this time have expired."""
        return now - self.seconds


@dataclass(slots=True)
class Expiry:
    """One journal's expiry; `read` are the ids that are being read."""

    retention: Retention
    read: Collection[str]
    _sinks_to: float | None = None  # bytes that a removal by size goes on to

    def step(self, connection: sqlite3.Connection, now: float) -> bool:
        """Remove some of what is due. Returns whether more may be. Raises sqlite3.Error."""
        if self._remove(connection, self.retention.since(now)):
            return True
        return self._is_too_large(connection) and self._remove(connection, now + 1)

    def _is_too_large(self, connection: sqlite3.Connection) -> bool:
        limit = self._sinks_to or self.retention.bytes
        self._sinks_to = None
        if tables.used_bytes(connection) <= limit:
            return False
        self._sinks_to = self.retention.bytes * ENOUGH
        return True

    def _remove(self, connection: sqlite3.Connection, before: float) -> bool:
        found = connection.execute(_OLDEST, (before, AT_ONCE + len(self.read))).fetchall()
        numbers = [number for number, id in found if id not in self.read][:AT_ONCE]
        if not numbers:
            return False
        tables.transaction(connection, lambda: writing.remove(connection, numbers))
        connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        return True
