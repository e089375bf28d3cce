"""Which stored answers are given up, and when.

Owns that choice: by age, and by bytes the oldest first. Runs in the writer's thread, in small transactions between
those of others. Never takes an answer that isn't finished, nor one that is being read.
"""

from __future__ import annotations

import math
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

    def step(self, connection: sqlite3.Connection, now: float) -> bool:
        """Remove some of what is due. Returns whether more may be. Raises sqlite3.Error."""
        removed = self._remove_old(connection, self.retention.since(now))
        if not removed and tables.used_bytes(connection) > self.retention.bytes:
            removed = self._remove_for_room(connection)
        if removed:
            connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")  # `execute` gives back one page
        return removed

    def _remove_old(self, connection: sqlite3.Connection, before: float) -> bool:
        numbers = self._oldest(connection, before)
        if numbers:
            tables.transaction(connection, lambda: writing.remove(connection, numbers))
        return bool(numbers)

    def _remove_for_room(self, connection: sqlite3.Connection) -> bool:
        numbers = self._oldest(connection, math.inf)
        if numbers:
            tables.transaction(connection, lambda: self._make_room(connection, numbers))
        return bool(numbers)

    def _make_room(self, connection: sqlite3.Connection, numbers: list[int]) -> None:
        """One by one, since one may be as large as a thousand others."""
        for number in numbers:
            if tables.used_bytes(connection) <= self.retention.bytes * ENOUGH:
                return
            writing.remove(connection, [number])

    def _oldest(self, connection: sqlite3.Connection, before: float) -> list[int]:
        found = connection.execute(_OLDEST, (before, AT_ONCE + len(self.read))).fetchall()
        return [number for number, id in found if id not in self.read][:AT_ONCE]
