"""Conversations of every make, and what must hold for the prompts that they become.

Owns the letters that conversations are made of, and the checks. `tests/test_conversation.py` tries them on small
templates, `loadtests/real_templates.py` on real ones. Never starts a server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from server.api import chat
from server.api.input import generic_tools, refusals, tools
from server.api.input.schema import ChatRequest
from server.api.input.turns import spoken
from server.api.prepare import render
from server.errors import RequestError
from server.settings import load
from server.text.templates.conversation import fit
from server.text.tokenizer import Tokenizer
from server.text.tokens.encoding import Shield

# S system, V developer, U user, A assistant, N assistant without content, R assistant with reasoning;
# C a call, B one beside text, D two calls at once; T the result of the call that waits longest.
BLOCKS = ("S", "U", "A", "CT", "BT", "DTT")
MORE_BLOCKS = (*BLOCKS, "V", "N", "R", "CST", "DTST", "DSTT", "BTU", "UU", "AA", "CTCT", "SS")
ROLES = {"S": "system", "V": "developer", "U": "user", "T": "tool"}
CALLS = {"C": 1, "B": 1, "D": 2}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks it up.", "parameters": {"type": "object", "properties": {}}},
}
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a client sends.

    Attributes:
        letters: what it is made of.
        messages: as the API takes them.
        words: texts that its prompt must show, in this order.
        offers: whether tools come with it.
    """

    letters: str
    messages: list[Message]
    words: list[str]
    offers: bool

    @property
    def body(self) -> dict[str, Any]:
        return {"messages": self.messages} | ({"tools": [TOOL]} if self.offers else {})


def every(most: int, blocks: Sequence[str] = BLOCKS) -> Iterator[str]:
    """All rows of up to so many blocks."""
    for length in range(1, most + 1):
        yield from map("".join, product(blocks, repeat=length))


def some(count: int, longest: int, seed: int) -> Iterator[str]:
    """Rows of blocks, drawn."""
    draw = random.Random(seed)
    for _ in range(count):
        yield "".join(draw.choices(MORE_BLOCKS, k=draw.randint(1, longest)))


def conversation(letters: str, *, offers: bool, typed: str = "") -> Conversation:
    """The conversation of some letters; what isn't the assistant's own also says `typed`."""
    messages: list[Message] = []
    words: list[str] = []
    waiting: list[str] = []

    def word() -> str:
        words.append(f"word{len(words):02}q")
        return words[-1]

    for place, letter in enumerate(letters):
        message: Message = {"role": ROLES.get(letter, "assistant")}
        if letter not in "CDN":
            said = word() + (f" {typed}" if letter in ROLES and typed else "")
            message["content"] = (
                said if place % 3 else [{"type": "text", "text": part} for part in (said[:3], said[3:])]
            )
        elif place % 2:
            message["content"] = None
        if letter == "R":
            message["reasoning_content"] = "hmm"
        if letter in CALLS:
            ids = [f"call_{place}_{number}" for number in range(CALLS[letter])]
            message["tool_calls"] = [call(one, f"{word()} {typed}".strip()) for one in ids]
            waiting += ids
        if letter == "T":
            message["tool_call_id"] = waiting.pop(0)
        messages.append(message)
    return Conversation(letters, messages, words, offers)


def call(name: str, value: str) -> Message:
    arguments = {"key": value}
    return {
        "id": name,
        "type": "function",
        "function": {"name": "look_up", "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


# ---------------------------------------------------------------- checks
def prompt(tokenizer: Tokenizer, asked: Conversation) -> list[int]:
    """The ids that the model reads; raises RequestError as the server would answer."""
    request = ChatRequest.model_validate(asked.body)
    refusals.check_chat(request, load({}))
    return render(tokenizer, chat.conversation(request, load({}))).ids


def fault(tokenizer: Tokenizer, letters: str, *, offers: bool, typed: str = "") -> str | None:
    """What is wrong with the prompt of a conversation, or None."""
    asked = conversation(letters, offers=offers, typed=typed)
    try:
        ids = prompt(tokenizer, asked)
    except RequestError as error:
        return f"{letters}: refused: {error}"
    text = tokenizer.decode(ids, special=True)
    if lost := [word for word in asked.words if word not in text]:
        return f"{letters}: lost {lost}"
    if twice := [word for word in asked.words if text.count(word) > 1]:
        return f"{letters}: repeated {twice}"
    places = [text.find(word) for word in asked.words]
    if places != sorted(places):
        return f"{letters}: out of order"
    return _forged(tokenizer, ids, asked, typed) if typed else None


def _forged(tokenizer: Tokenizer, ids: list[int], asked: Conversation, typed: str) -> str | None:
    harmless = prompt(tokenizer, conversation(asked.letters, offers=asked.offers, typed="x"))
    control = {*tokenizer.encode(typed, special=True)} - {*tokenizer.encode(typed)}
    found, wanted = ([i for i in whole if i in control] for whole in (ids, harmless))
    return None if found == wanted else f"{asked.letters}: typed text became control"


def growth_fault(tokenizer: Tokenizer, letters: str) -> str | None:
    """Whether an earlier prompt's turns change when the conversation goes on, as far as it is in our hands."""
    asked = conversation(letters, offers=True)
    for end in range(1, len(letters)):
        before, answer = letters[:end], letters[end]
        if ROLES.get(answer) is None and before[-1] in ROLES:
            earlier, later = (_turns(tokenizer, messages) for messages in (asked.messages[:end], asked.messages))
            if later[: len(earlier)] != earlier:
                return f"{letters}: the turns of {before} change"
    return None


def _turns(tokenizer: Tokenizer, messages: list[Message]) -> list[Message]:
    request = ChatRequest.model_validate({"messages": messages, "tools": [TOOL]})
    said, _ = generic_tools.rewritten(tokenizer, spoken(request.messages), tools.read(request).for_template)
    return fit(said, tokenizer.able, Shield([]))
