"""What is stored is read again as it was, and belongs to the key that made it."""

from __future__ import annotations

import asyncio
import sqlite3
import stat

import pytest
from journaling import append, opened, record
from supervising import Recorded, sequence, until

from server.errors import InvalidValue, JournalUnavailable
from server.ipc.sequence import Grammar, TokenLogprobs
from server.journal import tables, writing
from server.journal.measures import JournalMetrics
from server.journal.record import NewTokens


async def test_a_record_is_read_as_it_was_written(tmp_path):
    kept = record(
        choices=2,
        metadata={"project": "ü"},
        sequences=[sequence(1, 2, grammar=Grammar("{}"), stop_ids=[0]), sequence(9, choice=1)],
    )
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(kept)
        found = await journal.get("resp_1", "")
    kept.cached = kept.finishes = [None, None]
    assert found == kept


async def test_ids_and_logprobs_outlive_the_journal_that_wrote_them(tmp_path):
    logprobs = [TokenLogprobs(-0.1 * n, [(n, -0.1 * n), (n + 1, -3.0)]) for n in range(700)]
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record(choices=2))
        await journal.begin("resp_1")
        log = journal.tokens("resp_1")
        log.append(NewTokens(0, [0], cached=5), lambda: None)
        log.append(NewTokens(1, [1], [logprobs[0]]), lambda: None)
        for n in range(1, 700):
            log.append(NewTokens(0, [n]), lambda: None)
            log.append(NewTokens(1, [n + 1], [logprobs[n]]), lambda: None)
        log.append(NewTokens(1, [], finish="stop"), lambda: None)
    async with opened(tmp_path / "j.db") as journal:
        first, second = await journal.ids("resp_1")
        found = await journal.get("resp_1", "")
    assert (first.tokens, first.logprobs) == (list(range(700)), [])
    assert (second.tokens, second.logprobs) == (list(range(1, 701)), logprobs)
    assert (found.status, found.cached, found.finishes) == ("in_progress", [5, None], [None, "stop"])


async def test_ids_go_on_where_a_lost_server_left_them(tmp_path):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record())
        await append(journal.tokens("resp_1"), list(range(300)))
    async with opened(tmp_path / "j.db") as journal:
        (lost,) = await journal.unfinished()
        (stored,) = await journal.ids(lost.id)
        await append(journal.tokens(lost.id, [stored.tokens]), list(range(300, 600)))
        assert (await journal.ids(lost.id))[0].tokens == list(range(600))


async def test_what_was_sent_is_committed(tmp_path):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record())
        log = journal.tokens("resp_1")
        other = tables.connect(tmp_path / "j.db", writable=False)
        for n in range(50):
            await append(log, [n])
            ids = b"".join(row[0] for row in other.execute("SELECT ids FROM tokens ORDER BY first"))
            assert len(ids) == 4 * (n + 1)
        other.close()


async def test_what_comes_at_once_is_one_transaction(tmp_path):
    counts = Recorded()
    async with opened(tmp_path / "j.db", counts) as journal:
        await journal.add(record(choices=16))
        log = journal.tokens("resp_1")
        before = len(counts.of("committed"))
        await asyncio.gather(*(append(log, [1], index=choice) for choice in range(16)))
        assert len(counts.of("committed")) == before + 1


async def test_a_final_status_is_decided_once(tmp_path):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record())
        first, second = await asyncio.gather(
            journal.finish("resp_1", "completed", answer=b"{}", finishes=["stop"], cached=[3], ended=1e10),
            journal.finish("resp_1", "cancelled"),
        )
        found = await journal.get("resp_1", "")
        assert (first, second) == (True, False)
        assert (found.status, found.answer, found.finishes, found.cached) == ("completed", b"{}", ["stop"], [3])
        assert found.ended == 1e10
        await append(journal.tokens("resp_1"), [1])
        await journal.begin("resp_1")
        assert (await journal.ids("resp_1"))[0].tokens == []
        assert not await journal.finish("resp_unknown", "failed")


async def test_a_record_answers_only_to_its_owner(tmp_path):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record(owner="a"))
        assert await journal.get("resp_1", "b") is None
        assert not await journal.delete("resp_1", "b")
        assert not await journal.set_metadata("resp_1", "b", {"x": "y"})
        assert (await journal.page("response", "b"))[0] == []
        with pytest.raises(InvalidValue):
            await journal.page("response", "b", after="resp_1")
        assert await journal.delete("resp_1", "a")
        assert await journal.get("resp_1", "a") is None


async def test_nothing_of_a_deleted_record_stays_in_the_file(tmp_path):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record(body=b"a very private question" * 100))
        await append(journal.tokens("resp_1"), [7] * 1000)
        assert await journal.delete("resp_1", "")
        await append(journal.tokens("resp_1"), [8])
        await journal.add(record("resp_2"))
    connection = sqlite3.connect(tmp_path / "j.db")
    counts = {part: connection.execute(f"SELECT count(*) FROM {part}").fetchone()[0] for part in ("content", "tokens")}
    connection.close()
    assert counts == {"content": 1, "tokens": 0}
    assert b"private question" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


