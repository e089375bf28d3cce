"""What `marathon journal` does: list, show, export and delete stored answers.

Owns how they look on a terminal and as JSON. Runs in the main thread of a short-lived process. Reads the file beside a
running server, and never changes an answer; deletes in short transactions between the server's own.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from server.commands.status import columns
from server.errors import StartupError, one_line
from server.journal import place, reading, tables, writing
from server.journal.journal import journal_path
from server.journal.record import Damage, Record
from server.journal.writing import OpenRecords
from server.settings import load_from, read_sources

HEAD = ("id", "status", "made", "model", "tokens")


def run(options: dict[str, Any]) -> int:
    """Carry out the action and return 0. Raises StartupError with the line to print."""
    settings = load_from(read_sources({"journal": options["journal"]} if options["journal"] else {}, None))
    path = journal_path(settings)
    if path is None:
        raise StartupError("the journal is off; --journal names a file")
    if not path.is_file():
        if options["action"] == "list" and not options["journal"]:
            print(f"nothing is stored; a server would do it in {path}")
            return 0
        raise StartupError(f"there is no journal at {path}")
    try:
        return _ACTIONS[options["action"]](path, options)
    except (sqlite3.Error, OSError) as error:
        raise StartupError(f"the journal {path} can't be used: {one_line(error)}") from None


def _open(path: Path, *, writable: bool = False) -> closing[sqlite3.Connection]:
    """Raises StartupError for what is no journal, or one that this version doesn't know."""
    connection = tables.connect(path, writable=writable)
    try:
        if tables.application(connection) != tables.APPLICATION:
            raise StartupError(f"{path} is no journal")
        if (version := tables.version(connection)) != tables.VERSION:
            raise StartupError(f"{path} has version {version}; this Marathon knows {tables.VERSION}")
    except BaseException:
        connection.close()
        raise
    return closing(connection)


# ---------------------------------------------------------------- reading
def _list(path: Path, options: dict[str, Any]) -> int:
    with _open(path) as connection:
        records = _records(connection)
        if options["json"]:
            for record in records:
                print(json.dumps(_facts(connection, record), ensure_ascii=False))
        else:
            rows = [_row(connection, record) for record in records]
            print("\n".join(columns([HEAD, *rows])))
    return 0


def _records(connection: sqlite3.Connection) -> Iterator[Record]:
    """Yield all, the oldest first, without what their requests were made of; damaged ones are named and left out."""
    for (id,) in connection.execute("SELECT id FROM record ORDER BY number").fetchall():
        try:
            record = reading.find(connection, id, None)
        except Damage as error:
            print(f"marathon: {error}", file=sys.stderr)
            continue
        if record is not None:  # it may have been deleted meanwhile
            yield record


def _row(connection: sqlite3.Connection, record: Record) -> tuple[str, ...]:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    return record.id, record.status, made, record.model, f"{_count(connection, record):,}"


def _count(connection: sqlite3.Connection, record: Record) -> int:
    """Tokens that are stored, of all choices."""
    row = connection.execute(
        "SELECT coalesce(sum(length(ids)), 0) / 4 FROM tokens JOIN record USING (number) WHERE id = ?", (record.id,)
    ).fetchone()
    return int(row[0])


def _facts(connection: sqlite3.Connection, record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "kind": record.kind,
        "status": record.status,
        "model": record.model,
        "created": record.created,
        "ended": record.ended,
        "background": record.background,
        "stream": record.stream,
        "metadata": record.metadata,
        "tokens": _count(connection, record),
        "finishes": record.finishes,
    }


def _whole(connection: sqlite3.Connection, record: Record) -> dict[str, Any]:
    return _facts(connection, record) | {
        "request": _parsed(record.body),
        "answer": _parsed(record.answer),
        "error": _parsed(record.error),
        "ids": [stored.tokens for stored in reading.tokens(connection, record.id)],
    }


def _parsed(blob: bytes | None) -> Any:
    if not blob:
        return None
    try:
        return json.loads(blob)
    except ValueError:
        return blob.decode(errors="replace")


def _show(path: Path, options: dict[str, Any]) -> int:
    with _open(path) as connection:
        for id in options["ids"] or _nothing_named("show"):
            try:
                _require(connection, id)
                record = reading.find(connection, id, None)
                if record is not None:  # it may have been deleted meanwhile
                    print(json.dumps(_whole(connection, record), indent=2, ensure_ascii=False))
            except Damage as error:
                raise StartupError(str(error)) from None
    return 0


def _export(path: Path, options: dict[str, Any]) -> int:
    with _open(path) as connection:
        for id in options["ids"]:
            _require(connection, id)
        for record in _records(connection):
            if options["ids"] and record.id not in options["ids"]:
                continue
            try:
                print(json.dumps(_whole(connection, record), ensure_ascii=False))
            except Damage as error:
                print(f"marathon: {error}", file=sys.stderr)
    return 0


def _require(connection: sqlite3.Connection, id: str) -> float | None:
    """When the answer with this id ended. Raises StartupError where there is none."""
    row = connection.execute("SELECT ended FROM record WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise StartupError(f"the journal has no answer {id}")
    ended: float | None = row[0]
    return ended


# ---------------------------------------------------------------- deleting
def _delete(path: Path, options: dict[str, Any]) -> int:
    is_served = place.is_locked(path)
    with _open(path, writable=True) as connection:
        ids = options["ids"]
        if options["all"]:
            ids = [row[0] for row in connection.execute("SELECT id FROM record WHERE ended IS NOT NULL")]
        elif not ids:
            _nothing_named("delete")
        for id in ids:
            _delete_one(connection, id, is_served=is_served)
    print(f"{len(ids)} deleted")
    return 0


def _delete_one(connection: sqlite3.Connection, id: str, *, is_served: bool) -> None:
    if _require(connection, id) is None and is_served:
        raise StartupError(f"{id} isn't finished and a server works on it; cancel it there first")
    tables.transaction(connection, partial(writing.delete, connection, OpenRecords(), id, None))


def _nothing_named(action: str) -> list[str]:
    raise StartupError(f"marathon journal {action} needs an id; `marathon journal list` prints them")


_ACTIONS: dict[str, Callable[[Path, dict[str, Any]], int]] = {
    "list": _list,
    "show": _show,
    "export": _export,
    "delete": _delete,
}
