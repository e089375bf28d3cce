"""What becomes of a journal whose file, disk or server fails: a line, and nothing lost that needn't be."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import killed_writer
import pytest
from journaling import append, opened, record
from supervising import Recorded, until

from server.errors import JournalUnavailable
from server.journal import place, tables


async def fill(path: Path, records: int = 30) -> None:
    async with opened(path) as journal:
        for n in range(records):
            await journal.add(record(f"resp_{n}", body=b"%d" % n * 3000))
            await journal.finish(f"resp_{n}", "completed", answer=b"{}")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_inside_the_header(path: Path) -> None:
    os.truncate(path, 50)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        for page in range(4096, path.stat().st_size, 4096):
            file.seek(page)
            file.write(b"\xff" * 200)


def make_text(path: Path) -> None:
    path.write_text("Dear diary,\n" * 100)


def make_other_database(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE photos (name TEXT)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (cut, "damaged"),
        (cut_inside_the_header, "foreign"),
        (overwrite, "damaged"),
        (make_text, "foreign"),
        (make_other_database, "foreign"),
    ],
)
async def test_a_file_that_cannot_be_used_is_set_aside_with_one_line(tmp_path, caplog, spoil: Callable, kind: str):
    path = tmp_path / "j.db"
    await fill(path)
    spoil(path)
    before = path.read_bytes()
    async with opened(path) as journal:
        await journal.add(record("resp_new"))
        assert journal.is_on
        assert await journal.get("resp_0", "") is None
    (aside,) = [file for file in tmp_path.iterdir() if kind in file.name and not file.name.endswith(("-wal", "-shm"))]
    assert aside.read_bytes() == before
    (line,) = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert aside.name in line.getMessage()
    assert line.exc_info is None


async def test_a_file_of_a_newer_marathon_is_left_alone(tmp_path, caplog):
    path = tmp_path / "j.db"
    await fill(path, 1)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {tables.VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    async with opened(path) as journal:
        with pytest.raises(JournalUnavailable, match="a newer Marathon wrote it"):
            await journal.add(record("resp_new"))
        assert journal.state.condition == "unavailable"
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["j.db", "j.db.lock"]
    assert len([entry for entry in caplog.records if entry.levelno >= logging.WARNING]) == 1


async def test_two_servers_never_share_a_journal(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(place, "LOCK_SECONDS", 0.1)
    path = tmp_path / "j.db"
    async with opened(path) as first:
        await first.add(record())
        async with opened(path) as second:
            with pytest.raises(JournalUnavailable, match=f"another server .process {os.getpid()}. uses it"):
                await second.add(record("resp_2"))
            assert not second.is_on
        await first.add(record("resp_2"))
    assert len([entry for entry in caplog.records if entry.levelno >= logging.WARNING]) == 1
    async with opened(path) as third:
        assert await third.get("resp_2", "")


async def test_a_server_waits_a_moment_for_the_one_that_ends(tmp_path):
    path = tmp_path / "j.db"
    async with opened(path) as first:
        opening = asyncio.create_task(anext_opened(path))
        await asyncio.sleep(0.2)
        assert not opening.done()
        await first.add(record())
    assert await opening


async def anext_opened(path: Path) -> bool:
    async with opened(path) as journal:
        return await journal.get("resp_1", "") is not None


async def test_a_file_that_cannot_be_written_is_read(tmp_path, caplog, monkeypatch):
    path = tmp_path / "j.db"
    await fill(path, 1)

    def refuse(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr("server.journal.writing.try_out", refuse)
    async with opened(path) as journal:
        assert (await journal.get("resp_0", "")).answer == b"{}"
        with pytest.raises(JournalUnavailable, match="readonly"):
            await journal.add(record("resp_new"))
        assert await journal.unfinished() == []
    assert len([entry for entry in caplog.records if entry.levelno >= logging.WARNING]) == 1


async def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, caplog):
    (tmp_path / "file").touch()
    async with opened(tmp_path / "file" / "j.db") as journal:
        with pytest.raises(JournalUnavailable):
            await journal.add(record())
        with pytest.raises(JournalUnavailable):
            await journal.get("resp_1", "")
    assert len([entry for entry in caplog.records if entry.levelno >= logging.WARNING]) == 1


async def test_a_changed_byte_is_noticed_and_costs_one_answer(tmp_path, caplog):
    path = tmp_path / "j.db"
    await fill(path, 3)
    content = path.read_bytes()
    place_of_one = content.index(b"111111111")
    path.write_bytes(content[:place_of_one] + b"2" + content[place_of_one + 1 :])
    async with opened(path) as journal:
        with pytest.raises(JournalUnavailable, match="resp_1 is damaged"):
            await journal.get("resp_1", "")
        assert await journal.get("resp_0", "")
        assert await journal.get("resp_2", "")
        assert journal.is_on


# ---------------------------------------------------------------- no room
async def test_a_full_disk_refuses_new_work_and_harms_no_answer_under_way(tmp_path, caplog):
    counts = Recorded()
    caplog.set_level(logging.INFO)
    async with opened(tmp_path / "j.db", counts, faults="full@commit:4*3") as journal:
        await journal.add(record())
        log = journal.tokens("resp_1")
        await append(log, [0])
        await append(log, [1], cached=2)
        await append(log, [2])  # sent, although there is no room
        with pytest.raises(JournalUnavailable, match="the disk is full"):
            await journal.add(record("resp_2"))
        assert not journal.is_on
        await append(log, [3])
        assert await journal.finish("resp_1", "completed", answer=b"{}", finishes=["stop"], cached=[2])
        assert not await journal.finish("resp_1", "cancelled")
        assert (await journal.get("resp_1", "")).answer == b"{}"
        await until(lambda: journal.is_on, 5)
        assert (await journal.ids("resp_1"))[0].tokens == [0, 1, 2, 3]
        await journal.add(record("resp_3"))
    assert counts.sum("unsaved") == 2
    assert counts.of("failed")
    async with opened(tmp_path / "j.db") as journal:
        found = await journal.get("resp_1", "")
        assert (found.status, found.answer, found.finishes) == ("completed", b"{}", ["stop"])
    lines = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.INFO]
    assert len(lines) == 2, "one when it begins and one when it is over"


@pytest.mark.parametrize("way", ["deleted", "moved", "replaced", "its folder moved"])
async def test_a_file_that_is_gone_takes_no_new_work_and_harms_no_answer_under_way(tmp_path, caplog, way: str):
    folder, aside = tmp_path / "here", tmp_path / "aside"
    folder.mkdir()
    path = folder / "j.db"
    async with opened(path) as journal:
        await journal.add(record())
        log = journal.tokens("resp_1")
        await append(log, [0])
        if way == "its folder moved":
            folder.rename(aside)
        else:
            for part in list(folder.iterdir()):
                part.rename(tmp_path / part.name)
                if way == "deleted":
                    (tmp_path / part.name).unlink()
        if way == "replaced":
            path.write_bytes(b"")
        with pytest.raises(JournalUnavailable, match="deleted or moved"):
            await journal.add(record("resp_2"))
        assert not journal.is_on
        await append(log, [1])
        if way == "its folder moved":
            aside.rename(folder)
            await until(lambda: journal.is_on, 5)
            await journal.add(record("resp_3"))
    assert caplog.text.count("the journal can't be written") == 1
    if way == "its folder moved":
        async with opened(path) as journal:
            assert (await journal.ids("resp_1"))[0].tokens == [0, 1]


@pytest.mark.parametrize("way", ["full", "deleted"])
async def test_a_journal_that_nothing_waits_for_is_used_again_once_it_can_be(tmp_path, caplog, way: str):
    """Who stores by default doesn't ask a journal that has a fault."""
    path = tmp_path / "j.db"
    caplog.set_level(logging.INFO)
    async with opened(path, faults="full@commit:2*3" if way == "full" else "") as journal:
        await journal.add(record())
        if way == "deleted":
            path.rename(tmp_path / "aside")
        with pytest.raises(JournalUnavailable):
            await journal.add(record("resp_2"))
        assert not journal.is_on
        if way == "deleted":
            (tmp_path / "aside").rename(path)
        await until(lambda: journal.is_on, 10)
        await journal.add(record("resp_3"))
    lines = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.INFO]
    assert len(lines) == 2, "one when it begins and one when it is over"


