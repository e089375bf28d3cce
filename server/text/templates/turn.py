"""One turn of a conversation: a message on its way from the client to the chat template.

Owns the border between text, which is shielded here, and what structures a turn. The assistant's text is shielded like
any other: an answer may quote a control token, and a client sends back what it read. Only reasoning that it begins with
keeps its tags, by which templates know it. Runs in the server's worker thread; pure. Never decides which turns a
template can take.
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

OWN = "own"  # in a part of the assistant's content: tags that the server wrote, never a client
Think = tuple[str, str]  # the tags around reasoning
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
def turns(messages: Iterable[Message], shield: Shield, think: Think | None = None) -> list[Turn]:
    """A client's messages as turns, one for one."""
    return [_turn(message, shield, think) for message in _named(messages)]


def _turn(message: Message, shield: Shield, think: Think | None) -> Turn:
    said_as: str = message["role"]
    role = _ROLES.get(said_as, said_as)
    others = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    fields = {name: shield.hide_all(value) for name, value in others.items()}
    thoughts = []
    if role == "assistant":
        text = _own(message.get("content"), shield, think)
        thoughts = [fields[name] for name in _REASONING if fields.get(name)]
    else:
        text = shield.hide("".join(map(_text, _parts(message.get("content")))))
    apart = ("tool_calls", *_REASONING)
    rest = {name: value for name, value in fields.items() if name not in apart}
    return Turn(role, [text], thoughts[:1], fields.get("tool_calls") or [], rest)


def _parts(content: Any) -> list[Message]:
    """Text parts, to be joined with nothing between them."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _own(content: Any, shield: Shield, think: Think | None) -> str:
    """What the assistant said."""
    said = []
    for part in _parts(content):
        text = _text(part)
        if part.get(OWN):
            said.append(clean(text))
        elif think and not said and text.lstrip().startswith(think[0]):
            said.append(_reasoned(text, shield, think))
        else:
            said.append(shield.hide(text))
    return "".join(said)


def _reasoned(text: str, shield: Shield, think: Think) -> str:
    """A text that begins with reasoning, whose end it may lack."""
    before, start, rest = text.partition(think[0])
    thought, end, answer = rest.partition(think[1])
    return before + start + shield.hide(thought) + end + shield.hide(answer)


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
