"""`marathon journal`: stored answers on a terminal, beside a server that goes on."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from commanding import in_thread
from journaling import append, opened, record

from server.journal.journal import Journal


async def fill(journal: Journal) -> None:
    for n in range(3):
        await journal.add(record(f"resp_{n}", metadata={"n": str(n)}))
        await append(journal.tokens(f"resp_{n}"), list(range(300)))
    for n in range(2):
        await journal.finish(f"resp_{n}", "completed", answer=b'{"text": "\xc3\xbc"}', finishes=["stop"])


async def test_answers_are_listed_shown_and_exported_beside_a_server(tmp_path: Path, capsys) -> None:
    path = tmp_path / "j.db"
    async with opened(path) as journal:
        await fill(journal)
        listed = await in_thread(capsys, "journal", "--journal", str(path))
        as_json = await in_thread(capsys, "journal", "list", "--json", "--journal", str(path))
        shown = await in_thread(capsys, "journal", "show", "resp_1", "--journal", str(path))
        exported = await in_thread(capsys, "journal", "export", "--journal", str(path))
        one = await in_thread(capsys, "journal", "export", "resp_2", "--journal", str(path))
        await append(journal.tokens("resp_2", [[0] * 300]), [300])
    lines = listed.out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["id", "status"], ["resp_0", "completed"], ["resp_1", "completed"], ["resp_2", "queued"]
    ]  # fmt: skip
    assert lines[1].endswith("300")
    assert [json.loads(line)["tokens"] for line in as_json.out.splitlines()] == [300] * 3
    whole = json.loads(shown.out)
    assert (whole["request"], whole["answer"], whole["ids"]) == ({"input": "hello"}, {"text": "ü"}, [[*range(300)]])
    assert [json.loads(line)["id"] for line in exported.out.splitlines()] == ["resp_0", "resp_1", "resp_2"]
    assert json.loads(one.out)["status"] == "queued"
    assert (listed.code, listed.err) == (0, "")


async def test_what_is_deleted_is_gone_for_the_server_too(tmp_path: Path, capsys) -> None:
    path = tmp_path / "j.db"
    async with opened(path) as journal:
        await fill(journal)
        unfinished = await in_thread(capsys, "journal", "delete", "resp_2", "--journal", str(path))
        assert (unfinished.code, unfinished.out) == (2, "")
        assert "cancel it there first" in unfinished.err
        assert (await in_thread(capsys, "journal", "delete", "resp_0", "--journal", str(path))).out == "1 deleted\n"
        assert await journal.get("resp_0", "") is None
        assert (await in_thread(capsys, "journal", "delete", "--all", "--journal", str(path))).out == "1 deleted\n"
        assert [one.id for one in (await journal.page("response", ""))[0]] == ["resp_2"]
        await journal.finish("resp_2", "completed")
    async with opened(path) as journal:
        await journal.add(record("resp_3"))
    assert (await in_thread(capsys, "journal", "delete", "resp_3", "--journal", str(path))).out == "1 deleted\n"


async def test_a_damaged_answer_is_named_and_the_others_are_exported(tmp_path: Path, capsys) -> None:
    path = tmp_path / "j.db"
    async with opened(path) as journal:
        await fill(journal)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE tokens SET ids = zeroblob(1024) WHERE number = 2 AND first = 0")
    connection.execute("UPDATE content SET body = x'00' WHERE number = 3")
    connection.commit()
    connection.close()
    found = await in_thread(capsys, "journal", "export", "--journal", str(path))
    assert [json.loads(line)["id"] for line in found.out.splitlines()] == ["resp_0"]
    assert found.err.splitlines() == [
        "marathon: the tokens of resp_1 are damaged",
        "marathon: the request of resp_2 is damaged",
    ]
    assert found.code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--journal", "off"], "the journal is off"),
        (["--journal", "/nowhere/j.db"], "there is no journal at /nowhere/j.db"),
        (["show", "--journal", "{path}"], "needs an id"),
        (["delete", "--journal", "{path}"], "needs an id"),
        (["show", "resp_9", "--journal", "{path}"], "no answer resp_9"),
        (["delete", "resp_9", "--journal", "{path}"], "no answer resp_9"),
        (["export", "resp_9", "--journal", "{path}"], "no answer resp_9"),
        (["export", "resp_1", "resp_9", "--journal", "{path}"], "no answer resp_9"),
        (["list", "--journal", "{other}"], "is no journal"),
        (["list", "--journal", "{text}"], "can't be used"),
        (["list", "--journal", "{newer}"], "has version 99"),
    ],
)
async def test_a_mistake_is_one_line(tmp_path: Path, capsys, arguments: list[str], words: str) -> None:
    places = {name: str(tmp_path / name) for name in ("path", "other", "text", "newer")}
    for name in ("path", "newer"):
        async with opened(places[name]) as journal:
            await journal.add(record())
    for name, statement in (("newer", "PRAGMA user_version = 99"), ("other", "CREATE TABLE photos (name TEXT)")):
        connection = sqlite3.connect(places[name])
        connection.execute(statement)
        connection.close()
    Path(places["text"]).write_text("Dear diary,\n" * 100)
    found = await in_thread(capsys, "journal", *(argument.format(**places) for argument in arguments))
    assert (found.code, found.out) == (2, "")
    (line,) = found.err.splitlines()
    assert words in line


async def test_without_a_journal_the_list_says_where_it_would_be(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = await in_thread(capsys, "journal")
    assert (found.code, found.err) == (0, "")
    assert found.out == f"nothing is stored; a server would do it in {tmp_path}/mlx-marathon/journal.db\n"
