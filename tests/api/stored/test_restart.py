"""A server that takes up what an earlier one left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from responding import PATH
from serving import HELLO, MODEL, USER, engine, named_events, says
from stored_answers import create, ended, events_text, first_events, get, keeping, numbers, without_signs

LONG = " ".join(f"word {n}" for n in range(80))


def slow(text: str = LONG, seconds: float = 0.01) -> FakeEngine:
    return engine(say=says(text), step_seconds=seconds)


async def test_background_responses_go_on_with_the_next_server_and_no_event_is_lost(tmp_path: Path) -> None:
    async with keeping(tmp_path, slow()) as site:
        first = await first_events(site, {"input": "x", "background": True}, 30)
        second = (await create(site, "y"))["id"]
        id = first[0]["response"]["id"]
        reader = asyncio.create_task(events_text(site, id))
        await asyncio.sleep(0.05)
    seen = numbers(await reader)
    assert named_events(without_signs(reader.result()))[-1]["type"].endswith("delta"), "it hasn't ended for the reader"
    fake = slow(seconds=0.001)
    async with keeping(tmp_path, fake) as site:
        rest = await events_text(site, id, seen[-1])
        assert numbers(rest)[0] == seen[-1] + 1
        whole = without_signs(await events_text(site, id))
        assert whole == without_signs(reader.result()).rstrip() + "\n\n" + without_signs(rest)
        assert numbers(whole) == list(range(len(numbers(whole))))
        for one in (id, second):
            made = await ended(site, one)
            assert (made["status"], made["output"][0]["content"][0]["text"]) == ("completed", LONG)
        submitted = [len(submit.generated) for submit in fake.submits]
        assert submitted[0] >= 20, "the oldest first, from where it was"


async def test_a_server_without_an_engine_yet_has_them_wait_and_lets_them_be_cancelled(tmp_path: Path) -> None:
    async with keeping(tmp_path, slow()) as site:
        ids = [(await create(site, "x", stream=True) if n < 0 else await create(site))["id"] for n in range(2)]
    fake = slow(seconds=0.001)
    fake.loads.clear()
    async with keeping(tmp_path, fake, ready=False) as site:
        cancelling = asyncio.create_task(site.client.post(f"{PATH}/{ids[0]}/cancel"))
        async with asyncio.timeout(10):
            while (found := await site.served.journal.get(ids[0], "")) is None or found.status != "cancelled":
                await asyncio.sleep(0.01)
        assert not fake.submits
        fake.loads.set()
        assert (await cancelling).json()["status"] == "cancelled"
        assert (await ended(site, ids[1]))["status"] == "completed"
        assert (await get(site, ids[0]))["status"] == "cancelled"
        assert len(fake.submits) == 1


async def test_what_another_model_began_has_failed_and_says_which_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keeping(tmp_path, slow()) as site:
        id = (await first_events(site, {"input": "x", "background": True}, 10))[0]["response"]["id"]
        done = (await create(site, "y", max_output_tokens=3))["id"]
        await ended(site, done)
    monkeypatch.setattr("server.api.stored.answers.answer_fingerprint", lambda folder: "another")
    async with keeping(tmp_path) as site:
        made = await ended(site, id)
        assert (made["status"], made["error"]["code"]) == ("failed", "server_error")
        assert f"begun by the model '{MODEL}'" in made["error"]["message"]
        assert (await get(site, done))["status"] == "incomplete", "what has ended is still shown"
        replay = await site.client.get(f"{PATH}/{id}", params={"stream": "true"})
        assert (replay.status_code, replay.json()["error"]["code"]) == (409, "another_model")


async def test_a_stored_chat_goes_on_with_the_next_server(tmp_path: Path) -> None:
    async with keeping(tmp_path, engine(say=says(LONG, HELLO), step_seconds=0.01)) as site:
        body = {"messages": USER, "store": True, "n": 2, "stream": True}
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(60):
                line = await anext(lines)
        assert line is not None
    async with keeping(tmp_path, engine(say=says(LONG, HELLO))) as site:
        async with asyncio.timeout(10):
            while not (page := (await site.client.get("/v1/chat/completions")).json())["data"]:
                await asyncio.sleep(0.02)
        texts = [choice["message"]["content"] for choice in page["data"][0]["choices"]]
        assert texts == [LONG, HELLO]
