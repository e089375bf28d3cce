"""A request's messages → messages as chat templates know them.

Owns what becomes of members that templates don't know: older names of calls, refusals, content in parts. Runs in the
server's worker thread; pure. Never drops what was said: what it can't express is refused before, by
`api/input/refusals.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from server.api.input.members import declared
from server.api.input.schema import CalledFunction, Message

_KNOWN = ("role", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")


def spoken(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The conversation: text parts are one text, what wasn't said is empty, and each call is a tool call."""
    turns: list[dict[str, Any]] = []
    open_call: str | None = None  # of the older kind, which has no id
    for index, message in enumerate(messages):
        turn = {name: declared(value) for name in _KNOWN if (value := getattr(message, name)) is not None}
        if message.function_call is not None:
            open_call = f"call_{index}"
            turn["tool_calls"] = [_call(message.function_call, open_call)]
        elif message.role == "function" and open_call is not None:
            turn.setdefault("tool_call_id", open_call)
            open_call = None
        turns.append(turn | {"content": text_of(message)})
    return turns


def _call(function: CalledFunction, name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": declared(function)}


def text_of(message: Message) -> str:
    """What a message says; where the assistant refused, its words for that come last."""
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text or part.refusal or "" for part in content or [])
    return "\n\n".join(filter(None, (content, message.refusal)))
