"""What is seen of a long prompt while it is being read: its progress, and that the engine isn't stale."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from serving import MODEL, USER, Site, engine, run_server

from server.ipc.snapshot import PromptProgress
from server.supervision import prefill_log
from server.supervision.prefill_log import PrefillLog

TIMESTAMP = re.compile(r"^marathon_engine_last_step_timestamp_seconds (\S+)$", re.MULTILINE)
SECONDS = 1.2  # of a prompt, in 24 chunks


@asynccontextmanager
async def slow_site(**settings: Any) -> AsyncIterator[Site]:
    fake = engine(prefill_seconds=SECONDS, prefill_chunks=24, progress_seconds=0.02)
    async with run_server(fake, **({"keepalive_seconds": 0.1} | settings)) as site:
        yield site


async def comments(site: Site, lines: list[str]) -> None:
    """Adds the comments of a stream as they come."""
    body = {"model": MODEL, "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    async with site.client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith(":") or "prompt_tokens" in line:
                lines.append(line)


async def get(site: Site, path: str) -> httpx.Response:
    return await site.client.get(path)


async def test_keep_alive_comments_say_how_much_of_the_prompt_is_read() -> None:
    async with slow_site() as site:
        lines: list[str] = []
        await comments(site, lines)
        *reported, usage = lines
        total = re.findall(r'"prompt_tokens":(\d+)', usage)[0]
        found = [re.fullmatch(r": prefill (\d+)/(\d+)", line) for line in reported]
        pairs = [match.groups() for match in found if match]
        assert len(pairs) >= 3
        assert {whole for _, whole in pairs} == {total}
        done = [int(one) for one, _ in pairs]
        assert done == sorted(done)
        assert done[0] < done[-1] < int(total)
        assert set(reported) - {match[0] for match in found if match} <= {": keep-alive"}


async def test_a_request_that_waits_for_its_turn_has_no_progress_yet() -> None:
    async with slow_site(max_rows=1) as site:
        first = asyncio.create_task(site.chat())
        await site.until(lambda: bool(site.fake.rows))
        lines: list[str] = []
        await comments(site, lines)
        await first
        assert lines[0] == ": keep-alive"
        assert any(line.startswith(": prefill") for line in lines)


async def test_debug_shows_each_prompt_that_is_being_read() -> None:
    async with slow_site() as site:
        assert (await get(site, "/debug/batches")).json()["prompts"] == []
        task = asyncio.create_task(site.chat())
        seen: list[dict[str, int]] = []
        while not task.done():
            batches = (await get(site, "/debug/batches")).json()
            assert len(batches["prompts"]) == batches["prefilling"] <= 1
            seen += batches["prompts"]
            await asyncio.sleep(0.02)
        total = task.result().json()["usage"]["prompt_tokens"]
        assert {prompt["total"] for prompt in seen} == {total}
        assert {prompt["seq"] for prompt in seen} == {1}
        done = [prompt["done"] for prompt in seen]
        assert done == sorted(done)
        assert len(set(done)) >= 3
        await site.until(lambda: site.served.supervisor.engine.snapshot is not None)
        await asyncio.sleep(0.1)
        assert (await get(site, "/debug/batches")).json()["prompts"] == []


async def test_an_engine_that_reads_a_prompt_isnt_stale() -> None:
    async with slow_site() as site:
        assert (await get(site, "/health")).json()["engine"]["last_step_age_seconds"] is None
        assert not TIMESTAMP.search((await get(site, "/metrics")).text)
        task = asyncio.create_task(site.chat())
        await asyncio.sleep(SECONDS / 3)
        ages, times = [], []
        while not task.done():
            ages.append((await get(site, "/health")).json()["engine"]["last_step_age_seconds"])
            stamp = TIMESTAMP.search((await get(site, "/metrics")).text)
            assert stamp
            times.append(float(stamp[1]))
            await asyncio.sleep(0.05)
        assert max(ages) < SECONDS * 0.75, "a step alone would come after all of it"
        assert times[-1] - times[0] > SECONDS / 4
        assert abs(times[-1] - time.time()) < SECONDS


async def test_a_prompt_at_which_the_engine_stands_still_gets_older() -> None:
    async with slow_site(stall_seconds=30) as site:
        task = asyncio.create_task(site.chat())
        await asyncio.sleep(SECONDS / 3)
        site.fake.freeze()
        await asyncio.sleep(0.6)
        assert (await get(site, "/health")).json()["engine"]["last_step_age_seconds"] > 0.4
        site.fake.thaw()
        assert (await task).status_code == 200


# ---------------------------------------------------------------- the log
class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def facts(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.facts for record in caplog.records if hasattr(record, "facts")]


def test_a_line_every_ten_seconds_says_tokens_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marathon")
    clock = Clock()
    log = PrefillLog(clock)
    for second in range(36):
        clock.now = 100.0 + second
        log.observe([PromptProgress(7, 100 * (second + 1), 10_000), PromptProgress(8, 0, 500)])
    assert facts(caplog) == [
        {"sequence": 7, "done": 1100, "total": 10_000, "seconds_left": 89},
        {"sequence": 7, "done": 2100, "total": 10_000, "seconds_left": 79},
        {"sequence": 7, "done": 3100, "total": 10_000, "seconds_left": 69},
    ]


def test_the_time_left_follows_the_newest_pace_and_is_absent_while_unknown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marathon")
    clock = Clock()
    log = PrefillLog(clock)
    for now, done in [(0, 100), (10, 100), (20, 1100), (30, 1600), (40, 1600), (45, 1800), (50, 1800)]:
        clock.now = 100.0 + now
        log.observe([PromptProgress(7, done, 2100)])
    assert [one["seconds_left"] for one in facts(caplog)] == [None, 20, 10, 0, 18]


def test_a_chunk_that_takes_longer_than_a_line_doesnt_make_the_pace_look_better(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "marathon")
    clock = Clock()
    log = PrefillLog(clock)
    for second in range(200):
        clock.now = 100.0 + second
        log.observe([PromptProgress(7, 64 * (1 + second // 25), 6400)])
    lines = facts(caplog)[3:]
    assert len(lines) > 12
    for number, one in enumerate(lines, 4):
        assert abs(one["seconds_left"] - (100 * 25 - 10 * number)) <= 26, one


def test_the_pace_is_known_from_the_second_news_on_and_follows_the_newest() -> None:
    clock = Clock()
    log = PrefillLog(clock)
    found = []
    for now, done in [(0, 0), (1, 100), (2, 200), (4, 400), (12, 1200), (13, 1200), (14, 1200), (16, 1240)]:
        clock.now = 100.0 + now
        log.observe([PromptProgress(7, done, 9000)])
        found.append(log.paces().get(7))
    assert found == [None, None, 100, 100, 100, 100, 100, 10]
    log.observe([])
    assert log.paces() == {}


def test_short_prompts_and_those_that_are_gone_write_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marathon")
    clock = Clock()
    log = PrefillLog(clock)
    for second in range(60):
        clock.now = 100.0 + second
        log.observe([PromptProgress(second // 9, 64 * (second % 9), 10_000)])
    assert not caplog.records


async def test_the_log_reports_a_prompt_under_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_log, "EVERY_SECONDS", 0.3)
    caplog.set_level(logging.INFO, "marathon")
    async with slow_site() as site:
        await site.chat()
    lines = [one for one in facts(caplog) if "seconds_left" in one]
    assert len(lines) >= 2
    assert all(0 < one["done"] < one["total"] for one in lines)
    assert all(one["seconds_left"] <= 2 for one in lines)
