"""Changes to a journal.

Owns every INSERT, UPDATE and DELETE, and the blocks in which token ids are kept. Runs in the thread that owns the
connection, inside a transaction that its caller begins and ends. Nothing here may be half done: what a transaction
rolled back is forgotten with `OpenRecords.forget`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from server.ipc.sequence import TokenLogprobs
from server.journal import record as codec
from server.journal.record import UNFINISHED, NewTokens, Outcome, Record

BLOCK_TOKENS = 256  # of a row, which is written anew with each commit until it is full
BLOCK_BYTES = 4096  # the same for what its logprobs take
_PARTS = ("tokens", "choice", "result", "content", "record")


@dataclass(slots=True)
class _Block:
    """The row of ids that is being filled."""

    first: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    bytes: int = 0  # of the logprobs when they were packed last

    @property
    def end(self) -> int:
        return self.first + len(self.ids)

    @property
    def is_full(self) -> bool:
        return len(self.ids) >= BLOCK_TOKENS or self.bytes >= BLOCK_BYTES


@dataclass(slots=True)
class _OpenRecord:
    number: int
    blocks: list[_Block]


class OpenRecords:
    """The last block of each choice of the records that are being written, so that none is read back."""

    def __init__(self) -> None:
        self._records: dict[str, _OpenRecord] = {}

    def forget(self, id: str | None = None) -> None:
        """One record, or all: a transaction was rolled back."""
        if id is None:
            self._records.clear()
        else:
            self._records.pop(id, None)

    def open(self, connection: sqlite3.Connection, id: str) -> _OpenRecord | None:
        """None for one that is finished or gone."""
        if (known := self._records.get(id)) is not None:
            return known
        row = connection.execute("SELECT number, status FROM record WHERE id = ?", (id,)).fetchone()
        if row is None or row[1] not in UNFINISHED:
            return None
        count = connection.execute("SELECT count(*) FROM choice WHERE number = ?", row[:1]).fetchone()[0]
        blocks = [_last_block(connection, row[0], choice) for choice in range(count)]
        self._records[id] = _OpenRecord(row[0], blocks)
        return self._records[id]


def _last_block(connection: sqlite3.Connection, number: int, choice: int) -> _Block:
    row = connection.execute(
        "SELECT first, ids, logprobs FROM tokens WHERE number = ? AND choice = ? ORDER BY first DESC LIMIT 1",
        (number, choice),
    ).fetchone()
    if row is None:
        return _Block()
    return _Block(row[0], codec.unpack_ids(row[1]), codec.unpack_logprobs(row[2]), len(row[2]))


# ---------------------------------------------------------------- a record's life
def add(connection: sqlite3.Connection, record: Record) -> None:
    """A new record. Raises sqlite3.IntegrityError for an id that is there already."""
    cursor = connection.execute(
        "INSERT INTO record (id, kind, owner, model, fingerprint, created, background, stream, endpoint, metadata,"
        " status, ended) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.id,
            record.kind,
            record.owner,
            record.model,
            record.fingerprint,
            record.created,
            record.background,
            record.stream,
            record.endpoint,
            json.dumps(record.metadata),
            record.status,
            record.ended,
        ),
    )
    number = cursor.lastrowid
    parts = (codec.pack_sequences(record.sequences), record.body, record.own_input)
    connection.execute("INSERT INTO content VALUES (?, ?, ?, ?, ?)", (number, *parts, codec.checksum(*parts)))
    connection.executemany(
        "INSERT INTO choice (number, choice) VALUES (?, ?)", [(number, i) for i in range(len(record.sequences))]
    )


def begin(connection: sqlite3.Connection, id: str) -> None:
    """From queued to in_progress; nothing for any other status."""
    connection.execute("UPDATE record SET status = 'in_progress' WHERE id = ? AND status = 'queued'", (id,))


def append(connection: sqlite3.Connection, records: OpenRecords, id: str, start: int, news: NewTokens) -> None:
    """Store a choice's ids from the `start`-th on; nothing for a record that has ended. Raises Damage when ids are
    missing before them."""
    record = records.open(connection, id)
    if record is None:
        return
    if news.tokens:
        end = record.blocks[news.choice].end
        if start != end:
            raise codec.Damage(f"{id} goes on at token {start} and has {end}")
        _fill(connection, record, news)
    if news.cached is not None:
        connection.execute(
            "UPDATE choice SET cached = ? WHERE number = ? AND choice = ?", (news.cached, record.number, news.choice)
        )
    if news.finish is not None:
        connection.execute(
            "UPDATE choice SET finish = ? WHERE number = ? AND choice = ?", (news.finish, record.number, news.choice)
        )


def _fill(connection: sqlite3.Connection, record: _OpenRecord, news: NewTokens) -> None:
    block = record.blocks[news.choice]
    done = 0
    while done < len(news.tokens):
        if block.is_full:
            block = record.blocks[news.choice] = _Block(block.end)
        count = BLOCK_TOKENS - len(block.ids)
        block.ids += news.tokens[done : done + count]
        block.logprobs += news.logprobs[done : done + count]
        done += count
        _write(connection, record.number, news.choice, block)


def _write(connection: sqlite3.Connection, number: int, choice: int, block: _Block) -> None:
    ids, logprobs = codec.pack_ids(block.ids), codec.pack_logprobs(block.logprobs)
    block.bytes = len(logprobs)
    connection.execute(
        "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?)",
        (number, choice, block.first, ids, logprobs, codec.checksum(ids, logprobs)),
    )


def finish(connection: sqlite3.Connection, records: OpenRecords, id: str, outcome: Outcome) -> bool:
    """The final status, unless there is one already. Returns whether this one counts."""
    row = connection.execute(
        "UPDATE record SET status = ?, ended = ? WHERE id = ? AND status IN ('queued', 'in_progress') RETURNING number",
        (outcome.status, outcome.ended, id),
    ).fetchone()
    records.forget(id)
    if row is None:
        return False
    _write_result(connection, row[0], outcome.answer, outcome.error)
    choices = [
        (cached, finish, row[0], i)
        for i, (cached, finish) in enumerate(zip(outcome.cached, outcome.finishes, strict=False))
    ]
    connection.executemany("UPDATE choice SET cached = ?, finish = ? WHERE number = ? AND choice = ?", choices)
    return True


def _write_result(connection: sqlite3.Connection, number: int, answer: bytes | None, error: bytes | None) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO result VALUES (?, ?, ?, ?)", (number, answer, error, codec.checksum(answer, error))
    )


def fail_foreground(connection: sqlite3.Connection, message: str) -> int:
    """Those that only their clients waited for, and that ended with the server. Returns how many there were."""
    rows = connection.execute(
        "UPDATE record SET status = 'failed', ended = ? WHERE NOT background AND status IN ('queued', 'in_progress')"
        " RETURNING number",
        (time.time(),),
    ).fetchall()
    error = json.dumps({"code": "server_error", "message": message}).encode()
    for (number,) in rows:
        _write_result(connection, number, None, error)
    return len(rows)


def set_metadata(connection: sqlite3.Connection, id: str, owner: str, metadata: dict[str, str]) -> bool:
    """Returns whether there was such a record."""
    cursor = connection.execute(
        "UPDATE record SET metadata = ? WHERE id = ? AND owner = ?", (json.dumps(metadata), id, owner)
    )
    return cursor.rowcount > 0


def delete(connection: sqlite3.Connection, records: OpenRecords, id: str, owner: str | None) -> bool:
    """Everything of a record, if it is this owner's (None: anyone's). Returns whether there was one."""
    row = connection.execute("SELECT number, owner FROM record WHERE id = ?", (id,)).fetchone()
    if row is None or owner not in (None, row[1]):
        return False
    records.forget(id)
    remove(connection, [row[0]])
    return True


def remove(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Everything of these records."""
    keys = [(number,) for number in numbers]
    for part in _PARTS:
        connection.executemany(f"DELETE FROM {part} WHERE number = ?", keys)


def try_out(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.Error where nothing can be written; SQLite says so at the first change, not before."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")
