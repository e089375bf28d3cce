"""Which answers are given up: old ones and the oldest, never unfinished ones nor those that are read."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

from journaling import opened, record
from supervising import until

from server.journal import writer

DAY = 86400.0


async def add(journal, id: str, *, age_days: float = 0.0, bytes: int = 100) -> None:
    await journal.add(record(id, body=b"x" * bytes))
    await journal.finish(id, "completed", answer=b"{}", ended=time.time() - age_days * DAY)


def left(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    ids = [row[0] for row in connection.execute("SELECT id FROM record ORDER BY number")]
    connection.close()
    return ids


async def test_old_answers_are_not_found_and_then_removed(tmp_path):
    path = tmp_path / "j.db"
    async with opened(path, journal_days=2) as journal:
        await add(journal, "resp_old", age_days=3)
        await add(journal, "resp_young", age_days=1)
        await journal.add(record("resp_open", created=time.time() - 9 * DAY))
        assert await journal.get("resp_old", "") is None
        assert [one.id for one in (await journal.page("response", ""))[0]] == ["resp_open", "resp_young"]
    async with opened(path, journal_days=2):
        await until(lambda: len(left(path)) == 2)
    assert left(path) == ["resp_young", "resp_open"]


async def test_the_oldest_answers_make_room(tmp_path):
    path = tmp_path / "j.db"
    async with opened(path, journal_bytes="1MiB") as journal:
        await journal.add(record("resp_open", body=b"x" * 200_000))
        for n in range(200):
            await add(journal, f"resp_{n}", bytes=20_000, age_days=1 - n / 1000)
    async with opened(path, journal_bytes="1MiB") as journal:
        await until(lambda: 2 * 10**5 < journal.state.bytes <= 2**20)
        ids = left(path)
    assert ids[0] == "resp_open"
    assert ids[1:] == [f"resp_{n}" for n in range(201 - len(ids), 200)]
    assert len(ids) > 20
    assert path.stat().st_size <= 1.1 * 2**20


async def test_an_answer_that_is_read_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "HOUSEKEEPING_SECONDS", 0.05)
    path = tmp_path / "j.db"
    async with opened(path, journal_days=2) as journal:
        with journal.hold("resp_1"), journal.hold("resp_1"):
            await add(journal, "resp_1", age_days=3)
            await add(journal, "resp_2", age_days=3)
            await until(lambda: left(path) == ["resp_1"])
            await asyncio.sleep(0.2)
            assert left(path) == ["resp_1"]
        await until(lambda: left(path) == [])