async def test_a_list_is_paged_and_filtered(tmp_path):
    async with opened(tmp_path / "j.db") as journal:
        for n in range(7):
            await journal.add(
                record(f"chatcmpl-{n}", kind="chat", metadata={"even": str(n % 2 == 0)}, model=f"m{n % 3}")
            )
            await journal.finish(f"chatcmpl-{n}", "completed", answer=b"%d" % n)
        await journal.add(record("chatcmpl-7", kind="chat"))
        await journal.add(record())
        page, more = await journal.page("chat", "", limit=3, finished=True)
        assert [(one.id, one.answer, one.body) for one in page] == [
            (f"chatcmpl-{n}", b"%d" % n, b"") for n in (6, 5, 4)
        ]
        assert more
        page, more = await journal.page("chat", "", after="chatcmpl-4", limit=9)
        assert ([one.id[-1] for one in page], more) == (["3", "2", "1", "0"], False)
        page, _ = await journal.page("chat", "", descending=False, metadata={"even": "True"}, model="m0")
        assert [one.id[-1] for one in page] == ["0", "6"]
        assert len((await journal.page("chat", ""))[0]) == 8


async def test_metadata_can_be_changed(tmp_path):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record())
        assert await journal.set_metadata("resp_1", "", {"a": "b"})
        assert (await journal.get("resp_1", "")).metadata == {"a": "b"}


async def test_what_only_its_client_waited_for_fails_at_the_next_start(tmp_path):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record("resp_1", background=False))
        await journal.add(record("resp_2"))
        await journal.add(record("resp_3"))
    async with opened(tmp_path / "j.db") as journal:
        assert await journal.fail_foreground("the server ended") == 1
        found = await journal.get("resp_1", "")
        assert (found.status, found.error) == ("failed", b'{"code": "server_error", "message": "the server ended"}')
        assert [one.id for one in await journal.unfinished()] == ["resp_2", "resp_3"]


async def test_the_file_is_its_owners_alone(tmp_path):
    async with opened(tmp_path / "data" / "j.db") as journal:
        await journal.add(record())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").iterdir()}
        assert set(modes) >= {"j.db", "j.db-wal", "j.db.lock"}
        assert set(modes.values()) == {0o600}
        assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


async def test_without_a_journal_storing_is_refused():
    async with opened("off") as journal:
        assert not journal.is_on
        assert journal.state.condition == "off"
        with pytest.raises(JournalUnavailable, match="--journal off"):
            await journal.add(record())
        with pytest.raises(JournalUnavailable):
            await journal.get("resp_1", "")
        await append(journal.tokens("resp_1"), [1])


async def test_the_state_says_what_is_stored(tmp_path):
    async with opened(tmp_path / "j.db", journal_bytes="8MiB") as journal:
        await journal.add(record())
        await journal.add(record("resp_2"))
        await journal.finish("resp_2", "failed")
        await until(lambda: journal.state.stored.get("failed"))
        state = journal.state
    assert (state.condition, state.reason, state.path) == ("on", None, str(tmp_path / "j.db"))
    assert (state.stored, state.limit) == ({"queued": 1, "failed": 1}, 8 * 2**20)
    assert 4096 < state.bytes < 2**20


async def test_a_change_that_fails_by_itself_harms_no_other(tmp_path, caplog):
    async with opened(tmp_path / "j.db") as journal:
        await journal.add(record())
        results = await asyncio.gather(
            journal.add(record("resp_2")), journal.add(record()), journal.add(record("resp_3")), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), JournalUnavailable, type(None)]
        assert journal.is_on
        assert await journal.get("resp_3", "")
    assert "is left out" in caplog.text


def test_an_older_file_is_brought_up_to_date(tmp_path):
    path = tmp_path / "j.db"
    path.touch()
    connection = tables.connect(path)
    tables.prepare(connection)
    writing.add(connection, record())
    connection.close()
    connection = tables.connect(path)
    further = (*tables.MIGRATIONS, "ALTER TABLE record ADD COLUMN note TEXT; UPDATE record SET note = 'new'")
    tables.prepare(connection, further)
    assert tables.version(connection) == tables.VERSION + 1
    assert connection.execute("SELECT id, note FROM record").fetchall() == [("resp_1", "new")]
    tables.prepare(connection, further)
    connection.close()


def test_a_migration_is_done_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "j.db"
    path.touch()
    connection = tables.connect(path)
    tables.prepare(connection)
    with pytest.raises(sqlite3.OperationalError):
        tables.prepare(connection, (*tables.MIGRATIONS, "ALTER TABLE record ADD COLUMN note TEXT; nonsense"))
    assert tables.version(connection) == tables.VERSION
    with pytest.raises(sqlite3.OperationalError):
        connection.execute("SELECT note FROM record")
    connection.close()


async def test_what_is_counted_of_stored_answers(tmp_path):
    measured = JournalMetrics()
    async with opened(tmp_path / "j.db", measured) as journal:
        measured.view = journal
        await journal.add(record())
        await journal.add(record("resp_2", background=False))
        await append(journal.tokens("resp_1"), [1])
        await journal.finish("resp_1", "completed")
        await journal.finish("resp_1", "failed")
        await journal.fail_foreground("the server ended")
        await until(lambda: journal.state.stored == {"completed": 1, "failed": 1})
        with journal.hold("resp_1"), journal.hold("resp_1"):
            found = {s.name: s.value for family in measured.collect() for s in family.samples if not s.labels}
            by_status = {
                (s.name, s.labels["status"]): s.value
                for family in measured.collect()
                for s in family.samples
                if s.labels.get("status") in ("completed", "failed")
            }
    assert found["marathon_journal_writable"] == 1
    assert found["marathon_stored_answer_readers"] == 2
    assert found["marathon_journal_bytes"] >= 4096
    assert found["marathon_journal_limit_bytes"] == 2**30
    assert found["marathon_journal_commit_seconds_count"] >= 5
    assert set(by_status.values()) == {1}
    assert len(by_status) == 4
