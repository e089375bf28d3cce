"""The program that kills servers under background streams would notice what is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from loadtests.outlive import ReaderTally, ResponseReader, script

Event = dict[str, Any]
TEXT = "".join(script("qa"))


def undisturbed() -> list[Event]:
    """Events of a whole answer."""
    deltas = [{"type": "response.output_text.delta", "delta": piece} for piece in script("qa")]
    events = [{"type": "response.created", "response": {"id": "resp_1"}}, *deltas, {"type": "response.completed"}]
    return [{"sequence_number": number} | event for number, event in enumerate(events)]


class CutServer:
    """Tells the events of an answer and cuts each connection after some of them."""

    def __init__(self, events: list[Event], text: str = TEXT) -> None:
        self._events = events
        self._text = text

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and "stream" not in request.url.params:
            made = {"status": "completed", "output": [{"content": [{"text": self._text}]}]}
            return httpx.Response(200, json=made)
        after = int(request.url.params.get("starting_after", -1))
        rest = [event for event in self._events if event["sequence_number"] > after]
        return httpx.Response(200, content=b"".join(served(rest[:150])))


def served(events: list[Event]) -> Iterator[bytes]:
    for event in events:
        yield b"data: " + json.dumps(event).encode() + b"\n\n"


async def problems(server: CutServer) -> list[str]:
    tally = ReaderTally()
    transport = httpx.MockTransport(server)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        reader = ResponseReader(client, "qa", tally)
        await reader.read()
        await reader.judge()
    assert tally.connections >= 3
    return tally.problems


async def test_an_answer_over_several_connections_is_whole() -> None:
    assert await problems(CutServer(undisturbed())) == []


def lose(events: list[Event]) -> None:
    del events[40]


def repeat(events: list[Event]) -> None:
    events.insert(41, events[40])


def change(events: list[Event]) -> None:
    events[200]["delta"] = " pear"


def fail(events: list[Event]) -> None:
    events[-1]["type"] = "response.failed"


@pytest.mark.parametrize(
    ("harm", "words"),
    [(lose, "came where 40 should"), (repeat, "came where 41 should"), (change, "difference is at"), (fail, "failed")],
)
async def test_what_is_lost_repeated_or_changed_is_a_problem(harm: Callable[[list[Event]], None], words: str) -> None:
    events = undisturbed()
    harm(events)
    assert any(words in problem for problem in await problems(CutServer(events)))


async def test_a_stored_answer_that_differs_is_a_problem() -> None:
    assert await problems(CutServer(undisturbed(), text="Other.")) != []
