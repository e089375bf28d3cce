"""/status and /status/events: what a server says of itself, second by second."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from serving import Site, engine, run_server, says

from server.ipc.messages import WeightsRead
from server.status import feed


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "TICK_SECONDS", 0.05)


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def report(site: Site) -> Any:
    return (await site.client.get("/status")).json()


async def until_event(site: Site, kind: str) -> Any:
    async with asyncio.timeout(10):
        while True:
            found = await report(site)
            if any(event["kind"] == kind for event in found["events"]):
                return found
            await asyncio.sleep(0.02)


async def test_the_history_comes_first_and_then_a_report_each_second() -> None:
    async with run_server() as site, site.client.stream("GET", "/status/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        name, points = await anext(stream)
        assert name == "history"
        assert all(len(point) == 8 for point in points)
        times = [(await anext(stream))[1]["status"]["time"] for _ in range(3)]
        assert times == sorted(set(times))


async def test_running_generations_are_listed_without_their_text() -> None:
    async with run_server(engine(say=says("word", stop=False))) as site:
        body = {"model": "tiny", "prompt": "a secret of mine", "max_tokens": 100_000, "stream": True}
        async with site.client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
            found = await report(site)
    (row,) = found["status"]["rows"]
    assert (row["endpoint"], row["state"]) == ("completions", "decoding")
    assert row["tokens"] > 0
    assert "secret" not in json.dumps(found)


async def test_a_death_and_a_resume_are_events_and_the_row_counts_what_it_survived() -> None:
    async with run_server(engine(say=says("word", stop=False))) as site:
        body = {"model": "tiny", "prompt": "Say", "max_tokens": 100_000, "stream": True}
        async with site.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_bytes()
            await anext(pieces)
            site.fake.die()
            found = await until_event(site, "resume")
            kinds = [event["kind"] for event in found["events"]]
            assert kinds.index("death") < kinds.index("resume")
            assert found["status"]["rows"][0]["survived"] == 1
            assert found["status"]["engine"]["restarts"]["crash"] == 1
            assert any("died once" in sentence for sentence in found["verdict"]["sentences"])
    numbers = [event["number"] for event in found["events"]]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_an_engine_that_is_back_within_the_second_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "TICK_SECONDS", 0.5)
    async with run_server() as site:
        await until_event(site, "ready")
        site.fake.die()
        found = await until_event(site, "death")
        async with asyncio.timeout(5):
            while not any(event["text"] == "engine 2 is ready" for event in found["events"]):
                await asyncio.sleep(0.02)
                found = await report(site)


async def test_a_planned_rotation_is_no_death() -> None:
    async with run_server() as site:
        site.fake.rotate()
        found = await until_event(site, "rotation")
        assert not any(event["kind"] == "death" for event in found["events"])
        assert not any("died" in sentence for sentence in found["verdict"]["sentences"])


async def test_an_open_stream_does_not_hold_up_the_end() -> None:
    async with run_server() as site, site.client.stream("GET", "/status/events") as response:
        stream = events(response)
        await anext(stream)
        site.server.handle_exit(2, None)
        began = time.monotonic()
        async for _ in stream:
            pass
        assert time.monotonic() - began < 2


async def test_many_readers_get_the_same_frames_from_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = 0
    read = feed.state.read

    def counted(*arguments: Any) -> Any:
        nonlocal readings
        readings += 1
        return read(*arguments)

    monkeypatch.setattr(feed.state, "read", counted)
    async with run_server() as site:

        async def follow() -> list[float]:
            async with site.client.stream("GET", "/status/events") as response:
                stream = events(response)
                await anext(stream)
                return [(await anext(stream))[1]["status"]["time"] for _ in range(4)]

        before = readings
        found = await asyncio.gather(*(follow() for _ in range(20)))
        assert readings - before < 20
        assert len({time for times in found for time in times}) < 20


async def test_a_reader_of_the_server_says_how_long_first_tokens_take() -> None:
    async with run_server() as site:
        assert (await report(site))["status"]["first_token_seconds"] is None
        await site.chat(max_tokens=3)
        async with asyncio.timeout(5):
            while (seconds := (await report(site))["status"]["first_token_seconds"]) is None:
                await asyncio.sleep(0.02)
        assert 0 < seconds < 5


async def test_a_prompt_that_is_read_says_how_fast_and_when_it_ends() -> None:
    slow = engine(prefill_seconds=6.0, prefill_chunks=12, progress_seconds=0.1)
    async with run_server(slow) as site:
        asking = asyncio.create_task(site.chat(max_tokens=1))
        async with asyncio.timeout(5):
            while not (rows := (await report(site))["status"]["rows"]) or rows[0]["read_per_second"] is None:
                await asyncio.sleep(0.05)
        (row,) = rows
        assert row["read_seconds_left"] == pytest.approx((row["to_read"] - row["read"]) / row["read_per_second"])
        asking.cancel()


async def test_a_load_says_how_far_the_weights_are() -> None:
    fake = engine(weights=WeightsRead(3, 12), progress_seconds=0.05)
    fake.loads.clear()
    async with run_server(fake, ready=False) as site:
        async with asyncio.timeout(5):
            while (found := (await report(site))["status"]["engine"])["weights_total"] is None:
                await asyncio.sleep(0.02)
        assert (found["weights_read"], found["weights_total"]) == (3, 12)
        fake.loads.set()
        await site.until(lambda: site.served.supervisor.is_ready)
        assert (await report(site))["status"]["engine"]["weights_total"] is None


async def test_a_clock_that_is_set_back_leaves_the_points_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server() as site:
        points = site.served.feed.points
        await site.until(lambda: len(points) > 3)
        before = points[0].time
        monkeypatch.setattr(feed.state.time, "time", lambda: before - 3600)
        site.served.feed.advance()
        times = [point.time for point in points]
        assert times == [before - 3600]


async def test_points_of_a_long_life_keep_within_their_bound() -> None:
    """As its events do, which are in a list of the same kind."""
    async with run_server() as site:
        kept = site.served.feed
        for _ in range(feed.HISTORY_POINTS + 50):
            kept.advance()
        assert len(kept.points) == feed.HISTORY_POINTS
        times = [point.time for point in kept.points]
        assert times == sorted(set(times))
        assert kept.events.maxlen == feed.MOST_EVENTS


async def test_reports_go_on_after_one_that_could_not_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server() as site, site.client.stream("GET", "/status/events") as response:
        stream = events(response)
        await anext(stream)
        judge = feed.verdict.judge
        left = [ValueError("no verdict")] * 3

        def fail(*judged: Any) -> Any:
            if left:
                raise left.pop()
            return judge(*judged)

        monkeypatch.setattr(feed.verdict, "judge", fail)
        async with asyncio.timeout(10):
            while left:
                await asyncio.sleep(0.02)
            last = await report(site)
            while (await anext(stream))[1]["status"]["time"] <= last["status"]["time"]:
                pass
    assert caplog.text.count("making a report failed") == 1
