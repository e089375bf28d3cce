"""Queries of a journal.

Owns every SELECT that gives records. Runs in the thread that owns the connection: the server's reader, or a command.
Changes nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.errors import InvalidValue
from server.journal import record as codec
from server.journal.record import FINAL, UNFINISHED, Damage, Kind, Record, StoredTokens

_FACTS = "number, id, kind, owner, model, fingerprint, created, background, stream, endpoint, metadata, status, ended"
_SHOWN = f"SELECT {_FACTS} FROM record"

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Query:
    """Which records a list has; None is any. `after` is the id that the page begins after."""

    kind: Kind | None = None
    owner: str | None = None
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    after: str | None = None
    limit: int = 20
    descending: bool = True
    finished: bool = False
    since: float = 0.0  # answers that ended before have expired


def find(connection: sqlite3.Connection, id: str, owner: str | None, since: float = 0.0) -> Record | None:
    """The whole record, if it is this owner's (None: anyone's) and hasn't expired. Raises Damage, sqlite3.Error."""
    row = connection.execute(f"{_SHOWN} WHERE id = ? AND (ended IS NULL OR ended >= ?)", (id, since)).fetchone()
    if row is None or owner not in (None, row[3]):
        return None
    return _whole(connection, row)


def unfinished(connection: sqlite3.Connection) -> list[Record]:
    """Records that have to be continued, the oldest first; damaged ones are left out."""
    rows = connection.execute(f"{_SHOWN} WHERE status IN (?, ?) ORDER BY number", UNFINISHED).fetchall()
    return list(_sound(connection, rows))


def _sound(connection: sqlite3.Connection, rows: list[Row]) -> Iterator[Record]:
    for row in rows:
        try:
            yield _whole(connection, row)
        except Damage:
            continue


def page(connection: sqlite3.Connection, query: Query) -> tuple[list[Record], bool]:
    """Records without what their requests were made of, and whether more follow. Raises InvalidValue, Damage."""
    clauses, values = _conditions(connection, query)
    order = "DESC" if query.descending else "ASC"
    where = " AND ".join(clauses)
    rows = connection.execute(
        f"{_SHOWN} WHERE {where} ORDER BY number {order} LIMIT ?", (*values, query.limit + 1)
    ).fetchall()
    return [_with_result(connection, row) for row in rows[: query.limit]], len(rows) > query.limit


def _conditions(connection: sqlite3.Connection, query: Query) -> tuple[list[str], list[Any]]:
    clauses = ["(ended IS NULL OR ended >= ?)"]
    values: list[Any] = [query.since]
    for name in ("kind", "owner", "model"):
        if (value := getattr(query, name)) is not None:
            clauses.append(f"{name} = ?")
            values.append(value)
    for key, value in query.metadata.items():
        clauses.append("EXISTS (SELECT 1 FROM json_each(metadata) AS m WHERE m.key = ? AND m.value = ?)")
        values += (key, value)
    if query.finished:
        clauses.append(f"status IN ({', '.join('?' * len(FINAL))})")
        values += FINAL
    if query.after is not None:
        clauses.append("number < ?" if query.descending else "number > ?")
        values.append(_number_of(connection, query.after, query.owner))
    return clauses, values


def _number_of(connection: sqlite3.Connection, id: str, owner: str | None) -> int:
    row = connection.execute("SELECT number, owner FROM record WHERE id = ?", (id,)).fetchone()
    if row is None or owner not in (None, row[1]):
        raise InvalidValue("after names no stored answer", param="after")
    return int(row[0])


def tokens(connection: sqlite3.Connection, id: str) -> list[StoredTokens]:
    """What is saved of each choice; [] for a record that isn't there. Raises Damage, sqlite3.Error."""
    found = connection.execute("SELECT number FROM record WHERE id = ?", (id,)).fetchone()
    if found is None:
        return []
    choices = connection.execute("SELECT count(*) FROM choice WHERE number = ?", found).fetchone()[0]
    stored = [StoredTokens([], []) for _ in range(choices)]
    rows = connection.execute(
        "SELECT choice, first, ids, logprobs, checksum FROM tokens WHERE number = ? ORDER BY choice, first", found
    )
    for choice, first, ids, logprobs, checksum in rows:
        if checksum != codec.checksum(ids, logprobs) or first != len(stored[choice].tokens):
            raise Damage(f"the tokens of {id} are damaged")
        stored[choice].tokens += codec.unpack_ids(ids)
        stored[choice].logprobs += codec.unpack_logprobs(logprobs)
    return stored


# ---------------------------------------------------------------- rows → records
def _whole(connection: sqlite3.Connection, row: Row) -> Record:
    record = _with_result(connection, row)
    found = connection.execute(
        "SELECT sequences, body, own_input, checksum FROM content WHERE number = ?", (row[0],)
    ).fetchone()
    if found is None or codec.checksum(*found[:3]) != found[3]:
        raise Damage(f"the request of {record.id} is damaged")
    record.sequences = codec.unpack_sequences(found[0])
    record.body, record.own_input = found[1:3]
    return record


def _with_result(connection: sqlite3.Connection, row: Row) -> Record:
    record = _facts(row)
    found = connection.execute("SELECT answer, error, checksum FROM result WHERE number = ?", (row[0],)).fetchone()
    if found is not None:
        if codec.checksum(*found[:2]) != found[2]:
            raise Damage(f"the answer of {record.id} is damaged")
        record.answer, record.error = found[:2]
    choices = connection.execute("SELECT cached, finish FROM choice WHERE number = ? ORDER BY choice", (row[0],))
    for cached, finish in choices:
        record.cached.append(cached)
        record.finishes.append(finish)
    return record


def _facts(row: Row) -> Record:
    _, id, kind, owner, model, fingerprint, created, background, stream, endpoint, metadata, status, ended = row
    return Record(
        id=id,
        kind=kind,
        owner=owner,
        model=model,
        fingerprint=fingerprint,
        created=created,
        background=bool(background),
        stream=bool(stream),
        endpoint=endpoint,
        metadata=json.loads(metadata),
        status=status,
        ended=ended,
        cached=[],
        finishes=[],
    )


def counts(connection: sqlite3.Connection) -> dict[str, int]:
    """Records by status."""
    return dict(connection.execute("SELECT status, count(*) FROM record GROUP BY status").fetchall())
