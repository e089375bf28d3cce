"""The Responses API as tests speak it: requests, streams as events, and events put together as clients do it."""

from __future__ import annotations

import json
from typing import Any

from serving import MODEL, Site, named_events

PATH = "/v1/responses"
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
Event = dict[str, Any]


async def respond(site: Site, given: Any = "Say hello.", **fields: Any) -> dict[str, Any]:
    answer = await site.post(PATH, {"model": MODEL, "input": given} | fields)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def stream(site: Site, given: Any = "Say hello.", **fields: Any) -> list[Event]:
    """The events of a stream whose form is right."""
    answer = await site.post(PATH, {"model": MODEL, "input": given, "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def events_of(text: str) -> list[Event]:
    """Events, held to the rules that every stream keeps; signs of life are left out."""
    found = [event for event in named_events(text) if event["type"] != "keepalive"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert [n for n, event in enumerate(found) if event["type"] in TERMINAL] == [len(found) - 1]
    return found


def kinds(events: list[Event]) -> list[str]:
    """Types in a row, repeated deltas once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for n, name in enumerate(names) if n == 0 or name != names[n - 1] or not name.endswith("delta")]


def folded(events: list[Event]) -> list[dict[str, Any]]:
    """The items as a client has them that adds up deltas and looks at no event of an end."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "content_part.added":
            assert event["content_index"] == len(items[-1]["content"])
            items[-1]["content"].append(json.loads(json.dumps(event["part"])))
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            assert (event["item_id"], event["output_index"]) == (item["id"], len(items) - 1)
            _add(item, kind, event)
    return items


def _add(item: dict[str, Any], kind: str, event: Event) -> None:
    if kind == "function_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind == "custom_tool_call_input.delta":
        item["input"] += event["delta"]
    else:
        part = item["content"][event["content_index"]]
        part["text"] += event["delta"]
        part.get("logprobs", []).extend(event.get("logprobs", []))


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two answers to the same request share."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def without_ends(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What deltas tell: neither the status nor what is sealed."""
    return [
        {name: value for name, value in item.items() if name not in ("status", "encrypted_content")} for item in items
    ]
