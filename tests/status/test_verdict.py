"""The verdict says in words what is wrong with a server, and what happens next."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.journal.state import JournalState
from server.status import verdict
from server.status.state import BufferState, EngineFacts, MemoryState, QueueState, RowState, Status
from server.status.verdict import Deaths, Verdict, judge

ENGINE = EngineFacts(True, 1, 7, "serving", None, False, 0.1, {"crash": 0}, {"crash": 0})
BUFFERS = BufferState("metal", 1200, 499_000, 0.0, 0)
MEMORY = MemoryState(10, 100, 1, 1, 20, 200)
QUEUE = QueueState(0, 0, 0, 32, 256)
ROW = RowState(1, "chat", "decoding", 3.0, 10, 20, 100, 9.0, None, None, 0)


def status(**changes: Any) -> Status:
    fields: dict[str, Any] = {
        "time": 0.0, "model": "m", "version": "1", "uptime_seconds": 9.0, "draining": False, "ready": True,
        "tokens_per_second": 12.0, "first_token_seconds": 0.2, "pressure": "calm", "seconds_to_exhaustion": {},
        "engine": ENGINE, "buffers": BUFFERS, "memory": MEMORY, "queue": QUEUE, "rows": [], "more_rows": 0,
        "log": "/var/log/m.log",
    }  # fmt: skip
    return Status(**(fields | changes))


def engine(**changes: Any) -> EngineFacts:
    return msgspec.structs.replace(ENGINE, **changes)


def words(found: Verdict) -> str:
    return " ".join(found.sentences)


def test_an_idle_server_is_healthy_and_says_how_far_the_limit_is() -> None:
    found = judge(status())
    assert (found.level, found.title) == ("ok", "Healthy")
    assert "1,200 of 499,000" in words(found)
    assert "nothing is running" in words(found)


def test_a_running_server_says_how_fast_it_is() -> None:
    queue = msgspec.structs.replace(QUEUE, running=3)
    assert "3 sequences running, 12 tokens a second" in words(judge(status(queue=queue)))


def test_a_first_load_is_a_start_and_no_fault() -> None:
    found = judge(status(engine=engine(up=False, stage="loading the weights"), ready=False))
    assert found.level == "starting"
    assert "loading the weights" in words(found)


@pytest.mark.parametrize(("epoch", "title"), [(1, "Loading"), (3, "Recovering")])
def test_a_load_says_how_many_bytes_of_the_weights_are_read(epoch: int, title: str) -> None:
    loading = engine(
        up=False, epoch=epoch, stage="loading the weights", weights_read=3_200_000_000, weights_total=14_900_000_000
    )
    found = judge(status(engine=loading, ready=False))
    assert found.title == title
    assert "loading the weights, 3.2 of 14.9 GB, 21%" in found.sentences[0]


@pytest.mark.parametrize(
    ("rows", "said"), [([], "no answer is under way"), ([ROW], "1 answer waits"), ([ROW] * 4, "4 answers wait")]
)
def test_a_lost_engine_says_what_becomes_of_the_answers(rows: list[RowState], said: str) -> None:
    found = judge(status(engine=engine(up=False, epoch=3), ready=False, rows=rows), Deaths(1))
    assert (found.level, found.title) == ("warning", "Recovering")
    assert said in words(found)


def test_an_engine_that_cannot_be_started_is_critical_and_says_why() -> None:
    lost = engine(up=False, epoch=5, hopeless=True, down_reason="no process can be started")
    found = judge(status(engine=lost, ready=False), Deaths(3))
    assert found.level == "critical"
    assert "no process can be started" in found.sentences[0]


def test_engines_that_keep_dying_are_critical_and_one_death_is_mentioned() -> None:
    assert judge(status(), Deaths(3)).title == "The engine keeps dying"
    once = judge(status(engine=engine(resumed={"crash": 2})), Deaths(1))
    assert once.level == "ok"
    assert "died once" in words(once)
    assert "2 answers went on" in words(once)
    assert once.title == "Healthy; recovered from a death less than a minute ago"
    assert "Nothing has to be done. The log says how it ended: /var/log/m.log." in words(once)
    assert "went on" not in words(judge(status(engine=engine(resumed={})), Deaths(1))), "none has gone on yet"


@pytest.mark.parametrize(
    ("seconds", "said"), [(3, "less than a minute ago"), (90, "a minute ago"), (300, "5 minutes ago")]
)
def test_how_long_ago_a_death_was_changes_by_the_minute(seconds: float, said: str) -> None:
    """It is read out each time that it changes."""
    assert judge(status(), Deaths(2, seconds)).title.endswith(said)


def test_engines_that_keep_dying_name_the_log() -> None:
    assert "/var/log/m.log" in judge(status(), Deaths(3)).sentences[0]


@pytest.mark.parametrize(("seconds", "level"), [(600.0, "critical"), (86_400.0 * 3, "warning")])
def test_a_leak_says_its_pace_and_when_it_ends(seconds: float, level: str) -> None:
    leak = msgspec.structs.replace(BUFFERS, per_token=47.0)
    found = judge(status(buffers=leak, seconds_to_exhaustion={"buffers": seconds}))
    assert (found.level, found.title) == (level, "A leak")
    assert "47 a token" in found.sentences[0]
    assert verdict.duration(seconds) in found.sentences[0]


def test_a_flat_count_has_no_end_in_sight() -> None:
    assert judge(status(seconds_to_exhaustion={"buffers": None, "bytes": None})).level == "ok"


def test_without_a_count_pending_arrays_are_the_warning() -> None:
    blind = BufferState("off", None, None, None, 12)
    found = judge(status(buffers=blind))
    assert found.level == "warning"
    assert "12 cache arrays pending" in words(found)


def test_a_long_prompt_is_healthy_and_says_how_far_it_is() -> None:
    reading = msgspec.structs.replace(ROW, state="reading", tokens=0, read=6000, to_read=24_000)
    found = judge(status(rows=[reading], queue=msgspec.structs.replace(QUEUE, running=1)))
    assert found.level == "ok"
    assert "6,000 of 24,000 tokens (25%); its pace isn't known yet" in words(found)
    paced = msgspec.structs.replace(reading, read_per_second=60.0, read_seconds_left=300.0)
    assert "(25%), 60 a second, about 5 minutes left" in words(judge(status(rows=[paced])))


@pytest.mark.parametrize(("pressure", "level"), [("reclaim", "ok"), ("hold", "warning"), ("rotate", "warning")])
def test_pressure_is_put_into_words(pressure: str, level: str) -> None:
    assert judge(status(pressure=pressure)).level == level


def test_the_gravest_finding_comes_first() -> None:
    found = judge(status(pressure="hold", seconds_to_exhaustion={"bytes": 60.0}))
    assert found.title == "Memory runs out"
    assert "No new work" in found.sentences[1]


def test_a_drain_is_mentioned() -> None:
    assert judge(status(draining=True, ready=False)).title == "Shutting down"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(5, "5 seconds"), (119, "119 seconds"), (240, "4 minutes"), (7200, "2 hours"), (200_000, "2 days")],
)
def test_durations_are_said_as_people_do(seconds: float, said: str) -> None:
    assert verdict.duration(seconds) == said


@pytest.mark.parametrize(("condition", "level"), [("on", "ok"), ("off", "ok"), ("unavailable", "warning")])
def test_a_journal_that_cannot_be_written_is_a_warning_with_its_reason(condition: str, level: str) -> None:
    journal = JournalState(condition, "the disk is full", "j.db", 10, 100, {}, 0)
    found = judge(status(journal=journal))
    assert found.level == level
    assert ("the disk is full" in words(found)) == (condition == "unavailable")
