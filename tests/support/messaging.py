"""The Messages API as tests speak it: requests, streams as events, and events put together by the official SDK."""

from __future__ import annotations

import functools
from typing import Any

import anthropic
import httpx2
from serving import MODEL, Site, named_events

from server.api.output.messages_schema import AnthropicErrorBody, AnthropicMessage, MessageEvent

PATH = "/v1/messages"
USER = [{"role": "user", "content": "Say hello."}]
Event = dict[str, Any]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": USER} | fields


async def ask(site: Site, **fields: Any) -> dict[str, Any]:
    answer = await site.post(PATH, body(**fields))
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    AnthropicMessage.model_validate(made)
    return made


async def stream(site: Site, **fields: Any) -> list[Event]:
    answer = await site.post(PATH, body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def events_of(text: str) -> list[Event]:
    """Events, held to the rules that every stream keeps; signs of life are left out."""
    found = []
    for event in named_events(text):
        form = AnthropicErrorBody if event["type"] == "error" else MessageEvent
        form.model_validate(event)
        if event["type"] != "ping":
            found.append(event)
    assert found[0]["type"] == "message_start"
    assert [event["type"] for event in found if event["type"] in ("message_stop", "error")] == [found[-1]["type"]]
    return found


def kinds(events: list[Event]) -> list[str]:
    """Types in a row, with the kind of the block or delta; repeated deltas once."""
    names = []
    for event in events:
        inner = event.get("content_block") or event.get("delta") or {}
        names.append(" ".join(filter(None, (event["type"], inner.get("type")))))
    return [name for n, name in enumerate(names) if n == 0 or name != names[n - 1]]


def folded(data: bytes) -> dict[str, Any]:
    """The message that the SDK makes of a stream's bytes."""
    client, answers = offline()
    answers.append(httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data))
    with client.messages.stream(model=MODEL, max_tokens=9, messages=[]) as helper:
        return plain(helper.get_final_message())


@functools.cache
def offline() -> tuple[anthropic.Anthropic, list[httpx2.Response]]:
    """A client that is given the next one of these answers, whatever it asks."""
    answers: list[httpx2.Response] = []
    transport = httpx2.MockTransport(lambda request: answers.pop())
    return anthropic.Anthropic(api_key="x", http_client=httpx2.Client(transport=transport, trust_env=False)), answers


def plain(message: anthropic.types.Message) -> dict[str, Any]:
    """A message of the SDK's as the server wrote it."""
    return message.to_dict(exclude_unset=True)


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two answers to the same request share."""
    return [{name: value for name, value in block.items() if name != "id"} for block in content]
