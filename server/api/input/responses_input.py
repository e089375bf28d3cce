"""Input items of the Responses API → messages in the words of chat templates.

Owns what becomes of each kind of item: thoughts, texts and calls of the assistant's that follow each other are one
message, system texts stay where they are, items of hosted tools are left out. Runs in the server's worker thread; pure.
Never drops what was said without a line in the log: what can't be expressed is refused with its place.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Sequence
from typing import Any

from server.api.input.responses_schema import HOSTED, InputItem, InputPart, PartsOrText
from server.errors import InvalidValue, UnsupportedParameter
from server.text.templates.turn import Message

SEALED = "marathon-1:"  # before a thought that travels as `encrypted_content`
_TEXTS = frozenset({"input_text", "output_text", "reasoning_text", "summary_text", "text"})

log = logging.getLogger("marathon.api")


def seal(thought: str) -> str:
    """A thought as clients keep and return it; it is theirs, and no secret from them."""
    return SEALED + base64.b64encode(thought.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The thought; None for what another server has sealed."""
    if not sealed.startswith(SEALED):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def qualified(name: str, namespace: str | None) -> str:
    """What the model calls a tool of a namespace."""
    if namespace is None:
        return name
    return f"{namespace}__{name}"


def messages(given: str | Sequence[InputItem], instructions: str | None) -> list[Message]:
    """The conversation, oldest first. Raises for an item that lacks what its kind needs, or shows what isn't text."""
    talk = _Talk()
    if instructions is not None:
        talk.say("system", instructions)
    if isinstance(given, str):
        talk.say("user", given)
        given = ()
    for index, item in enumerate(given):
        talk.add(item, f"input[{index}]")
    if talk.skipped:
        log.info("items of hosted tools are left out: %s", ", ".join(sorted(talk.skipped)))
    if not talk.messages:
        raise InvalidValue("input: there is nothing to answer", param="input")
    return talk.messages


class _Talk:
    """The messages so far; mutable, of one request."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.skipped: set[str] = set()

    def add(self, item: InputItem, where: str) -> None:
        kind = item.type or "message"
        if kind in HOSTED:
            self.skipped.add(kind)
        elif kind == "message":
            role = _needed(item.role, "role", kind, where)
            self.say(role, _text(_needed(item.content, "content", kind, where), f"{where}.content"))
        elif kind == "reasoning":
            self._think(_thought(item, where))
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, kind, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _text(_needed(item.output, "output", kind, where), f"{where}.output")
            call = _needed(item.call_id, "call_id", kind, where)
            self.messages.append({"role": "tool", "content": output, "tool_call_id": call})
        elif kind == "item_reference":
            message = f"{where}: there is no stored item {(item.id or '')[:100]!r}"
            raise InvalidValue(message, param=f"{where}.id")
        else:
            raise UnsupportedParameter(f"{where}: items of type {kind[:50]!r} aren't offered", param=f"{where}.type")

    def say(self, role: str, text: str) -> None:
        if role == "assistant":
            turn = self._assistant()
            turn["content"] += text
        else:
            self.messages.append({"role": role, "content": text})

    def _think(self, thought: str) -> None:
        turn = self._assistant()
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = "\n\n".join(filter(None, (before, thought)))

    def _call(self, item: InputItem, kind: str, where: str) -> None:
        name = qualified(_needed(item.name, "name", kind, where), item.namespace)
        if kind == "function_call":
            arguments = item.arguments or ""
        else:
            arguments = json.dumps({"input": item.input or ""}, ensure_ascii=False)
        call = {
            "id": _needed(item.call_id, "call_id", kind, where),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> Message:
        """The assistant's turn that is under way, or a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _needed(value: Any, name: str, kind: str, where: str) -> Any:
    if value is None:
        raise InvalidValue(f"{where}: an item of type {kind} needs {name}", param=f"{where}.{name}")
    return value


def _text(content: PartsOrText, where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: InputPart, where: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in _TEXTS:
        raise UnsupportedParameter(f"{where}: parts of type {part.type[:50]!r} aren't offered", param=where)
    if part.text is None:
        raise InvalidValue(f"{where}: a part of type {part.type} needs text", param=f"{where}.text")
    return part.text


def _thought(item: InputItem, where: str) -> str:
    """What a reasoning item says in the clear, else what it carries sealed, else its summary."""
    if item.content:
        return _text(item.content, f"{where}.content")
    if item.encrypted_content:
        found = unseal(item.encrypted_content)
        if found is None:
            log.warning("a thought that this server didn't seal is left out")
        return found or ""
    return "\n\n".join(_part(part, f"{where}.summary[{n}]") for n, part in enumerate(item.summary or []))
