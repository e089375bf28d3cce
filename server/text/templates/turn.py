"""One turn of a conversation: a message on its way from the client to the chat template.

Owns the border between what somebody typed, which is shielded here, and what the assistant wrote itself, whose control
tokens were its own. Runs in the server's worker thread; pure. Never decides which turns a template can take.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from server.errors import UnsupportedParameter
from server.text.templates.abilities import Abilities
from server.text.tokens.encoding import Shield, clean

Message = dict[str, Any]

TYPED = "typed"  # in a part of the assistant's content: text that isn't its own
BETWEEN = "\n\n"  # texts of several turns that become one
_ROLES = {"developer": "system", "function": "tool"}
_REASONING = ("reasoning_content", "reasoning")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn.

    Attributes:
        texts: what is said, shielded; empty ones leave no trace.
        thoughts: the assistant's reasoning.
        calls: its tool calls.
        fields: a message's other members.
    """

    role: str
    texts: list[str]
    thoughts: list[str] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    fields: Message = field(default_factory=dict)

    @property
    def speaks(self) -> bool:
        """Whether it counts where a template wants user and assistant to alternate."""
        return self.role in ("user", "assistant") and not self.calls


# ---------------------------------------------------------------- messages → turns
def turns(messages: Iterable[Message], shield: Shield) -> list[Turn]:
    """A client's messages as turns, one for one."""
    return [_turn(message, shield) for message in _named(messages)]


def _turn(message: Message, shield: Shield) -> Turn:
    said_as: str = message["role"]
    role = _ROLES.get(said_as, said_as)
    texts = ["".join(_shielded(message.get("content"), shield, own=role == "assistant"))]
    apart = ("role", "content", "tool_calls", *_REASONING)
    fields = {name: shield.hide_all(value) for name, value in message.items() if value is not None}
    thoughts = []
    if role == "assistant":
        thoughts = [clean(message[name]) for name in _REASONING if message.get(name)]
    rest = {name: value for name, value in fields.items() if name not in apart}
    return Turn(role, texts, thoughts[:1], fields.get("tool_calls") or [], rest)


def _shielded(content: Any, shield: Shield, *, own: bool) -> Iterator[str]:
    """Text parts, to be joined with nothing between them."""
    parts = content
    if not isinstance(content, list):
        parts = [{"type": "text", "text": content}]
    if not own:
        yield shield.hide("".join(map(_text, parts)))
        return
    for part in parts:
        yield shield.hide(_text(part)) if part.get(TYPED) else clean(_text(part))


def _text(part: Message) -> str:
    if part.get("type") != "text":
        raise UnsupportedParameter(f"content parts of type {part.get('type')!r} aren't offered", param="messages")
    return part.get("text") or ""


def _named(messages: Iterable[Message]) -> Iterator[Message]:
    """Tool messages get the name of the function they answer for, which some templates want."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id") or ""] = call["function"]["name"]
        name = names.get(message.get("tool_call_id") or "")
        yield message if name is None or message.get("name") else message | {"name": name}


# ---------------------------------------------------------------- turns → messages
def message(turn: Turn, able: Abilities) -> Message:
    """The turn as a template of these abilities takes it."""
    text = BETWEEN.join(filter(None, turn.texts))
    content: str | list[dict[str, str]] = text
    if able.parts:
        content = [{"type": "text", "text": text}]
    made: Message = turn.fields | {"role": turn.role, "content": content}
    if turn.thoughts:
        made["reasoning_content"] = BETWEEN.join(turn.thoughts)
    if turn.calls:  # some templates ask whether there is a list at all
        made["tool_calls"] = turn.calls
    if able.short_ids:
        return _with_short_ids(made)
    return made


def _with_short_ids(made: Message) -> Message:
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [call | {"id": _short(call.get("id") or str(n))} for n, call in enumerate(calls)]
    if made.get("tool_call_id") is not None:
        made["tool_call_id"] = _short(made["tool_call_id"])
    return made


def _short(name: str) -> str:
    if _SHORT_ID.fullmatch(name):
        return name
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:9]
