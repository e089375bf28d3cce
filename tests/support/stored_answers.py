"""Servers with a journal, and stored answers as tests ask for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from responding import PATH
from serving import MODEL, Site, run_server

FINAL = ("completed", "incomplete", "failed", "cancelled")


@asynccontextmanager
async def keeping(folder: Path, fake: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Site]:
    """A server whose journal lies in the folder."""
    async with run_server(fake, journal=str(folder / "journal.db"), **settings) as site:
        yield site


async def create(site: Site, given: Any = "Say hello.", **fields: Any) -> dict[str, Any]:
    """A response in the background, as the first answer tells it."""
    answer = await site.post(PATH, {"model": MODEL, "input": given, "background": True} | fields)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def get(site: Site, id: str, **query: Any) -> dict[str, Any]:
    answer = await site.client.get(f"{PATH}/{id}", params=query)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def ended(site: Site, id: str, seconds: float = 10) -> dict[str, Any]:
    """Polls until its status is final."""
    async with asyncio.timeout(seconds):
        while (made := await get(site, id))["status"] not in FINAL:
            await asyncio.sleep(0.01)
    return made


async def events_text(site: Site, id: str, after: int | None = None) -> str:
    """The stream of a stored response, to its end."""
    query = {"stream": "true"}
    if after is not None:
        query["starting_after"] = str(after)
    answer = await site.client.get(f"{PATH}/{id}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.text


def without_signs(text: str) -> str:
    """A stream without its signs of life."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return "\n\n".join(block for block in blocks if not block.startswith("event: keepalive"))


def numbers(text: str) -> list[int]:
    """Sequence numbers of a stream's events."""
    blocks = without_signs(text).split("\n\n")
    return [json.loads(block.split("data: ", 1)[1])["sequence_number"] for block in blocks if block]


async def first_events(site: Site, body: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The first events of a new stream, whose connection is then dropped."""
    found: list[dict[str, Any]] = []
    async with site.client.stream("POST", PATH, json={"model": MODEL, "stream": True} | body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if event["type"] != "keepalive":
                    found.append(event)
            if len(found) == count:
                break
    return found