async def test_an_idle_journal_notices_that_its_file_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("server.journal.writer.HOUSEKEEPING_SECONDS", 0.05)
    async with opened(tmp_path / "j.db") as journal:
        assert journal.is_on
        (tmp_path / "j.db").unlink()
        await until(lambda: not journal.is_on, 5)


async def test_a_start_on_a_full_disk_needs_no_room_where_there_is_nothing_to_fail(tmp_path, caplog):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record())
    async with opened(tmp_path / "j.db", faults="full@commit:1*9") as journal:
        assert await journal.fail_foreground("the server ended") == 0
        assert [one.id for one in await journal.unfinished()] == ["resp_1"]
        assert journal.is_on
    assert caplog.text == ""


async def test_the_real_limit_of_a_file_is_met_like_a_full_disk(tmp_path, monkeypatch):
    connect = tables.connect

    def small(path: Path, **options: bool) -> sqlite3.Connection:
        connection = connect(path, **options)
        connection.execute("PRAGMA max_page_count = 40")
        return connection

    monkeypatch.setattr(tables, "connect", small)
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record())
        with pytest.raises(JournalUnavailable, match="the disk is full"):
            await journal.add(record("resp_2", body=b"x" * 10**6))
        await append(journal.tokens("resp_1"), list(range(10)))
        assert (await journal.ids("resp_1"))[0].tokens == list(range(10))


async def test_what_could_not_be_written_is_written_at_the_end(tmp_path):
    async with opened(tmp_path / "j.db", faults="full@commit:2") as journal:
        await journal.add(record())
        await append(journal.tokens("resp_1"), [1, 2, 3])
    async with opened(tmp_path / "j.db") as journal:
        assert (await journal.ids("resp_1"))[0].tokens == [1, 2, 3]


async def test_a_slow_disk_delays_and_loses_nothing(tmp_path):
    counts = Recorded()
    async with opened(tmp_path / "j.db", counts, faults="slow-commit:0.02") as journal:
        await journal.add(record())
        log = journal.tokens("resp_1")
        await asyncio.gather(*(append(log, [n]) for n in range(100)))
        assert (await journal.ids("resp_1"))[0].tokens == list(range(100))
    assert len(counts.of("committed")) < 10


# ---------------------------------------------------------------- the server ends
@pytest.mark.parametrize(
    ("fault", "saved"), [("kill@before-commit:1", None), ("kill@before-commit:8", 6), ("kill@after-commit:8", 7)]
)
async def test_what_was_sent_outlives_a_kill_at_a_commit(tmp_path, fault, saved):
    path = tmp_path / "j.db"
    command = [sys.executable, killed_writer.__file__, str(path), fault]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    reported = ended.stdout.split()
    async with opened(path) as journal:
        if saved is None:
            assert reported == []
            assert await journal.get("resp_1", "") is None
            return
        ids = (await journal.ids("resp_1"))[0].tokens
    assert ids == list(range(saved))
    assert reported == ["added", *map(str, range(6))]
